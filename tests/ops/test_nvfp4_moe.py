# SPDX-License-Identifier: Apache-2.0
"""ops.nvfp4_moe on the CPU against float64."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.formats import nvfp4
from tests.inputs import assert_same
from tests.moe_inputs import assert_tokens_have_their_own_bits, relative_error
from tests.nvfp4_inputs import experts, moe64, select_experts, weight64

# What is left are 16-bit roundings, 2^-9 each, of h, a, y and the sum.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("tokens", "count", "topk", "hidden", "inner"),
    [(1, 4, 1, 64, 32), (5, 4, 4, 64, 48), (33, 8, 2, 128, 96), (7, 256, 8, 32, 16), (40, 3, 3, 80, 16)],
)
def test_against_float64(tokens: int, count: int, topk: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    arguments = experts(tokens, count, topk, hidden, inner, dtype)
    out = ops.nvfp4_moe(**arguments)
    assert out.dtype == dtype
    assert out.shape == (tokens, hidden)
    assert relative_error(out, moe64(arguments)) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations(activation: str) -> None:
    arguments = experts(16, 4, 2, 64, 64, torch.float16)
    found = ops.nvfp4_moe(**arguments, activation=activation)
    assert relative_error(found, moe64(arguments, activation)) < TOLERANCE[torch.float16]


def test_a_token_is_nobody_elses_business() -> None:
    arguments = experts(8, 4, 2, 64, 64)
    before = ops.nvfp4_moe(**arguments)
    arguments["x"][3] = float("nan")
    after = ops.nvfp4_moe(**arguments)
    others = [token for token in range(8) if token != 3]
    assert_same(before[others], after[others])
    assert after[3].isnan().all()


def test_batch_invariant() -> None:
    """A token has the bits that it has alone; of so many values that fp16 does not hide all orders of sums."""
    arguments = experts(29, 4, 2, 512, 80, torch.float16)
    tokens = {name: arguments.pop(name) for name in ("x", "topk_weights", "topk_ids")}
    product = partial(ops.nvfp4_moe, **arguments, batch_invariant=True)
    assert_tokens_have_their_own_bits(product, tokens, [(0, 1), (3, 20), (28, 29)])


def test_gate_and_up_keep_their_scales() -> None:
    """Eight times the scale of the up rows is eight times the result: it does not reach the gate's activation."""
    arguments = experts(8, 2, 1, 64, 32)
    w13 = arguments["w13"]
    moved = w13.global_scale.clone()
    moved[:, 32:] *= 8
    found = ops.nvfp4_moe(**arguments | {"w13": replace(w13, global_scale=moved)})
    assert_same(found, ops.nvfp4_moe(**arguments) * 8)


def test_no_token() -> None:
    assert ops.nvfp4_moe(**experts(0, 4, 2, 64, 32)).shape == (0, 64)


