# SPDX-License-Identifier: Apache-2.0
"""Routed experts with per-token FP8 activations and per-channel FP8 weights."""

from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import torch

from llm_quant_rocm import hardware, reference, tuning
from llm_quant_rocm.backends import Backend, Choice, choose
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.ops._register import register
from llm_quant_rocm.ops._routing import check_device, check_routing, routed
from llm_quant_rocm.ops._row_call import HALF_OR_SINGLE, RowCall, triton_refusal

NAME = "ptpc_moe"


def _triton(
    tokens: RoutedTokens,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    activation: str,
    fmt: fp8.Fp8Format,
    batch_invariant: bool = False,
) -> torch.Tensor:
    device = hardware.detect(tokens.x.device)
    kernels = kernels_of(device.arch)
    config = _config(device, tokens.fair_slots(w2.shape[0]), *w2.shape, batch_invariant)
    return kernels.ptpc_moe(tokens, w13, w13_scale, w2, w2_scale, activation, fmt, device, config)


@cache
def kernels_of(arch: str) -> ModuleType:
    """The kernels of an architecture; importing them imports Triton."""
    if arch == "sm_90":
        from llm_quant_rocm.kernels import ptpc_moe_hopper

        return ptpc_moe_hopper
    from llm_quant_rocm.kernels import ptpc_moe

    return ptpc_moe


@lru_cache(tuning.KEPT)
def _config(
    device: hardware.Hardware, slots: int, experts: int, hidden: int, inner: int, batch_invariant: bool = False
) -> Any:
    kernels = kernels_of(device.arch)
    measured = tuning.lookup(NAME, device.arch, slots / experts, experts, hidden, inner)
    if measured is None:
        config = kernels.default_config(device, slots, experts, hidden, inner)
    else:
        config = tuning.configured(NAME, device.arch, measured, kernels.config_of)
    return kernels.batch_invariant(config, device, experts, hidden, inner) if batch_invariant else config


def _reference(
    tokens: RoutedTokens,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    activation: str,
    fmt: fp8.Fp8Format,
    batch_invariant: bool = False,
) -> torch.Tensor:
    weights, ids = tokens.weights, tokens.local_ids(w2.shape[0])
    return reference.ptpc_moe(tokens.x, w13, w13_scale, w2, w2_scale, weights, ids, activation, fmt, batch_invariant)


# A backend runs (tokens, w13, w13_scale, w2, w2_scale, activation, the flavour of FP8, batch_invariant), with nothing
# of size 0 and everything contiguous, for [T, H].
BACKENDS = (
    Backend("triton", triton_refusal, _triton),
    Backend("reference", lambda call: None, _reference),
)


@cache
def _choose(call: RowCall) -> Choice:
    return choose(NAME, BACKENDS, call)


def _validate(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    expert_map: torch.Tensor | None,
    padding: torch.Tensor | None,
    batch_invariant: bool,
) -> None:
    if x.dtype not in HALF_OR_SINGLE:
        raise TypeError(f"{NAME}: x is {x.dtype}, not bf16, fp16 or fp32")
    experts, hidden, inner = w2.shape if w2.dim() == 3 else (-1, -1, -1)  # which no other shape has
    if x.shape[1:] != (hidden,) or w13.shape != (experts, 2 * inner, hidden):
        raise ValueError(
            f"{NAME}: x {tuple(x.shape)}, w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} do not fit: "
            "[T, H], [E, 2I, H] and [E, H, I] are needed"
        )
    flavour = hardware.detect(x.device).fp8_dtype
    for label, codes, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
        if codes.dtype != flavour:
            raise TypeError(
                f"{NAME}: {label} is {codes.dtype}, but {x.device} computes in {flavour}; quantize it for it"
            )
        if scale.dtype != torch.float32 or scale.shape != (*codes.shape[:2], 1):
            raise (ValueError if scale.dtype == torch.float32 else TypeError)(
                f"{NAME}: {label}_scale must be fp32 of shape {(*codes.shape[:2], 1)}, "
                f"not {scale.dtype} of shape {tuple(scale.shape)}"
            )
        if not codes.is_contiguous() or not scale.is_contiguous():
            raise ValueError(f"{NAME}: {label} and {label}_scale must be contiguous")
    for label, tensor in (("w13", w13), ("w2", w2), ("w13_scale", w13_scale), ("w2_scale", w2_scale)):
        check_device(NAME, label, tensor, x)
    check_routing(NAME, x, topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, padding)


def _implementation(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    expert_map: torch.Tensor | None,
    padding: torch.Tensor | None,
    batch_invariant: bool,
) -> torch.Tensor:
    if 0 in (*topk_ids.shape, *w2.shape):
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    call = RowCall(hardware.detect(x.device), max(x.shape[1], w2.shape[2]))
    tokens = routed(x, topk_weights, topk_ids, apply_router_weight_on_input, expert_map, padding)
    fmt = fp8.of_dtype(w13.dtype)
    return _choose(call).backend.run(tokens, w13, w13_scale, w2, w2_scale, activation, fmt, batch_invariant)


_operator = register(
    "ptpc_moe(Tensor x, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor topk_weights, "
    "Tensor topk_ids, str activation, bool apply_router_weight_on_input, Tensor? expert_map, Tensor? padding, "
    "bool batch_invariant) -> Tensor",
    _validate,
    _implementation,
    lambda x, *rest: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)


def ptpc_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
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

    Expert e computes (activation(gate) * up) . w2[e]^T with [gate, up] = x . w13[e]^T; x and the inner activations are
    quantized per token. x [T, H] is bf16, fp16 or fp32; w13 [E, 2I, H] (gate rows, then up rows) and w2 [E, H, I] are
    E4M3 codes of the device's flavour with fp32 scales [E, 2I, 1] and [E, H, 1]; topk_weights and topk_ids [T, k].
    Any number of tokens, none included; experts may have none.

    `expert_map`, int32 or int64 [all experts], gives the index into w13 and w2 of each expert, from 0 to E - 1, or -1
    for one that is not on this rank and adds nothing; nor does an id that is negative or too large. Nobody looks for
    other values in it: the host would wait for the GPU. `padding`, int32 or int64 [T], is negative for tokens that only
    fill up a batch: no expert computes them, and their output is zeros. `apply_router_weight_on_input` (k = 1 only)
    multiplies x instead of the output. The activation is silu, gelu or gelu_tanh. Rounding points are those of
    reference/ptpc_moe.py; results do not depend on timing. With `batch_invariant` a token's bits do not depend on the
    tokens beside it. On Hopper the matrix units add FP8 products with fewer bits than fp32 ("fast accumulation").

    Raises:
        TypeError: a dtype, also of `expert_map` or `padding`, or an FP8 flavour that the device does not compute in.
        ValueError: shapes, devices, strides, the activation, or a router weight on the input with k > 1.
    """
    return _operator(
        x,
        w13,
        w13_scale,
        w2,
        w2_scale,
        topk_weights,
        topk_ids,
        activation,
        apply_router_weight_on_input,
        expert_map,
        padding,
        batch_invariant,
    )
