# SPDX-License-Identifier: Apache-2.0
"""The Triton experts on a GPU against the reference and float64."""

from functools import partial
from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, ops, reference
from llm_quant_rocm.formats import fp8
from tests.moe_inputs import (
    MODELS,
    RANGES,
    assert_tokens_have_their_own_bits,
    experts,
    many_tokens,
    moe64,
    relative_error,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def cuda(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.cuda() for name, tensor in arguments.items()}


@pytest.mark.parametrize(
    ("tokens", "count", "topk", "hidden", "inner"),
    [
        (1, 4, 1, 64, 32),
        (5, 4, 4, 64, 48),
        (33, 8, 2, 128, 96),
        (7, 256, 8, 32, 16),
        (40, 3, 3, 50, 23),
        (300, 4, 2, 256, 128),
        (2000, 8, 2, 512, 384),
    ],
)
def test_against_the_reference(tokens: int, count: int, topk: int, hidden: int, inner: int) -> None:
    arguments = experts(tokens, count, topk, hidden, inner)
    expected = ops.ptpc_moe(**arguments)
    found = ops.ptpc_moe(**cuda(arguments)).cpu()
    # The matrix units add FP8 products with about 14 bits, and a code of the inner activations may move by one.
    assert relative_error(found, expected.double()) < 0.02
    if tokens <= 40:
        assert relative_error(found, moe64(arguments)) < 0.02


@pytest.mark.parametrize("tokens", [1, 40, 150])
def test_every_pair_that_the_tuner_tries(tokens: int) -> None:
    """Of tiles of 16 to 128 rows, with sums that end within a step."""
    from llm_quant_rocm.tune.ptpc_moe import candidates, run

    given = experts(tokens, 4, 2, 272, 144)
    expected = moe64(given)
    on_gpu = cuda(given)
    weights = [on_gpu[name] for name in ("w13", "w13_scale", "w2", "w2_scale")]
    routing = on_gpu["topk_weights"], on_gpu["topk_ids"]
    for config in candidates(hardware.detect(torch.device("cuda")), tokens, 4, 2, 272, 144):
        assert relative_error(run(weights, on_gpu["x"], *routing, config).cpu(), expected) < 0.02, config


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations(activation: str) -> None:
    arguments = experts(64, 4, 2, 128, 64)
    found = ops.ptpc_moe(**cuda(arguments), activation=activation).cpu()
    assert relative_error(found, moe64(arguments, activation)) < 0.02


def test_absent_experts_add_nothing() -> None:
    arguments = cuda(experts(64, 6, 3, 64, 32))
    expert_map = torch.tensor([-1, 0, 1, -1, 2, -1], dtype=torch.int32, device="cuda")
    mine = expert_map >= 0
    local = {name: arguments[name][mine] for name in ("w13", "w13_scale", "w2", "w2_scale")}
    found = ops.ptpc_moe(**(arguments | local), expert_map=expert_map)
    local_ids = expert_map[arguments["topk_ids"].long()]
    expected = reference.ptpc_moe(
        arguments["x"], *local.values(), arguments["topk_weights"], local_ids, "silu", fp8.OCP
    )  # fmt: skip
    assert relative_error(found, expected.double()) < 0.02


def test_padding_has_no_experts() -> None:
    arguments = cuda(experts(64, 6, 3, 64, 32))
    padding = torch.arange(64, device="cuda") % 7 - 3
    found, alone = ops.ptpc_moe(**arguments, padding=padding), ops.ptpc_moe(**arguments)
    assert torch.equal(found, torch.where(padding[:, None] < 0, 0, alone))


def qwen3(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments in the shape of Qwen3-30B-A3B."""
    arguments = cuda(experts(tokens, 128, 8, 64, 32, seed=seed))
    for name, shape in (("w13", (128, 1536, 2048)), ("w2", (128, 2048, 768))):
        weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[2] ** 0.5
        arguments[name], arguments[f"{name}_scale"] = ops.per_token_quant_fp8(weight)
    arguments["x"] = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
    return arguments


def unquantized(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same experts in fp32 with no activation quantized."""
    x, ids = arguments["x"].float(), arguments["topk_ids"]
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = (arguments[name][expert].float() * arguments[f"{name}_scale"][expert] for name in ("w13", "w2"))
        gate, up = (x[token] @ w13.t()).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ w2.t()
        out.index_add_(0, token, y * arguments["topk_weights"][token, slot, None])
    return out


@pytest.mark.parametrize("tokens", [1, 16, 512, 4096])
def test_a_real_shape(tokens: int) -> None:
    """As near as the reference to what no quantization gives.

    Not near the reference itself: Hopper's 14-bit sums of 2048 products move some inner activations to the next code,
    which the reference's fp32 sums do not, and each such code moves by a sixteenth.
    """
    arguments = qwen3(tokens)
    found = ops.ptpc_moe(**arguments)
    assert torch.equal(found, ops.ptpc_moe(**arguments)), "the same bits every run"
    exact = unquantized(arguments).double()
    local_ids = arguments.pop("topk_ids")
    expected = reference.ptpc_moe(*arguments.values(), local_ids, "silu", fp8.OCP)
    assert relative_error(found, exact) < 1.1 * relative_error(expected, exact)


def test_in_a_graph_with_new_inputs() -> None:
    arguments = qwen3(16)
    ops.ptpc_moe(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.ptpc_moe(**arguments)
    for seed in (1, 2):
        other = experts(16, 128, 8, 64, 32, seed=seed)
        arguments["topk_ids"].copy_(other["topk_ids"])
        arguments["topk_weights"].copy_(other["topk_weights"])
        arguments["x"].normal_()
        graph.replay()
        assert torch.equal(out, ops.ptpc_moe(**arguments))


@pytest.mark.parametrize(("count", "topk", "hidden", "inner"), MODELS)
def test_batch_invariant(count: int, topk: int, hidden: int, inner: int) -> None:
    """A token has the bits that it has alone, whichever kernels and tiles its number of neighbours calls for."""
    torch.manual_seed(0)
    arranged = {}
    for name, n, k in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        weight = torch.randn(count, n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
        arranged[name], arranged[f"{name}_scale"] = ops.per_token_quant_fp8(weight)
    product = partial(ops.ptpc_moe, **arranged, batch_invariant=True)
    assert_tokens_have_their_own_bits(product, many_tokens(count, topk, hidden), RANGES)