def test_no_expert_here() -> None:
    arguments = experts(8, 4, 2, 64, 32)
    for expert_map in (torch.full((4,), -1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)):
        assert (ops.nvfp4_moe(**arguments, expert_map=expert_map) == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("mapped", [False, True], ids=["ids", "mapped"])
def test_ids_of_nobody_add_nothing(mapped: bool, dtype: torch.dtype) -> None:
    """Routers give any id to a row of NaN; the kernels pass over the same ones (`tests/routing_inputs.py`)."""
    arguments = experts(8, 4, 2, 64, 32)
    expert_map = torch.tensor([3, 1, 0, 2], dtype=dtype) if mapped else None
    nothing = arguments["topk_weights"].clone()
    ids = arguments["topk_ids"].to(dtype)
    for token, nobody in enumerate((-1, -7, torch.iinfo(dtype).min, 4, 99, torch.iinfo(dtype).max)):
        ids[token, token % 2] = nobody
        nothing[token, token % 2] = 0
    found = ops.nvfp4_moe(**arguments | {"topk_ids": ids}, expert_map=expert_map)
    expected = ops.nvfp4_moe(**arguments | {"topk_weights": nothing}, expert_map=expert_map)
    assert torch.equal(found, expected)


def test_unsigned_ids() -> None:
    arguments = experts(8, 4, 2, 64, 32)
    found = ops.nvfp4_moe(**arguments | {"topk_ids": arguments["topk_ids"].to(torch.uint32)})
    assert_same(found, ops.nvfp4_moe(**arguments))


def test_ranks_of_expert_parallelism_add_up() -> None:
    arguments = experts(16, 6, 3, 64, 32, torch.float16)
    expected = moe64(arguments)
    parts = torch.zeros_like(expected)
    for mine in (torch.arange(6) < 2, torch.arange(6) >= 2):
        expert_map = torch.where(mine, mine.int().cumsum(0) - 1, -1).int()
        local = {name: select_experts(arguments[name], mine) for name in ("w13", "w2")}
        parts += ops.nvfp4_moe(**(arguments | local), expert_map=expert_map)
    assert relative_error(parts, expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_padding_has_no_experts(dtype: torch.dtype) -> None:
    arguments = experts(8, 4, 2, 64, 32)
    alone = ops.nvfp4_moe(**arguments)
    padding = torch.tensor([5, 0, -1, 7, -2, 1, 1, -1], dtype=dtype)
    real = padding >= 0
    arguments["x"][~real] = torch.nan
    found = ops.nvfp4_moe(**arguments, padding=padding)
    assert torch.equal(found[real], alone[real])
    assert (found[~real] == 0).all()


def test_router_weight_on_the_input() -> None:
    arguments = experts(8, 4, 1, 64, 32)
    ones = arguments | {"topk_weights": torch.ones(8, 1)}
    scaled = ones | {"x": arguments["x"] * arguments["topk_weights"].to(torch.bfloat16)}
    found = ops.nvfp4_moe(**arguments, apply_router_weight_on_input=True)
    assert_same(found, ops.nvfp4_moe(**scaled))


def test_under_torch_compile() -> None:
    arguments = experts(8, 4, 2, 64, 32)
    compiled = torch.compile(lambda **a: ops.nvfp4_moe(**a), fullgraph=True, backend="aot_eager")
    assert_same(compiled(**arguments), ops.nvfp4_moe(**arguments))


def test_the_operator_is_well_formed() -> None:
    arguments = experts(8, 4, 2, 64, 32)
    w13, w2 = arguments["w13"], arguments["w2"]
    tensors = (w13.codes, w13.scales, w13.global_scale, "row", w2.codes, w2.scales, w2.global_scale, "row", 32)
    routing = (arguments["topk_weights"], arguments["topk_ids"], "silu", False, None, None, False)
    # The schema test compares the inputs before and after with allclose, which FP8 has not.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = torch.ops.llm_quant_rocm.nvfp4_moe.default
    torch.library.opcheck(operator, (arguments["x"], *tensors, *routing), test_utils=checks)


def other(**sizes: int) -> Any:
    """w2 of experts of other sizes."""
    return experts(**{"tokens": 8, "count": 4, "topk": 2, "hidden": 64, "inner": 32} | sizes)["w2"]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(8, 64)}, TypeError, "x is torch.float32, not bf16 or fp16"),
        ({"x": torch.zeros(8, 48).half()}, ValueError, r"x \(8, 48\), w13 \(4, 64, 64\) and w2 \(4, 64, 32\) do not"),
        ({"x": torch.zeros(64).half()}, ValueError, r"x is \[T, H\]; got \(64,\)"),
        ({"w2": other(inner=48)}, ValueError, r"w2 \(4, 64, 48\) do not fit"),
        ({"w2": other(hidden=48)}, ValueError, r"w2 \(4, 48, 32\) do not fit"),
        ({"w2": other(count=3)}, ValueError, r"w2 \(3, 64, 32\) do not fit"),
        ({"w2": replace(other(), layout="mystery")}, ValueError, "w2: layout 'mystery' is not one of row"),
        ({"w2": replace(other(), scales=torch.zeros(4, 64, 2))}, TypeError, "w2.scales is torch.float32"),
        ({"w2": replace(other(), codes=torch.zeros(4, 64, 8).byte())}, ValueError, r"w2.codes has shape \(4, 64, 8\)"),
        ({"x": torch.zeros(7, 64).half()}, ValueError, "topk_ids"),
        ({"topk_ids": torch.zeros(8).int(), "topk_weights": torch.ones(8)}, ValueError, r"topk_ids \(8,\) and .* both"),
        ({"topk_weights": torch.ones(8, 3)}, ValueError, r"topk_weights \(8, 3\) must both be \[8, k\]"),
        ({"topk_weights": torch.ones(8, 2).int()}, TypeError, "topk_weights are floats; got .*, torch.int32"),
        ({"topk_ids": torch.zeros(8, 2)}, TypeError, "topk_ids are integers of 32 or 64 bits .* got torch.float32,"),
        # A masked load of bytes gives 255 for -1, which is an expert where there are 256.
        ({"topk_ids": torch.zeros(8, 2, dtype=torch.uint8)}, TypeError, "topk_ids are .* got torch.uint8,"),
        ({"topk_ids": torch.zeros(8, 2, dtype=torch.bool)}, TypeError, "topk_ids are .* got torch.bool,"),
        ({"expert_map": torch.zeros(4)}, TypeError, r"expert_map has one int32 .* got torch.float32 \(4,\)"),
        ({"expert_map": torch.zeros(2, 2).int()}, ValueError, r"expert_map has one int32 .* torch.int32 \(2, 2\)"),
        ({"activation": "relu"}, ValueError, "activation 'relu' is not one of silu"),
        ({"apply_router_weight_on_input": True}, ValueError, "one expert a token"),
        ({"expert_map": torch.zeros(4, dtype=torch.int32, device="meta")}, ValueError, "expert_map is on meta"),
        ({"padding": torch.zeros(8).bool()}, TypeError, r"padding has one int32 or int64 .* got torch.bool \(8,\)"),
        (
            {"padding": torch.zeros(7).int()},
            ValueError,
            r"padding has one .* each token, \[8\]; got torch.int32 \(7,\)",
        ),
        ({"padding": torch.zeros(8, dtype=torch.int32, device="meta")}, ValueError, "padding is on meta, x on cpu"),
        ({"topk_weights": torch.ones(8, 2, device="meta")}, ValueError, "topk_weights is on meta, x on cpu"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"nvfp4_moe: .*{words}"):
        ops.nvfp4_moe(**(experts(8, 4, 2, 64, 32) | change))


