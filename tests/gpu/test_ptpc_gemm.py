# SPDX-License-Identifier: Apache-2.0
"""Every backend and every configuration of ptpc_gemm on a GPU, against float64."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, ops, tuning
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops.ptpc_gemm import BACKENDS, GemmCall, kernels_of
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, integer_product, product64, random_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CUDA = torch.device("cuda")
SHAPES = [(1, 16, 16), (3, 64, 128), (17, 48, 1040), (64, 1024, 2048), (130, 272, 496), (300, 144, 2000)]
ODD_SHAPES = [(1, 1, 1), (5, 1, 33), (2, 7, 100), (33, 129, 1001), (150, 5, 2047)]


def run(backend: str, operands: tuple[torch.Tensor, ...], bias: torch.Tensor | None, out_dtype: torch.dtype) -> Any:
    """The product on one backend of the operator; skips where the backend refuses the call."""
    xq, xscale, wq, wscale = (tensor.cuda() for tensor in operands)
    bias = None if bias is None else bias.cuda()
    bias_dtype = None if bias is None else bias.dtype
    call = GemmCall(xq.device, *xq.shape[:1], *wq.shape, out_dtype, bias_dtype, "row")
    chosen = next(candidate for candidate in BACKENDS if candidate.name == backend)
    reason = chosen.refusal(call)
    if reason:
        pytest.skip(reason)
    return chosen.run(xq, xscale, wq, wscale, bias, out_dtype)


def run_config(config: Any, operands: tuple[torch.Tensor, ...], bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product in fp32 of our kernel under one configuration."""
    from llm_quant_rocm.kernels.ptpc_gemm import ptpc_gemm

    xq, xscale, wq, wscale = (tensor.cuda() for tensor in operands)
    bias = None if bias is None else bias.cuda()
    return ptpc_gemm(xq, xscale, wq, wscale, bias, torch.float32, hardware.detect(CUDA), config)


