# SPDX-License-Identifier: Apache-2.0
"""NVFP4 experts on a GPU whose kernel reads packed weights, against float64 and the reference."""

from functools import partial
from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.ops.nvfp4_gemm import kernels_of
from tests.gpu.test_nvfp4_gemm import Split, config_of
from tests.moe_inputs import MODELS, RANGES, assert_tokens_have_their_own_bits, many_tokens, relative_error
from tests.nvfp4_inputs import experts, moe64

HOPPER = torch.cuda.is_available() and hardware.detect(torch.device("cuda")).arch == "sm_90"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


def prepared(weight: Any, gate_up: bool, chosen: torch.Tensor | None = None) -> ops.PreparedNvFp4Weight:
    """A weight in rows, or its experts where `chosen`, as the GPU's kernel reads it."""
    parts = (weight.codes, weight.scales.view(torch.uint8), weight.global_scale)
    codes, scales, global_scale = (part.cuda() if chosen is None else part[chosen].cuda() for part in parts)
    return ops.prepare_nvfp4_weight(NvFp4Weight(codes, scales.view(torch.float8_e4m3fn), global_scale), gate_up=gate_up)


def cuda(arguments: dict[str, Any]) -> dict[str, Any]:
    moved = {name: value.cuda() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    return moved | {name: prepared(arguments[name], name == "w13") for name in ("w13", "w2")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("tokens", "count", "topk", "hidden", "inner"),
    [(1, 4, 1, 64, 32), (5, 4, 4, 64, 48), (33, 8, 2, 128, 96), (7, 256, 8, 32, 16), (40, 3, 3, 80, 16)],
)
def test_against_float64(tokens: int, count: int, topk: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    arguments = experts(tokens, count, topk, hidden, inner, dtype)
    assert relative_error(ops.nvfp4_moe(**cuda(arguments)).cpu(), moe64(arguments)) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 16, 100, 300, 1000, 3000])
def test_against_the_reference(tokens: int) -> None:
    """Numbers of tokens on both sides of every tile size, and of the schedule's two ways."""
    arguments = experts(tokens, 8, 3, 192, 112)
    found = ops.nvfp4_moe(**cuda(arguments))
    assert torch.equal(found, ops.nvfp4_moe(**cuda(arguments))), "the same bits every run"
    assert relative_error(found.cpu(), ops.nvfp4_moe(**arguments).double()) < TOLERANCE[torch.bfloat16]


# Fields of the configurations for w13 and w2: steps shared by more programs than there are, by few, and not shared; of
# the kernel that splits K; and of that for many rows.
PAIRS = [
    ((8, 64, 128, 528, 2, 4), (8, 128, 64, 528, 2, 4)),
    ((8, 128, 64, 396, 4, 3), (8, 64, 64, 528, 4, 4)),
    ((8, 64, 128, 3, 2, 2), (8, 64, 64, 7, 4, 2)),
    ((8, 64, 64, 0, 4, 2), (8, 64, 128, 264, 2, 6)),
    ((16, 64, 64, 528, 4, 3), (16, 64, 64, 0, 4, 2)),
    ((16, 128, 64, 528, 2, 3), (16, 128, 64, 264, 4, 4)),
    ((16, 64, 128, 5, 2, 3), (16, 128, 64, 1, 2, 3)),
    ((32, 64, 128, 264, 2, 2), (32, 64, 128, 528, 2, 2)),
    ((32, 64, 128, 0, 2, 2), (32, 128, 64, 0, 4, 2, 8)),
    (Split(8, 4, 132), Split(8, 2, 132)),
    (Split(8, 4, 264), Split(8, 2, 264)),
    (Split(16, 2, 7), Split(16, 4, 1)),
    (Split(8, 2, 264, consumers=2), Split(8, 2, 5, consumers=2)),
    (Split(8, 4, 132), (8, 64, 64, 0, 4, 3)),
    ((32, 64, 128, 0, 2, 2), Split(32, 4, 100)),
    ((64, 256, 0), (64, 128, 0)),
    ((64, 256, 0), (64, 128, 64, 0, 4, 2, 8)),
    (Split(64, 2, 132), (64, 256, 0)),
    ((128, 256, 0), (128, 128, 0)),
    ((128, 128, 0), (128, 256, 0)),
]


def multiply(arguments: dict[str, Any], fields: tuple[tuple[int, ...], ...], **changes: Any) -> torch.Tensor:
    """What the kernels give with these configurations, of tensors on the GPU."""
    from llm_quant_rocm.kernels.nvfp4_moe import nvfp4_moe
    from llm_quant_rocm.kernels.pair_config import PairConfig

    given = arguments | changes
    w13, w2 = ((weight.codes, weight.scales, weight.global_scale) for weight in (given["w13"], given["w2"]))
    routing = given["topk_weights"], given["topk_ids"], given.get("expert_map"), given.get("padding")
    tokens = RoutedTokens(given["x"], *routing)
    device = hardware.detect(torch.device("cuda"))
    config = PairConfig(*map(config_of, fields))
    products = kernels_of(device.arch).expert_products
    return nvfp4_moe(tokens, w13, w2, "silu", device, products, config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(1, 4, 1, 64, 32), (40, 3, 3, 80, 16), (7, 256, 8, 32, 16), (24, 6, 2, 1040, 528)])