def w4a4_arguments(**sizes: int) -> dict[str, Any]:
    """`experts` with the encoding scales of their inputs, another for each expert."""
    arguments = experts(**{"tokens": 9, "count": 4, "topk": 2, "hidden": 64, "inner": 32} | sizes, dtype=torch.float16)
    for name in ("w13", "w2"):
        weight = arguments[name]
        arguments[name] = nvfp4.NvFp4Weight(weight.codes, weight.scales, weight.global_scale)
    count = arguments["w13"].codes.shape[0]
    return arguments | {"input_scales": (2.0 ** torch.arange(count) * 100, 2.0 ** torch.arange(count) * 300)}


def test_activations_in_nvfp4() -> None:
    """Token by token, slot by slot: both inputs go through NVFP4 under their expert's scale, and back."""
    arguments = w4a4_arguments()
    x, (scales13, scales2) = arguments["x"], arguments["input_scales"]
    w13, w2 = (weight64(arguments[name]) for name in ("w13", "w2"))
    expected = torch.zeros_like(x, dtype=torch.float64)
    for token, ids in enumerate(arguments["topk_ids"].tolist()):
        for slot, expert in enumerate(ids):
            outer = nvfp4.fake_quantize_activation(x[token], scales13[expert]).double()
            gate, up = (w13[expert] @ outer).half().double().chunk(2)
            inner = nvfp4.fake_quantize_activation((torch.nn.functional.silu(gate) * up).half(), scales2[expert])
            expected[token] += arguments["topk_weights"][token, slot].double() * (w2[expert] @ inner.double())
    found = ops.nvfp4_moe_w4a4(**arguments)
    assert relative_error(found, expected) < 2 * TOLERANCE[torch.float16]
    exact = ops.nvfp4_moe(**{name: value for name, value in arguments.items() if name != "input_scales"} | {
        name: ops.prepare_nvfp4_weight(arguments[name]) for name in ("w13", "w2")
    })  # fmt: skip
    assert relative_error(exact, expected) > 0.02