def integers(m: int, n: int, k: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    *operands, bias = integer_product(m, n, k, hardware.detect(CUDA).fp8_dtype)
    return tuple(operands), bias


def random_product(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    fmt = fp8.for_device(CUDA)
    x, w = random_rows(m, k, torch.bfloat16, seed=1), random_rows(n, k, torch.bfloat16, seed=2)
    return *fp8.quantize_rows(x, fmt), *fp8.quantize_rows(w, fmt)


def tolerance(k: int, dtype: torch.dtype) -> float:
    """Largest error in norm, relative to the product's.

    Hopper's FP8 accumulator keeps 14 bits. Every step of 32 products truncates the running sum, which costs at most
    2**-14 of it on average and always towards zero (k / 32 steps), and each product, with errors of either sign
    (a random walk of k steps). The output is rounded once.
    """
    return (k / 32 + k**0.5) * 2**-14 + torch.finfo(dtype).eps


@pytest.mark.parametrize("shape", SHAPES + ODD_SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_exact_on_integers(backend: str, shape: tuple[int, int, int]) -> None:
    operands, bias = integers(*shape)
    bias = bias.bfloat16()
    found = run(backend, operands, bias, torch.bfloat16)
    # One rounding, of a sum that is exact in fp32.
    assert_same(found, product64(*operands, bias).float().bfloat16())


@pytest.mark.parametrize("shape", [(0, 64, 128), (3, 0, 128), (3, 64, 0)], ids=str)
def test_without_values(shape: tuple[int, int, int]) -> None:
    operands, bias = integers(*shape)
    found = ops.ptpc_gemm(*(tensor.cuda() for tensor in operands), bias.cuda())
    assert_same(found, bias.bfloat16().expand(shape[0], -1))


@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=["no_bias", *(f"bias_{name}" for name in DTYPE_IDS)])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_dtypes(backend: str, out_dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
    operands, bias = integers(40, 96, 512)
    chosen = None if bias_dtype is None else bias.to(bias_dtype)
    assert_same(run(backend, operands, chosen, out_dtype), product64(*operands, chosen).float().to(out_dtype))


@pytest.mark.parametrize("shape", [(1, 512, 8192), (64, 1280, 8192), (512, 1024, 4096), (1024, 512, 512)], ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_error_against_float64(backend: str, shape: tuple[int, int, int]) -> None:
    operands = random_product(*shape)
    expected = product64(*operands, None)
    found = run(backend, operands, None, torch.bfloat16).cpu().double()
    # Rows differ in size by 2**16: every row answers for itself.
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() <= tolerance(shape[2], torch.bfloat16)


def shipped() -> list[dict[str, Any]]:
    """Every distinct configuration that the package ships for this GPU; nothing without a GPU."""
    if not torch.cuda.is_available():
        return []
    measured = tuning.shapes("ptpc_gemm", hardware.detect(CUDA).arch)
    return list({repr(shape.config): shape.config for shape in measured}.values())


@pytest.mark.parametrize("fields", shipped(), ids=lambda fields: "-".join(str(value) for value in fields.values()))
def test_shipped_configuration(fields: dict[str, Any]) -> None:
    """Ragged in every dimension, yet with rows of 16 bytes, so that a configuration with TMA uses it."""
    device = hardware.detect(CUDA)
    # The kernel for few rows has tiles of as many as there are.
    operands, bias = integers(fields.get("block_m", 33) + 3, 520, 1040)
    kernels = kernels_of(device.arch)
    on_gpu = (tensor.cuda() for tensor in operands)
    found = kernels.ptpc_gemm(*on_gpu, bias.cuda(), torch.bfloat16, device, kernels.config_of(fields))
    assert_same(found, product64(*operands, bias).float().bfloat16())


@pytest.mark.parametrize("m", [16, 40, 100, 300, 4096])
@pytest.mark.parametrize("k", [1024, 1040, 1001])
def test_default_configuration(m: int, k: int) -> None:
    from llm_quant_rocm.kernels.ptpc_gemm import default_config

    operands, bias = integers(min(m, 300), 520, k)
    found = run_config(default_config(hardware.detect(CUDA), m, 520, k), operands, bias)
    assert_same(found, product64(*operands, bias).float())


def tma_pairs(**fields: Any) -> list[dict[str, Any]]:
    """The configuration by pointers, and by descriptor."""
    return [fields | {"tma": tma} for tma in (False, True)]


SMALL = {"block_m": 16, "block_n": 64, "block_k": 128, "stages": 3, "warps": 4}
LARGE = {"block_m": 128, "block_n": 128, "block_k": 128, "stages": 3, "warps": 8}


@pytest.mark.parametrize(
    "fields",
    [
        *tma_pairs(**SMALL, swap_ab=True),
        *tma_pairs(**SMALL, swap_ab=True, split_k=3),
        *tma_pairs(**SMALL, split_k=8),
        *tma_pairs(**SMALL, swap_ab=True, programs=1),
        *tma_pairs(**LARGE),
        *tma_pairs(**LARGE, programs=1, group_m=1),
        *tma_pairs(**LARGE, programs=1, split_k=2, group_m=3),
    ],
    ids=lambda fields: "-".join(f"{name}={value}" for name, value in fields.items()),
)
def test_configuration(fields: dict[str, Any]) -> None:
    """Split sums, both orders of the operands, pointers and descriptors, persistent programs: all exact."""
    from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig

    config = GemmConfig(**fields)
    shapes = [(19, 264, 1040), (19, 264, 1001)]
    if config.programs:
        shapes = [(515, 8712, 144)]  # more tiles than multiprocessors
    for shape in shapes:
        operands, bias = integers(*shape)
        assert_same(run_config(config, operands, bias), product64(*operands, bias).float())


def test_split_k_beyond_the_depth() -> None:
    """More programs a tile than steps of K: the empty ones add nothing."""
    from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig

    for k in (16, 128, 144, 640, 5 * 128 + 1):
        operands, bias = integers(5, 48, k)
        for split_k in (2, 4, 8):
            found = run_config(GemmConfig(**SMALL, split_k=split_k), operands, bias)
            assert_same(found, product64(*operands, bias).float())


@pytest.mark.parametrize("shape", [(16, 1280, 8192), (300, 1024, 4096)], ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_same_bits_every_run(backend: str, shape: tuple[int, int, int]) -> None:
    operands = tuple(tensor.cuda() for tensor in random_product(*shape))
    first = run(backend, operands, None, torch.bfloat16)
    for _ in range(10):
        assert_same(run(backend, operands, None, torch.bfloat16), first)


def test_split_k_has_the_same_bits_every_run() -> None:
    from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig

    operands = tuple(tensor.cuda() for tensor in random_product(16, 1280, 8192))
    config = GemmConfig(**SMALL, split_k=8)
    first = run_config(config, operands)
    for _ in range(10):
        assert_same(run_config(config, operands), first)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """A NaN, an inf or a huge value in one row leaves every other row's bits alone."""
    x = random_rows(20, 512, torch.bfloat16)
    wq, wscale = (tensor.cuda() for tensor in random_product(1, 256, 512)[2:])
    clean = ops.ptpc_linear(x.cuda(), wq, wscale)
    for value in (float("nan"), float("inf"), 3e38):
        broken = x.clone()
        broken[7, 100] = value
        found = ops.ptpc_linear(broken.cuda(), wq, wscale)
        others = torch.arange(20) != 7
        assert_same(found[others], clean[others])
        assert value == 3e38 or found[7].isnan().all()


@pytest.mark.parametrize("shape", [(33, 129, 1001), (17, 272, 1040), (300, 520, 512)], ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_no_trace_of_uninitialized_memory(poisoned: None, backend: str, shape: tuple[int, int, int]) -> None:
    operands, bias = integers(*shape)
    assert_same(run(backend, operands, bias.bfloat16(), torch.bfloat16), product64(*operands, bias).float().bfloat16())


@pytest.mark.parametrize("shape", [(0, 16, 16), (3, 0, 16), (3, 16, 0)], ids=str)
def test_empty(shape: tuple[int, int, int]) -> None:
    operands, bias = integers(*shape)
    found = ops.ptpc_gemm(*(tensor.cuda() for tensor in operands), bias.cuda(), torch.float32)
    assert_same(found, product64(*operands, bias).float())


def test_a_long_row_and_a_bias() -> None:
    """cuBLAS, which torch has for such products on Hopper, takes no bias where it would split K."""
    (xq, xscale, wq, wscale), bias = integers(3, 96, 1024)
    xq, wq = (torch.nn.functional.pad(codes.view(torch.uint8), (0, 7 * 1024)).view(codes.dtype) for codes in (xq, wq))
    found = ops.ptpc_gemm(*(tensor.cuda() for tensor in (xq, xscale, wq, wscale)), bias.bfloat16().cuda())
    assert_same(found, product64(xq, xscale, wq, wscale, bias).float().bfloat16())


def test_a_view_of_a_larger_weight_and_input() -> None:
    """Rows that start at odd addresses: no backend may assume alignment that the tensors lack."""
    (xq, xscale, wq, wscale), bias = integers(20, 64, 544)
    for begin, end in ((0, 512), (16, 528), (3, 515), (1, 544)):
        part = (xq.cuda()[:, begin:end], xscale.cuda(), wq.cuda()[:, begin:end], wscale.cuda())
        found = ops.ptpc_gemm(*part, bias.bfloat16().cuda())
        assert_same(found, product64(*part, bias).float().bfloat16())


def test_some_rows_of_a_larger_weight_and_input() -> None:
    """Scales that begin at odd addresses."""
    (xq, xscale, wq, wscale), bias = integers(40, 96, 512)
    part = tuple(tensor.cuda()[1 : 1 + rows] for tensor, rows in ((xq, 32), (xscale, 32), (wq, 64), (wscale, 64)))
    found = ops.ptpc_gemm(*part, bias.bfloat16().cuda()[:64])
    assert_same(found, product64(*part, bias[:64]).float().bfloat16())


def test_one_row_over_and_over() -> None:
    """Rows that overlap, which tensor descriptors refuse."""
    (xq, xscale, wq, wscale), bias = integers(1, 64, 512)
    once = (xq.cuda(), xscale.cuda(), wq.cuda(), wscale.cuda())
    repeated = (once[0].expand(40, 512), once[1].expand(40, 1), *once[2:])
    for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
        expected = product64(*once, bias).float().to(out_dtype).expand(40, 64)
        assert_same(ops.ptpc_gemm(*repeated, bias.bfloat16().cuda(), out_dtype), expected.contiguous())


def test_bias_at_an_odd_address() -> None:
    operands, bias = integers(20, 64, 512)
    padded = torch.cat([bias[:1], bias]).bfloat16().cuda()
    found = ops.ptpc_gemm(*(tensor.cuda() for tensor in operands), padded[1:])
    assert_same(found, product64(*operands, bias).float().bfloat16())


def test_strided_bias_and_scales() -> None:
    (xq, xscale, wq, wscale), bias = integers(20, 64, 512)
    xs, ws = xscale.cuda().expand(-1, 2)[:, :1], torch.cat([wscale, wscale * 3], 1).cuda()[:, :1]
    strided = torch.stack([bias, bias * 3], 1).bfloat16().cuda()[:, 0]
    expected = product64(xq, xscale, wq, wscale, bias).float()
    for out_dtype in (torch.bfloat16, torch.float32):
        assert_same(ops.ptpc_gemm(xq.cuda(), xs, wq.cuda(), ws, strided, out_dtype), expected.to(out_dtype))


def test_a_configuration_is_plain_data() -> None:
    """What configs/*.json hold: every field of GemmConfig goes there and back."""
    from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig

    config = GemmConfig(**SMALL, split_k=2)
    assert GemmConfig(**asdict(config)) == config


def test_a_weight_that_the_kernels_before_write() -> None:
    """What a product asks for early is what the kernel before it writes, in memory that other products read before."""
    m, n, k = 16, 8192, 4096
    x = random_rows(m, k, torch.bfloat16, seed=3).cuda()
    weights = [random_rows(n, k, torch.bfloat16, seed=seed).cuda() for seed in range(4)]
    product = ops.ptpc_gemm
    expected = [product(*ops.per_token_quant_fp8(x), *ops.per_token_quant_fp8(weight)) for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        xq, xscale = ops.per_token_quant_fp8(x)
        # The codes of a weight are freed after its product, and those of the next are where they were.
        found = [product(xq, xscale, *ops.per_token_quant_fp8(weight)) for weight in weights]
    for _ in range(50):
        for result in found:
            result.zero_()
        graph.replay()
        for result, wanted in zip(found, expected, strict=True):
            assert_same(result, wanted)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "weight", [(10240, 8192), (8192, 28672), (2048, 4096), (4608, 3584), (384, 7168), (72, 1000), (100, 1001)], ids=str
)
def test_batch_invariant(weight: tuple[int, int], out_dtype: torch.dtype) -> None:
    """A row has the bits that it has alone, whichever kernel and tiles its number of neighbours calls for: of small
    weights with long rows, too, whose few rows would be summed in parts, and of rows that no descriptor can name."""
    n, k = weight
    xq, xscale = ops.per_token_quant_fp8(torch.randn(2100, k, device="cuda", dtype=torch.bfloat16))
    wq, wscale = ops.per_token_quant_fp8(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)

    def product(begin: int, end: int) -> torch.Tensor:
        rows = slice(begin, end)
        return ops.ptpc_gemm(xq[rows], xscale[rows], wq, wscale, bias, out_dtype, batch_invariant=True)

    whole = product(0, 2100)
    for m in (1, 2, 8, 16, 17, 33, 64, 65, 96, 128, 129, 200, 256, 300, 512, 700, 1024, 2048):
        for begin in (0, 5, 50):
            assert_same(product(begin, begin + m), whole[begin : begin + m])