@pytest.mark.parametrize("fields", PAIRS, ids=str)
def test_every_configuration(fields: tuple[tuple[int, ...], ...], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    arguments = experts(*shape, dtype)
    expected, on_gpu = moe64(arguments), cuda(arguments)
    found = multiply(on_gpu, fields)
    assert relative_error(found.cpu(), expected) < TOLERANCE[dtype]
    for _ in range(3):
        assert torch.equal(found, multiply(on_gpu, fields)), "the same bits every run"
    nobody = torch.full((shape[1],), -1, dtype=torch.int32, device="cuda")
    assert (multiply(on_gpu, fields, expert_map=nobody) == 0).all()
    # All tokens choose the first experts, whose rows fill several tiles: the others have none.
    ids = torch.arange(shape[2], dtype=torch.int32).expand(shape[0], -1).contiguous()
    found = multiply(on_gpu, fields, topk_ids=ids.cuda())
    assert relative_error(found.cpu(), moe64(arguments | {"topk_ids": ids})) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations(activation: str) -> None:
    arguments = experts(16, 4, 2, 64, 64, torch.float16)
    found = ops.nvfp4_moe(**cuda(arguments), activation=activation).cpu()
    assert relative_error(found, moe64(arguments, activation)) < TOLERANCE[torch.float16]


def test_ranks_of_expert_parallelism_add_up() -> None:
    arguments = experts(16, 6, 3, 64, 32, torch.float16)
    expected = moe64(arguments)
    parts = torch.zeros_like(expected)
    for mine in (torch.arange(6) < 2, torch.arange(6) >= 2):
        expert_map = torch.where(mine, mine.int().cumsum(0) - 1, -1).int().cuda()
        local = {name: prepared(arguments[name], name == "w13", mine) for name in ("w13", "w2")}
        parts += ops.nvfp4_moe(**(cuda(arguments) | local), expert_map=expert_map).cpu()
    assert relative_error(parts, expected) < TOLERANCE[torch.float16]


def test_padding_has_no_experts() -> None:
    arguments = cuda(experts(40, 4, 2, 64, 64))
    padding = torch.arange(40, device="cuda") % 7 - 3
    found, alone = ops.nvfp4_moe(**arguments, padding=padding), ops.nvfp4_moe(**arguments)
    assert torch.equal(found, torch.where(padding[:, None] < 0, 0, alone))


def test_a_token_is_nobody_elses_business() -> None:
    arguments = cuda(experts(40, 4, 2, 64, 64))
    before = ops.nvfp4_moe(**arguments)
    arguments["x"][3] = float("nan")
    after = ops.nvfp4_moe(**arguments)
    others = [token for token in range(40) if token != 3]
    assert torch.equal(before[others], after[others])
    assert after[3].isnan().all()


def test_in_a_graph_with_new_inputs() -> None:
    arguments = experts(16, 128, 8, 64, 32)
    generator = torch.Generator("cuda").manual_seed(0)
    for name, shape in (("w13", (128, 1536, 2048)), ("w2", (128, 2048, 768))):
        weight = nvfp4.quantize(torch.randn(shape, device="cuda", generator=generator) / shape[2] ** 0.5)
        arguments[name] = ops.prepare_nvfp4_weight(weight, gate_up=name == "w13")
    for name in ("x", "topk_weights", "topk_ids"):
        arguments[name] = arguments[name].cuda()
    arguments["x"] = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16, generator=generator)
    ops.nvfp4_moe(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.nvfp4_moe(**arguments)
    for seed in (1, 2):
        other = experts(16, 128, 8, 64, 32, seed=seed)
        arguments["topk_ids"].copy_(other["topk_ids"])
        arguments["topk_weights"].copy_(other["topk_weights"])
        arguments["x"].normal_(generator=generator)
        graph.replay()
        assert torch.equal(out, ops.nvfp4_moe(**arguments))


@pytest.mark.parametrize(("count", "topk", "hidden", "inner"), MODELS)
def test_batch_invariant(count: int, topk: int, hidden: int, inner: int) -> None:
    """A token has the bits that it has alone, whichever kernels and tiles its number of neighbours calls for."""
    torch.manual_seed(0)
    arranged = {}
    for name, n, k in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        weight = nvfp4.quantize(torch.randn(count, n, k, device="cuda", dtype=torch.bfloat16) / k**0.5)
        arranged[name] = ops.prepare_nvfp4_weight(weight, gate_up=name == "w13")
    product = partial(ops.nvfp4_moe, **arranged, batch_invariant=True)
    assert_tokens_have_their_own_bits(product, many_tokens(count, topk, hidden), RANGES)
