# SPDX-License-Identifier: Apache-2.0
"""Routed experts: the reference's numbers, for every activation, tile, kind of routing and dtype."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llm_quant_rocm import ops, reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import act_and_mul_quant, ptpc_moe, routing
from tests.amd.budget import FP8_MATRIX, Budget
from tests.amd.operators import decoding, shared_out
from tests.inputs import DTYPE_IDS, DTYPES
from tests.moe_inputs import experts, relative_error

# Those of both quantizations and of routing, which it launches too, are proven on their own.
BUDGETS = {"grouped_gemm_kernel": Budget(matrix=FP8_MATRIX, more=decoding)}


def arguments(hardware: Hardware, *shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """`experts` in the flavour of the architecture."""
    found = experts(*shape, dtype=dtype)
    if hardware.fp8_dtype != fp8.OCP.dtype:
        for name in ("w13", "w2"):
            found[name], found[f"{name}_scale"] = fp8.ocp_to_fnuz(found[name], found[f"{name}_scale"])
    return found


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def launch(tokens: int, activation: str, count: int = 128, hidden: int = 2048, inner: int = 768) -> None:
        w13 = torch.empty(count, 2 * inner, hidden, dtype=hardware.fp8_dtype)
        w2 = torch.empty(count, hidden, inner, dtype=hardware.fp8_dtype)
        ids = torch.zeros(tokens, 8, dtype=torch.int32)
        ops.ptpc_moe(
            torch.empty(tokens, hidden, dtype=torch.bfloat16), w13, torch.empty(count, 2 * inner, 1),
            w2, torch.empty(count, hidden, 1), torch.empty(tokens, 8), ids, activation=activation,
        )  # fmt: skip

    # Qwen3-30B-A3B: few slots an expert, in narrow tiles, half as many and whole ones, some, and many: the tiles of
    # ptpc_moe.default_config.
    cases = {f"{tokens} tokens": partial(launch, tokens, "silu") for tokens in (1, 2, 64, 1024, 2048)}
    cases |= {"1 token of DeepSeek-V3 over eight ranks": partial(launch, 1, "silu", 256, 7168, 256)}
    return cases | {f"1 token, {name}": partial(launch, 1, name) for name in ("gelu", "gelu_tanh")}


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    fmt = fp8.of_dtype(hardware.fp8_dtype)

    def check(given: dict[str, Any], activation: str = "silu", expert_map: torch.Tensor | None = None) -> None:
        found = ops.ptpc_moe(**given, activation=activation, expert_map=expert_map)
        ids = given["topk_ids"] if expert_map is None else expert_map[given["topk_ids"].long()]
        tensors = [given[name] for name in ("x", "w13", "w13_scale", "w2", "w2_scale", "topk_weights")]
        expected = reference.ptpc_moe(*tensors, ids, activation, fmt)
        assert found.dtype == expected.dtype
        # A code of the inner activations that sat at a boundary may move by one.
        assert relative_error(found, expected.double()) < 0.01

    def shape(*sizes: int, dtype: torch.dtype = torch.bfloat16, activation: str = "silu") -> None:
        check(arguments(hardware, *sizes, dtype=dtype), activation)

    def absent_experts() -> None:
        given = arguments(hardware, 20, 6, 3, 64, 32)
        expert_map = torch.tensor([-1, 0, 1, -1, 2, -1], dtype=torch.int32)
        given |= {name: given[name][expert_map >= 0] for name in ("w13", "w13_scale", "w2", "w2_scale")}
        check(given, expert_map=expert_map)

    def in_two_launches() -> None:
        with patch.object(routing, "MANY_READS", 0):
            absent_experts()

    def fewer_programs_than_slots() -> None:
        with patch.object(act_and_mul_quant, "PROGRAMS", 3):
            absent_experts()

    def padding() -> None:
        given = arguments(hardware, 20, 6, 3, 64, 32)
        places = torch.arange(20) % 7 - 3
        found, alone = ops.ptpc_moe(**given, padding=places), ops.ptpc_moe(**given)
        assert torch.equal(found, torch.where(places[:, None] < 0, 0, alone))

    def nan() -> None:
        """A token with NaN spoils its own row and no other."""
        given = arguments(hardware, 5, 4, 2, 64, 32)
        given["x"][2, 7] = torch.nan
        assert ops.ptpc_moe(**given).isnan().all(dim=1).tolist() == [False, False, True, False, False]

    def other_flavour() -> None:
        given = arguments(hardware, 2, 4, 2, 64, 32)
        given["w2"] = given["w2"].view((fp8.FNUZ if fmt is fp8.OCP else fp8.OCP).dtype)
        with pytest.raises(TypeError, match=f"w2 is .*computes in {hardware.fp8_dtype}"):
            ops.ptpc_moe(**given)

    def wide_tiles() -> None:
        """As with more experts than are executed here."""
        given = arguments(hardware, 60, 8, 2, 160, 144)
        w13, w13_scale, w2, w2_scale = (given[name] for name in ("w13", "w13_scale", "w2", "w2_scale"))
        tokens = RoutedTokens(given["x"], given["topk_weights"], given["topk_ids"])
        config = ptpc_moe.default_config(hardware, 4096, 1024, 2048, 768)
        assert config.w13.block_n == config.w2.block_n == (128 if hardware.fp8_units else 64)
        found = ptpc_moe.ptpc_moe(tokens, w13, w13_scale, w2, w2_scale, "silu", fmt, hardware, config)
        expected = reference.ptpc_moe(
            given["x"], w13, w13_scale, w2, w2_scale, given["topk_weights"], given["topk_ids"], "silu", fmt
        )
        assert relative_error(found, expected.double()) < 0.01

    cases = {
        "one token": partial(shape, 1, 8, 2, 128, 96),
        "one token, long sums": partial(shape, 1, 4, 2, 1024, 256),
        "wide tiles": wide_tiles,
        "every expert": partial(shape, 5, 4, 4, 64, 48),
        "many experts": partial(shape, 7, 64, 8, 32, 16),
        "ragged": partial(shape, 20, 3, 3, 50, 23),
        "some slots an expert": partial(shape, 60, 4, 2, 128, 64),
        "many slots an expert": partial(shape, 110, 2, 2, 128, 64),
        "many slots, ragged": partial(shape, 110, 2, 2, 72, 40),
        **{f"{name}": partial(shape, 6, 4, 2, 64, 32, activation=name) for name in ("gelu", "gelu_tanh")},
        **{f"{name}": partial(shape, 6, 4, 2, 64, 32, dtype=d) for d, name in zip(DTYPES, DTYPE_IDS, strict=True)},
        "absent experts": absent_experts,
        "many slots, in two launches": in_two_launches,
        "fewer programs than slots": fewer_programs_than_slots,
        "padding": padding,
        "NaN": nan,
        "the other flavour is refused": other_flavour,
    }
    return shared_out(cases, hardware)
