# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 GEMM's kernel for many rows on Hopper: tiles whole and cut, streams, graphs."""

from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from tests.inputs import assert_same
from tests.nvfp4_inputs import weight64
from tests.ops.test_nvfp4_gemm import exact_operands

HOPPER = torch.cuda.is_available() and hardware.detect(torch.device("cuda")).arch == "sm_90"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
CONFIGS = pytest.mark.parametrize(
    "config",
    [
        (64, 128),
        (64, 256, 1),
        (256, 128),
        (128, 256),
        (128, 128),
        (256, 128, 0),
        (256, 128, 1),
        (128, 128, 2, 3),
        (256, 128, 2, 8),
        (64, 256, 2, 4),
        (256, 128, 2, 2),
        (256, 64, 0),
        (160, 128, 0),
        (192, 128, 0),
        (288, 128, 0),
        (320, 128, 0),
        (160, 128, 0, 8),
        (192, 128, 0, 6),
        (288, 128, 0, 8),
        (320, 128, 0, 2),
        (256, 128, 0, 0, 64),
        (256, 128, 0, 0, 128),
        (256, 128, 0, 3, 64),
        (256, 128, 0, 2, 128),
        (256, 128, 0, 6, 128),
    ],
    ids=str,
)


def product(
    config: tuple[Any, ...], x: torch.Tensor, weight: NvFp4Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of tensors of the GPU."""
    from llm_quant_rocm.kernels.nvfp4_wgmma_large import gemm_large
    from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config

    prepared = ops.prepare_nvfp4_weight(weight)
    tensors = (prepared.codes, prepared.scales, prepared.global_scale)
    return gemm_large(x, *tensors, bias, prepared.n, hardware.detect(x.device), Config(*config))


def on_gpu(x: torch.Tensor, weight: NvFp4Weight) -> tuple[torch.Tensor, NvFp4Weight]:
    return x.cuda(), NvFp4Weight(weight.codes.cuda(), weight.scales.cuda(), weight.global_scale.cuda())


# Of the last three one is cut into as many parts as there are programs, one into stretches of more than a tile, and the
# last has 10 tiles beyond a wave, of 256 rows and of 320; before them a tile is several programs' where `shares` has it
# so, and they do not divide its steps or rows evenly. Of the third several tiles of four steps each are a program's.
@HALF
@pytest.mark.parametrize(
    "shape",
    [
        (1, 5, 48),
        (65, 67, 528),
        (2000, 4608, 256),
        (300, 130, 272),
        (129, 320, 2064),
        (256, 640, 8192),
        (700, 9000, 4096),
        (500, 9000, 2064),
    ],
    ids=str,
)
@CONFIGS
def test_exact_on_integers(config: tuple[Any, ...], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, bias = exact_operands(*shape, dtype)
    x, weight = on_gpu(x, weight)
    expected = x.double() @ weight64(weight).cuda().t()
    assert_same(product(config, x, weight), expected.float().to(dtype))
    bias = bias.to(dtype).cuda()
    assert_same(product(config, x, weight, bias), (expected + bias.double()).float().to(dtype))


# Of the weight with fewer rows programs share every tile that has more rows than x.
@pytest.mark.parametrize(
    ("config", "n", "rows"),
    [
        *((config, 7000, (600, 200)) for config in CONFIGS.args[1]),
        ((160, 128, 0, 3), 2048, (150, 129)),
        ((192, 128, 0, 4), 2048, (160, 129)),
        ((288, 128, 0, 4), 2048, (270, 257)),
        ((256, 128, 2, 8), 2048, (200, 129)),
        ((256, 128, 2, 4), 2048, (200, 129)),
        ((320, 128, 0, 6), 2048, (300, 257)),
        ((128, 256, 2, 8), 2048, (100, 65)),
    ],
    ids=str,
)
def test_the_same_bits_every_run_beside_another_and_in_a_graph(
    config: tuple[Any, ...], n: int, rows: tuple[int, int]
) -> None:
    _, weight = on_gpu(*exact_operands(1, n, 4096, torch.bfloat16)[:2])
    xs = [torch.randn(each, 4096, device="cuda").bfloat16() for each in rows]
    first = [product(config, x, weight) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for x, stream, results in zip(xs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(product(config, x, weight))
    torch.cuda.synchronize()
    for expected, results in zip(first, found, strict=True):
        assert all(torch.equal(result, expected) for result in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [product(config, x, weight) for x in (*xs, *xs)]
    for _ in range(5):
        for result in captured:
            result.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(result, expected) for result, expected in zip(captured, first * 2, strict=True))