def test_autocast_and_gradients_stay_outside_of_activations_in_nvfp4() -> None:
    """As of the operators that are registered (`tests/ops/test_register.py`)."""
    arguments = w4a4_arguments()
    expected = ops.nvfp4_moe_w4a4(**arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(ops.nvfp4_moe_w4a4(**arguments), expected)
    found = ops.nvfp4_moe_w4a4(**arguments | {"x": arguments["x"].requires_grad_()})
    assert not found.requires_grad
    assert_same(found, expected)


def test_a_weight_that_is_not_prepared_is_read_as_it_is() -> None:
    arguments = w4a4_arguments()
    del arguments["input_scales"]
    prepared = {name: ops.prepare_nvfp4_weight(arguments[name]) for name in ("w13", "w2")}
    assert_same(ops.nvfp4_moe(**arguments), ops.nvfp4_moe(**arguments | prepared))


def test_activations_in_nvfp4_of_experts_elsewhere() -> None:
    arguments = w4a4_arguments()
    chosen = torch.tensor([1, 3])
    expert_map = torch.tensor([-1, 0, -1, 1])
    here = {
        name: nvfp4.NvFp4Weight(weight.codes[chosen], weight.scales[chosen], weight.global_scale[chosen])
        for name, weight in arguments.items()
        if name in ("w13", "w2")
    }
    here["input_scales"] = tuple(scale[chosen] for scale in arguments["input_scales"])
    weights = torch.where(torch.isin(arguments["topk_ids"], chosen), arguments["topk_weights"], 0.0)
    found = ops.nvfp4_moe_w4a4(**arguments | here, expert_map=expert_map)
    assert relative_error(found, ops.nvfp4_moe_w4a4(**arguments | {"topk_weights": weights}).double()) < 2e-3
    padding = torch.arange(len(arguments["x"])) - 1
    padded = ops.nvfp4_moe_w4a4(**arguments | here, expert_map=expert_map, padding=padding)
    assert_same(padded, torch.cat([torch.zeros_like(found[:1]), found[1:]]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(9, 80, dtype=torch.float16)}, "do not fit"),
        ({"input_scales": (torch.ones(3), torch.ones(4))}, r"input_scales must be \[4\] each"),
        ({"activation": "relu"}, "activation 'relu' is not one of"),
    ],
    ids=["x", "scales", "activation"],
)
def test_refusals_of_activations_in_nvfp4(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"nvfp4_moe_w4a4: .*{message}"):
        ops.nvfp4_moe_w4a4(**w4a4_arguments() | changes)


def test_dtypes_of_activations_in_nvfp4() -> None:
    for changes, message in (
        ({"x": torch.zeros(9, 64, dtype=torch.float64)}, r"x must be bf16 or fp16, not torch\.float64"),
        ({"input_scales": (torch.ones(4).half(), torch.ones(4))}, r"input_scales must be fp32, not torch\.float16"),
    ):
        with pytest.raises(TypeError, match=f"nvfp4_moe_w4a4: {message}"):
            ops.nvfp4_moe_w4a4(**w4a4_arguments() | changes)


def test_kernels_take_no_weight_of_another_layout() -> None:
    module = import_module("llm_quant_rocm.ops.nvfp4_moe")
    call = module.MoeCall(hardware.amd("gfx942"), 4, 64, 64, ("mfma_gate_up", "row"))
    assert "not row" in module._triton_refusal(call)
