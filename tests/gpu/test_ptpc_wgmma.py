# SPDX-License-Identifier: Apache-2.0
"""The PTPC GEMM's kernel for many rows on Hopper: every tile, dtype and edge, streams, graphs, what it leaves to the
other kernel."""

import pytest
import torch

from llm_quant_rocm import hardware
from tests.gpu.test_ptpc_gemm import integers, random_product
from tests.inputs import assert_same, product64

HOPPER = torch.cuda.is_available() and hardware.detect(torch.device("cuda")).arch == "sm_90"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

Operands = tuple[torch.Tensor, ...]
TILES = pytest.mark.parametrize("config", [(128, 256, 16), (256, 128, 1), (128, 128, 3)], ids=str)


def product(
    config: tuple[int, int, int],
    operands: Operands,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The product of tensors of the GPU."""
    from llm_quant_rocm.kernels.ptpc_hopper import ptpc_gemm
    from llm_quant_rocm.kernels.ptpc_wgmma import Config

    return ptpc_gemm(*operands, bias, out_dtype, hardware.detect(operands[0].device), Config(*config))


def on_gpu(operands: Operands) -> Operands:
    return tuple(tensor.cuda() for tensor in operands)


# Those of up to 640 columns leave most of an H100's multiprocessors without a tile. The last two, whose M and N are
# multiples of no tile, take several waves, and the last one's last wave has so few tiles that each is two programs'.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 16),
        (65, 72, 528),
        (300, 136, 272),
        (129, 320, 2064),
        (256, 640, 8192),
        (1290, 9000, 400),
        (1290, 9304, 400),
    ],
    ids=str,
)
@TILES
def test_exact_on_integers(config: tuple[int, int, int], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    operands, bias = integers(*shape)
    operands = on_gpu(operands)
    assert_same(product(config, operands, None, dtype), product64(*operands, None).float().to(dtype))
    bias = bias.to(dtype).cuda()
    assert_same(product(config, operands, bias, dtype), product64(*operands, bias).float().to(dtype))


# Of fp32 results, of rows of the result or of the operands that are not lines of 16 bytes.
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((150, 64, 512), torch.float32), ((150, 67, 512), torch.bfloat16), ((150, 64, 500), torch.float16)],
    ids=str,
)
def test_what_the_other_kernel_serves(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    operands, bias = integers(*shape)
    found = product((128, 128, 4), on_gpu(operands), bias.cuda(), dtype)
    assert_same(found, product64(*operands, bias).float().to(dtype))


@TILES
def test_nothing_beyond_the_edge_counts(poisoned: None, config: tuple[int, int, int]) -> None:
    (xq, xscale, wq, wscale), bias = integers(400, 520, 1040)
    whole = on_gpu((xq, xscale, wq, wscale))
    part = (whole[0][:300], whole[1][:300], whole[2][:264], whole[3][:264])
    for tensor in (whole[0][300:], whole[2][264:]):
        tensor.view(torch.uint8).fill_(0x7F)  # NaN
    found = product(config, part, bias[:264].cuda())
    assert_same(found, product64(*(tensor.cpu() for tensor in part), bias[:264]).float().bfloat16())


@TILES
def test_the_same_bits_every_run_beside_another_and_in_a_graph(config: tuple[int, int, int]) -> None:
    large = on_gpu(random_product(600, 7000, 4096))
    calls = [large, (large[0][:200], large[1][:200], *large[2:])]
    first = [product(config, call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for call, stream, results in zip(calls, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(product(config, call))
    torch.cuda.synchronize()
    for expected, results in zip(first, found, strict=True):
        assert all(torch.equal(result, expected) for result in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [product(config, call) for call in (*calls, *calls)]
    for _ in range(5):
        for result in captured:
            result.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(result, expected) for result, expected in zip(captured, first * 2, strict=True))
