# SPDX-License-Identifier: Apache-2.0
"""ops.ptpc_moe on the CPU against float64."""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from llm_quant_rocm import ops
from tests.moe_inputs import assert_tokens_have_their_own_bits, experts, moe64, relative_error

# What is left are 16-bit roundings (2^-9 each) and inner codes that fp32 sums, not float64 ones, moved by one.
TOLERANCE = 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "count", "topk", "hidden", "inner"),
    [(1, 4, 1, 64, 32), (5, 4, 4, 64, 48), (33, 8, 2, 128, 96), (7, 256, 8, 32, 16), (40, 3, 3, 50, 23)],
)
def test_against_float64(tokens: int, count: int, topk: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    arguments = experts(tokens, count, topk, hidden, inner, dtype)
    out = ops.ptpc_moe(**arguments)
    assert out.dtype == dtype
    assert out.shape == (tokens, hidden)
    assert relative_error(out, moe64(arguments)) < TOLERANCE


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations(activation: str) -> None:
    arguments = experts(16, 4, 2, 64, 64)
    found = ops.ptpc_moe(**arguments, activation=activation)
    assert relative_error(found, moe64(arguments, activation)) < TOLERANCE


@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (96, 64)])
def test_the_longer_of_the_rows_that_are_quantized_decides(
    monkeypatch: pytest.MonkeyPatch, hidden: int, inner: int
) -> None:
    operator = import_module("llm_quant_rocm.ops.ptpc_moe")
    calls, choose = [], operator._choose
    monkeypatch.setattr(operator, "_choose", lambda call: calls.append(call) or choose(call))
    ops.ptpc_moe(**experts(2, 2, 1, hidden, inner))
    assert [call.columns for call in calls] == [96]


def test_an_outlier_costs_its_own_token_only() -> None:
    arguments = experts(8, 4, 2, 64, 64)
    before = ops.ptpc_moe(**arguments)
    arguments["x"][3] *= 1e4
    after = ops.ptpc_moe(**arguments)
    others = [token for token in range(8) if token != 3]
    assert torch.equal(before[others], after[others])
    assert relative_error(after[3], moe64(arguments)[3]) < TOLERANCE


def test_batch_invariant() -> None:
    """A token has the bits that it has alone; in fp32, which hides no order of sums."""
    arguments = experts(29, 4, 2, 200, 80, torch.float32)
    tokens = {name: arguments.pop(name) for name in ("x", "topk_weights", "topk_ids")}
    product = partial(ops.ptpc_moe, **arguments, batch_invariant=True)
    assert_tokens_have_their_own_bits(product, tokens, [(0, 1), (3, 20), (28, 29)])


def test_no_token() -> None:
    assert ops.ptpc_moe(**experts(0, 4, 2, 64, 32)).shape == (0, 64)


def test_ranks_of_expert_parallelism_add_up() -> None:
    arguments = experts(16, 6, 3, 64, 32, torch.float32)
    whole = ops.ptpc_moe(**arguments)
    parts = torch.zeros_like(whole)
    for mine in (torch.arange(6) < 2, torch.arange(6) >= 2):
        expert_map = torch.where(mine, mine.int().cumsum(0) - 1, -1).int()
        local = {name: arguments[name][mine] for name in ("w13", "w13_scale", "w2", "w2_scale")}
        parts += ops.ptpc_moe(**(arguments | local), expert_map=expert_map)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_padding_has_no_experts(dtype: torch.dtype) -> None:
    arguments = experts(8, 4, 2, 64, 32)
    alone = ops.ptpc_moe(**arguments)
    padding = torch.tensor([5, 0, -1, 7, -2, 1, 1, -1], dtype=dtype)
    real = padding >= 0
    arguments["x"][~real] = torch.nan
    found = ops.ptpc_moe(**arguments, padding=padding)
    assert torch.equal(found[real], alone[real])
    assert (found[~real] == 0).all()


def test_router_weight_on_the_input() -> None:
    arguments = experts(8, 4, 1, 64, 32)
    ones = arguments | {"topk_weights": torch.ones(8, 1)}
    scaled = ones | {"x": arguments["x"] * arguments["topk_weights"].to(torch.bfloat16)}
    found = ops.ptpc_moe(**arguments, apply_router_weight_on_input=True)
    assert torch.equal(found, ops.ptpc_moe(**scaled))


def test_under_torch_compile() -> None:
    arguments = experts(8, 4, 2, 64, 32)
    compiled = torch.compile(lambda **a: ops.ptpc_moe(**a), fullgraph=True)
    assert torch.equal(compiled(**arguments), ops.ptpc_moe(**arguments))


def test_the_operator_is_well_formed() -> None:
    arguments = experts(8, 4, 2, 64, 32)
    # The schema test compares the inputs before and after with allclose, which FP8 has not.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = torch.ops.llm_quant_rocm.ptpc_moe.default
    torch.library.opcheck(operator, (*arguments.values(), "silu", False, None, None, False), test_utils=checks)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(8, 64, dtype=torch.int32)}, TypeError, "x is torch.int32"),
        ({"x": torch.zeros(64)}, ValueError, r"x \(64,\), .* do not fit: \[T, H\]"),
        ({"w13": torch.zeros(64, 64)}, ValueError, r"w13 \(64, 64\) and .* do not fit"),
        ({"w2": torch.zeros(64, 32)}, ValueError, r"w2 \(64, 32\) do not fit"),
        ({"w13": torch.zeros(4, 60, 64)}, ValueError, r"w13 \(4, 60, 64\) and .* do not fit"),
        ({"x": torch.zeros(8, 60)}, ValueError, "do not fit"),
        ({"x": torch.zeros(7, 64)}, ValueError, "topk_ids"),
        ({"w13": torch.zeros(4, 64, 64, dtype=torch.float8_e4m3fnuz)}, TypeError, "w13 is torch.float8_e4m3fnuz"),
        ({"w2_scale": torch.zeros(4, 64, 1).half()}, TypeError, "w2_scale must be fp32 of .* not torch.float16"),
        ({"w2_scale": torch.zeros(64, 4, 1).transpose(0, 1)}, ValueError, "w2 and w2_scale must be contiguous"),
        ({"w2_scale": torch.zeros(4, 64)}, ValueError, "w2_scale must be fp32 of shape"),
        ({"topk_ids": torch.zeros(8, 2)}, TypeError, "topk_ids are integers"),
        ({"activation": "relu"}, ValueError, "activation 'relu' is not one of silu"),
        ({"apply_router_weight_on_input": True}, ValueError, "one expert a token"),
        ({"w2": torch.zeros(4, 32, 64).transpose(1, 2).to(torch.float8_e4m3fn)}, ValueError, "contiguous"),
        ({"expert_map": torch.zeros(4, dtype=torch.int32, device="meta")}, ValueError, "expert_map is on meta"),
        ({"padding": torch.zeros(8).bool()}, TypeError, r"padding has one int32 or int64 .* got torch.bool \(8,\)"),
        (
            {"padding": torch.zeros(7).int()},
            ValueError,
            r"padding has one .* each token, \[8\]; got torch.int32 \(7,\)",
        ),
        ({"padding": torch.zeros(8, dtype=torch.int32, device="meta")}, ValueError, "padding is on meta, x on cpu"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ops.ptpc_moe(**(experts(8, 4, 2, 64, 32) | change))
