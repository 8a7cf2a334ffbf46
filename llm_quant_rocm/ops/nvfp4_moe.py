# SPDX-License-Identifier: Apache-2.0
"""Routed experts with 16-bit activations and NVFP4 weights."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from llm_quant_rocm import hardware, reference, tuning
from llm_quant_rocm.backends import Backend, Choice, choose
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.ops._register import register
from llm_quant_rocm.ops._routing import check_device, check_routing, routed
from llm_quant_rocm.ops.nvfp4_gemm import HALF, kernels_of
from llm_quant_rocm.ops.nvfp4_weight import PreparedNvFp4Weight, check_weight, not_for_kernels, not_rows, rows_of_weight

NAME = "nvfp4_moe"


class MoeCall(NamedTuple):
    """A call's facts that decide its backend and configuration. `hidden` and `inner` are H and I of w13 [E, 2I, H] and
    w2 [E, H, I]."""

    hardware: hardware.Hardware
    experts: int
    hidden: int
    inner: int
    layouts: tuple[str, str]
    batch_invariant: bool = False


def _reference(
    tokens: RoutedTokens, w13: PreparedNvFp4Weight, w2: PreparedNvFp4Weight, activation: str, call: MoeCall
) -> torch.Tensor:
    weights, ids = tokens.weights, tokens.local_ids(call.experts)
    experts = rows_of_weight(w13), rows_of_weight(w2)
    return reference.nvfp4_moe(tokens.x, *experts, weights, ids, activation, batch_invariant=call.batch_invariant)


def _triton_refusal(call: MoeCall) -> str | None:
    arch, (w13, w2) = call.hardware.arch, call.layouts
    return not_for_kernels(arch, w13, gate_up=True) or not_for_kernels(arch, w2)


def _run_triton(
    tokens: RoutedTokens, w13: PreparedNvFp4Weight, w2: PreparedNvFp4Weight, activation: str, call: MoeCall
) -> torch.Tensor:
    from llm_quant_rocm.kernels.nvfp4_moe import nvfp4_moe

    kernels, slots = kernels_of(call.hardware.arch), tokens.fair_slots(call.experts)
    config = _config(call.hardware, slots, call.experts, call.hidden, call.inner, call.batch_invariant)
    return nvfp4_moe(
        tokens,
        (w13.codes, w13.scales, w13.global_scale),
        (w2.codes, w2.scales, w2.global_scale),
        activation,
        call.hardware,
        kernels.expert_products,
        config,
    )


@lru_cache(tuning.KEPT)
def _config(
    device: hardware.Hardware, slots: int, experts: int, hidden: int, inner: int, batch_invariant: bool = False
) -> Any:
    from llm_quant_rocm.kernels.pair_config import PairConfig

    kernels = kernels_of(device.arch)
    measured = tuning.lookup(NAME, device.arch, slots / experts, experts, hidden, inner)
    if measured is None:
        config = kernels.moe_config(slots, experts, hidden, inner, device)
    else:
        config = tuning.configured(NAME, device.arch, measured, lambda fields: PairConfig.of(fields, kernels.config_of))
    if batch_invariant:
        return PairConfig(kernels.batch_invariant(config.w13), kernels.batch_invariant(config.w2))
    return config


# A backend runs (tokens, w13, w2, activation, call), with nothing of size 0 and everything contiguous, for [T, H].
BACKENDS = (
    Backend("triton", _triton_refusal, _run_triton),
    Backend("reference", lambda call: not_rows(call.layouts[0]) or not_rows(call.layouts[1]), _reference),
)


@cache
def _choose(call: MoeCall) -> Choice:
    return choose(NAME, BACKENDS, call)


def _validate(
    x: torch.Tensor,
    w13_codes: torch.Tensor,
    w13_scales: torch.Tensor,
    w13_global: torch.Tensor,
    w13_layout: str,
    w2_codes: torch.Tensor,
    w2_scales: torch.Tensor,
    w2_global: torch.Tensor,
    w2_layout: str,
    inner: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    expert_map: torch.Tensor | None,
    padding: torch.Tensor | None,
    batch_invariant: bool,
) -> None:
    if x.dtype not in HALF:
        raise TypeError(f"{NAME}: x is {x.dtype}, not bf16 or fp16")
    if x.dim() != 2:
        raise ValueError(f"{NAME}: x is [T, H]; got {tuple(x.shape)}")
    hidden, leading = x.shape[1], (w13_global.shape[0],)
    w13 = PreparedNvFp4Weight(w13_codes, w13_scales, w13_global, w13_layout, 2 * inner, hidden)
    w2 = PreparedNvFp4Weight(w2_codes, w2_scales, w2_global, w2_layout, hidden, inner)
    for label, weight in (("w13", w13), ("w2", w2)):
        check_weight(NAME, label, weight, leading)
        check_device(NAME, label, weight.codes, x)
    check_routing(NAME, x, topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, padding)


def _implementation(
    x: torch.Tensor,
    w13_codes: torch.Tensor,
    w13_scales: torch.Tensor,
    w13_global: torch.Tensor,
    w13_layout: str,
    w2_codes: torch.Tensor,
    w2_scales: torch.Tensor,
    w2_global: torch.Tensor,
    w2_layout: str,
    inner: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    expert_map: torch.Tensor | None,
    padding: torch.Tensor | None,
    batch_invariant: bool,
) -> torch.Tensor:
    experts, hidden = w2_global.shape
    if 0 in (*topk_ids.shape, experts, hidden, inner):
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    call = MoeCall(hardware.detect(x.device), experts, hidden, inner, (w13_layout, w2_layout), batch_invariant)
    w13 = PreparedNvFp4Weight(w13_codes, w13_scales, w13_global, w13_layout, 2 * inner, hidden)
    w2 = PreparedNvFp4Weight(w2_codes, w2_scales, w2_global, w2_layout, hidden, inner)
    tokens = routed(x, topk_weights, topk_ids, apply_router_weight_on_input, expert_map, padding)
    return _choose(call).backend.run(tokens, w13, w2, activation, call)


_operator = register(
    "nvfp4_moe(Tensor x, Tensor w13_codes, Tensor w13_scales, Tensor w13_global, str w13_layout, Tensor w2_codes, "
    "Tensor w2_scales, Tensor w2_global, str w2_layout, SymInt inner, Tensor topk_weights, Tensor topk_ids, "
    "str activation, bool apply_router_weight_on_input, Tensor? expert_map, Tensor? padding, "
    "bool batch_invariant) -> Tensor",
    _validate,
    _implementation,
    lambda x, *rest: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)


def nvfp4_moe(
    x: torch.Tensor,
    w13: PreparedNvFp4Weight | NvFp4Weight,
    w2: PreparedNvFp4Weight | NvFp4Weight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Output [T, H] of a mixture of experts: each token's experts, weighted and added, in x's dtype.

    Expert e computes (activation(gate) * up) . w2[e]^T with [gate, up] = x . w13[e]^T. x [T, H] is bf16 or fp16;
    w13 [E, 2I, H] (gate rows, then up rows) and w2 [E, H, I] are what `prepare_nvfp4_weight` made at load, or
    `NvFp4Weight`s, which kernels refuse; H and I are multiples of 16; topk_weights and topk_ids [T, k]. Any number of
    tokens, none included; experts may have none. Every expert, and within it gate and up, keeps its own global scale.

    `expert_map`, int32 or int64 [all experts], gives the index into w13 and w2 of each expert, from 0 to E - 1, or -1
    for one that is not on this rank and adds nothing; nor does an id that is negative or too large. Nobody looks for
    other values in it: the host would wait for the GPU. `padding`, int32 or int64 [T], is negative for tokens that only
    fill up a batch: no expert computes them, and their output is zeros. `apply_router_weight_on_input` (k = 1 only)
    multiplies x instead of the output. The activation is silu, gelu or gelu_tanh. Rounding points are those of
    reference/nvfp4_moe.py; results do not depend on timing. With `batch_invariant` a token's bits do not depend on the
    tokens beside it.

    Raises:
        TypeError: a dtype, also of `expert_map` or `padding`.
        ValueError: shapes, devices, strides, the activation, or a router weight on the input with k > 1.
    """
    w13, w2 = (PreparedNvFp4Weight.in_rows(w) if isinstance(w, NvFp4Weight) else w for w in (w13, w2))
    experts, hidden = (w13.global_scale.shape[0], x.shape[-1]) if x.dim() else (0, 0)
    if not (w13.k == w2.n == hidden and w13.n == 2 * w2.k and w2.global_scale.shape[:-1] == (experts,)):
        raise ValueError(
            f"{NAME}: x {tuple(x.shape)}, w13 {_shape(w13)} and w2 {_shape(w2)} do not fit: "
            "[T, H], [E, 2I, H] and [E, H, I] are needed"
        )
    return _operator(
        x,
        w13.codes,
        w13.scales,
        w13.global_scale,
        w13.layout,
        w2.codes,
        w2.scales,
        w2.global_scale,
        w2.layout,
        w2.k,
        topk_weights,
        topk_ids,
        activation,
        apply_router_weight_on_input,
        expert_map,
        padding,
        batch_invariant,
    )


def _shape(weight: PreparedNvFp4Weight) -> tuple[int, ...]:
    return (*weight.global_scale.shape[:-1], weight.n, weight.k)
