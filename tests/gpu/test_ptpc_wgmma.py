# SPDX-License-Identifier: Apache-2.0
"""The PTPC GEMM's kernels for few and for many rows on Hopper: every tile, dtype and edge, streams, graphs, what they
leave to the general kernel."""

import pytest
import torch

from llm_quant_rocm import hardware
from tests.gpu.test_ptpc_gemm import integers, random_product
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, product64

HOPPER = torch.cuda.is_available() and hardware.detect(torch.device("cuda")).arch == "sm_90"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

Operands = tuple[torch.Tensor, ...]
# Two numbers are of the kernel for few rows.
Fields = tuple[int, ...]
FEW = [(16, 256), (32, 256), (48, 128), (64, 256), (80, 256), (96, 128)]
MANY = [(128, 256, 16), (256, 128, 1), (128, 128, 3)]
TILES = pytest.mark.parametrize("config", FEW + MANY, ids=str)


def product(
    config: Fields,
    operands: Operands,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The product of tensors of the GPU."""
    from llm_quant_rocm.kernels import ptpc_hopper, ptpc_wgmma, ptpc_wgmma_few

    kind = ptpc_wgmma_few.Config if len(config) == 2 else ptpc_wgmma.Config
    return ptpc_hopper.ptpc_gemm(*operands, bias, out_dtype, hardware.detect(operands[0].device), kind(*config))


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
@pytest.mark.parametrize("config", MANY, ids=str)
def test_exact_on_integers(config: Fields, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_exactly(config, shape, dtype)


# As many rows as fill a tile, one less and one more than half of it and of a whole one; the last weights take several
# waves.
@pytest.mark.parametrize(
    "shape",
    [
        *((m, 72, 528) for m in (1, 5, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 96, 97, 127, 128)),
        (1, 8, 16),
        (33, 1, 144),
        (100, 640, 8192),
        (5, 17100, 400),
        (128, 17100, 272),
    ],
    ids=str,
)
@pytest.mark.parametrize("config", FEW, ids=str)
def test_few_rows_exact_on_integers(config: Fields, shape: tuple[int, int, int]) -> None:
    check_exactly(config, shape, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_few_rows_in_any_dtype(dtype: torch.dtype) -> None:
    check_exactly((80, 256), (50, 200, 528), dtype)


def check_exactly(config: Fields, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    operands, bias = integers(*shape)
    operands = on_gpu(operands)
    assert_same(product(config, operands, None, dtype), product64(*operands, None).float().to(dtype))
    bias = bias.to(dtype).cuda()
    assert_same(product(config, operands, bias, dtype), product64(*operands, bias).float().to(dtype))


# Of fp32 results, of rows of the result or of the operands that are not lines of 16 bytes; of few rows only the last,
# and more than 128 rows.
@pytest.mark.parametrize(
    ("config", "shape", "dtype"),
    [
        ((128, 128, 4), (150, 64, 512), torch.float32),
        ((128, 128, 4), (150, 67, 512), torch.bfloat16),
        ((128, 128, 4), (150, 64, 500), torch.float16),
        ((64, 256), (50, 67, 500), torch.bfloat16),
        ((64, 256), (129, 64, 512), torch.bfloat16),
    ],
    ids=str,
)
def test_what_the_general_kernel_serves(config: Fields, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    operands, bias = integers(*shape)
    found = product(config, on_gpu(operands), bias.cuda(), dtype)
    assert_same(found, product64(*operands, bias).float().to(dtype))


@TILES
def test_nothing_beyond_the_edge_counts(poisoned: None, config: Fields) -> None:
    (xq, xscale, wq, wscale), bias = integers(400, 520, 1040)
    whole = on_gpu((xq, xscale, wq, wscale))
    m = 44 if config in FEW else 300
    part = (whole[0][:m], whole[1][:m], whole[2][:264], whole[3][:264])
    for tensor in (whole[0][m:], whole[2][264:]):
        tensor.view(torch.uint8).fill_(0x7F)  # NaN
    found = product(config, part, bias[:264].cuda())
    assert_same(found, product64(*(tensor.cpu() for tensor in part), bias[:264]).float().bfloat16())


@TILES
def test_the_same_bits_every_run_beside_another_and_in_a_graph(config: Fields) -> None:
    m, some = (128, 20) if config in FEW else (600, 200)
    large = on_gpu(random_product(m, 7000, 4096))
    calls = [large, (large[0][:some], large[1][:some], *large[2:])]
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


@pytest.mark.parametrize("config", FEW, ids=str)
def test_a_broken_row_is_its_own(config: Fields) -> None:
    """The rows of a tile beyond x hold anything, and so may one of x."""
    x, xscale, wq, wscale = on_gpu(random_product(20, 200, 528))
    clean = product(config, (x, xscale, wq, wscale))
    broken = x.clone().view(torch.uint8)
    broken[7] = 0x7F  # NaN
    found = product(config, (broken.view(x.dtype), xscale, wq, wscale))
    others = torch.arange(20) != 7
    assert_same(found[others], clean[others])
    assert found[7].isnan().all()
