# SPDX-License-Identifier: Apache-2.0
"""The FP8 prefill of the NVFP4 GEMM on Hopper, against float64 and the reference."""

from importlib import import_module
from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, ops, reference
from llm_quant_rocm.formats import fp8, nvfp4
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from llm_quant_rocm.ops.nvfp4_gemm import DECODE_ROWS
from tests.gpu.test_nvfp4_gemm import HALF, HOPPER, cuda
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, nasty_rows
from tests.nvfp4_inputs import nasty_weight, weight64

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

# The large kernel's tiles, whole, cut at the end, shared by programs, lower at the end; and cuBLAS with the weight in
# memory, so many values at a time.
CONFIGS = [
    (256, 128), (256, 128, 1), (256, 128, 0), (128, 128, 2, 3), (256, 128, 2, 4), (128, 256), (256, 64, 0),
    (160, 128, 0), (192, 128, 0), (288, 128, 0), (160, 128, 0, 8), (288, 128, 0, 3), (320, 128, 0, 4),
    (256, 128, 0, 0, 64), (256, 128, 0, 6, 128), {"values": 2**26},
]  # fmt: skip


def chosen(config: tuple[int, ...] | dict[str, int]) -> Any:
    from llm_quant_rocm.kernels import nvfp4_hopper
    from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config

    return nvfp4_hopper.fp8_config_of(config) if isinstance(config, dict) else Config(*config)


def run(
    config: tuple[int, ...] | dict[str, int], x: torch.Tensor, weight: NvFp4Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product of tensors of the CPU in FP8, one way or the other."""
    from llm_quant_rocm.kernels.nvfp4_hopper import gemm_fp8

    prepared = ops.prepare_nvfp4_weight(cuda(weight))
    bias = None if bias is None else bias.cuda()
    operands = (prepared.codes, prepared.scales, prepared.global_scale, bias, prepared.n)
    return gemm_fp8(x.cuda(), *operands, hardware.detect(torch.device("cuda")), chosen(config)).cpu()


@pytest.fixture
def in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if FP8 were the fastest of all shapes: decoded on the way, from 2000 rows on expanded in memory."""
    module = import_module("llm_quant_rocm.ops.nvfp4_gemm")
    found = lambda device, m, n, k: chosen({"values": 2**26} if m >= 2000 else (256, 128, 0))  # noqa: E731
    monkeypatch.setattr(module, "_fp8_config", found)
    module._choose.cache_clear()


def test_shapes_that_fp8_does_not_speed_up_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("llm_quant_rocm.ops.nvfp4_gemm"), "_fp8_config", lambda *shape: None)
    weight = ops.prepare_nvfp4_weight(cuda(nvfp4.quantize(torch.randn(320, 512))))
    x = torch.randn(200, 512, device="cuda", dtype=torch.bfloat16)
    assert_same(ops.nvfp4_gemm(x, weight, prefill="fp8"), ops.nvfp4_gemm(x, weight))


def tolerance(k: int, dtype: torch.dtype) -> float:
    """Largest error in norm, relative to the product's: the accumulator keeps 14 bits (tests/gpu/test_ptpc_gemm.py)."""
    return (k / 32 + k**0.5) * 2**-14 + torch.finfo(dtype).eps


def exact_operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, NvFp4Weight, torch.Tensor]:
    """x, weight and bias whose product is exact: x is its own E4M3, -256, 0 or 256 beside a 448 in each row that meets
    a zero, times a power of two that is the row's scale, the weight's E4M3 are powers of two, and sums over K stay
    within the accumulator's 14 bits. Neighbouring rows have different scales, five of them: no tile is a multiple."""
    generator = torch.Generator().manual_seed(m + n + k)
    x = 256.0 * torch.randint(-1, 2, (m, k), generator=generator)
    codes = torch.tensor([0, 3, 5, 7, 8, 11, 13, 15], dtype=torch.uint8)[torch.randint(8, (n, k), generator=generator)]
    x[:, 0], codes[:, 0] = 448.0, 0
    x *= 2.0 ** -(torch.arange(m) % 5)[:, None]
    scales = torch.full((n, k // 16), 4.0).to(torch.float8_e4m3fn)
    weight = NvFp4Weight(nvfp4.pack(codes), scales, 2.0 ** -torch.randint(14, 17, (n,), generator=generator).float())
    return x.to(dtype), weight, torch.randint(-8, 9, (n,), generator=generator).float() / 8


def product64(x: torch.Tensor, weight: NvFp4Weight) -> torch.Tensor:
    """x . weight^T in float64."""
    return (x.cuda().double() @ weight.dequantize().cuda().double().t()).cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("width", [16, 48, 2880, 8192, 28672, 65536])
def test_x_is_quantized_in_the_order_of_the_operand(width: int, dtype: torch.dtype) -> None:
    from llm_quant_rocm.kernels.per_token_quant import per_token_quant_fp8

    x = nasty_rows(width, dtype)
    found, scale = per_token_quant_fp8(x.cuda(), fp8.OCP, interleave=True)
    expected, expected_scale = reference.per_token_quant_fp8(x, fp8.OCP)
    assert_same(scale, expected_scale)
    # Of 64 columns: two of eight, block, one of two, column half.
    in_order = found.view(torch.uint8).unflatten(-1, (-1, 4, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)
    assert_same(in_order[:, :width].contiguous().view(found.dtype), expected)
    assert found.shape[1] == -(-width // 64) * 64 and not in_order[scale.flatten().isfinite().cpu(), width:].any()


# The last three have tiles that are cut, one into as many parts as there are programs, one with 10 beyond a wave. Of
# (2000, 4608, 512) several tiles of four steps each are a program's.
SHAPES = [
    (1, 1, 16), (3, 5, 48), (20, 67, 528), (300, 130, 272), (70, 320, 2064), (2000, 4608, 512), (130, 16, 16384),
    (500, 9000, 2064), (600, 10240, 1024),
]  # fmt: skip


@HALF
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS[:-1], ids=str)
def test_exact_on_powers_of_two(config: tuple[int, ...], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, bias = exact_operands(*shape, dtype)
    product = product64(x, weight)
    assert_same(run(config, x, weight, None), product.float().to(dtype))
    for bias_dtype in (torch.float32, dtype):
        expected = (product + bias.double()).float().to(dtype)
        assert_same(run(config, x, weight, bias.to(bias_dtype)), expected)


@pytest.mark.parametrize("shape", [(16, 16, 16), (20, 80, 528), (300, 144, 272), (70, 1040, 2064)], ids=str)
def test_exact_on_powers_of_two_expanded(shape: tuple[int, int, int]) -> None:
    x, weight, bias = exact_operands(*shape, torch.bfloat16)
    product, bias = product64(x, weight), bias.bfloat16()
    for size in (2**26, 200 * shape[2]):  # the whole weight, and slices of 128 rows or more
        assert_same(run({"values": size}, x, weight, None), product.float().bfloat16())
        assert_same(run({"values": size}, x, weight, bias), (product + bias.double()).float().bfloat16())


def test_expanded_with_a_bias_at_an_odd_address() -> None:
    x, weight, bias = exact_operands(20, 80, 528, torch.bfloat16)
    odd = torch.cat([bias[:1], bias]).bfloat16().cuda()[1:]
    found = run({"values": 2**26}, x, weight, odd)
    assert_same(found, (product64(x, weight) + bias.bfloat16().double()).float().bfloat16())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_all_codes_times_all_scales(config: tuple[int, ...] | dict[str, int]) -> None:
    """x picks single weights, so the E4M3 that the kernel makes are seen: those of `to_fp8`."""
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8).repeat(128, 8))
    scales = torch.arange(128, dtype=torch.uint8).clamp(max=126)[:, None].repeat(1, 8).view(torch.float8_e4m3fn)
    weight = NvFp4Weight(codes, scales, torch.ones(128))
    found = run(config, torch.eye(128).bfloat16(), weight, None).t().float()
    assert_same(found + 0.0, fp8.dequantize(*nvfp4.to_fp8(weight, fp8.OCP)) + 0.0)


@HALF
@pytest.mark.usefixtures("in_fp8")
@pytest.mark.parametrize("rows", [65, 128, 129, 300, 1000, 3000])
def test_operator_against_the_reference(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 2064).to(dtype), nvfp4.quantize(torch.randn(336, 2064) / 45)
    bias = torch.randn(336).to(dtype)
    expected = reference.nvfp4_gemm_fp8(x, weight, bias, torch.float32, fp8.OCP)
    found = ops.nvfp4_gemm(x.cuda(), ops.prepare_nvfp4_weight(cuda(weight)), bias.cuda(), prefill="fp8").cpu()
    assert found.dtype == dtype
    assert (found.float() - expected).norm() <= tolerance(2064, dtype) * expected.norm()
    # Two roundings to 4 significant bits, half of them exact for the weight.
    exact = x.double() @ weight64(weight).t() + bias.double()
    assert 0.02 < (found.double() - exact).norm() / exact.norm() < 0.035


@pytest.mark.usefixtures("in_fp8")
def test_decode_stays_exact() -> None:
    weight = ops.prepare_nvfp4_weight(cuda(nvfp4.quantize(torch.randn(320, 512))))
    x = torch.randn(DECODE_ROWS + 1, 512, device="cuda", dtype=torch.bfloat16)
    few = x[:DECODE_ROWS]
    assert_same(ops.nvfp4_gemm(few, weight, prefill="fp8"), ops.nvfp4_gemm(few, weight))
    assert not torch.equal(ops.nvfp4_gemm(x, weight, prefill="fp8"), ops.nvfp4_gemm(x, weight))


@pytest.mark.usefixtures("in_fp8")
def test_global_scales_of_shards_are_their_own() -> None:
    x, weight = torch.randn(100, 256).bfloat16(), nasty_weight(30, 256)
    expected = reference.nvfp4_gemm_fp8(x, weight, None, torch.float32, fp8.OCP)
    found = ops.nvfp4_gemm(x.cuda(), ops.prepare_nvfp4_weight(cuda(weight)), prefill="fp8").cpu().float()
    assert (found[:, :2] == 0).all()
    error = (found - expected)[:, 2:].norm(dim=0) / expected[:, 2:].norm(dim=0)
    assert error.max() <= tolerance(256, torch.bfloat16)


@pytest.mark.usefixtures("in_fp8")
def test_nan_and_infinity_stay_in_their_row() -> None:
    x, weight = torch.randn(90, 64).bfloat16(), ops.prepare_nvfp4_weight(cuda(nasty_weight(30, 64)))
    clean = ops.nvfp4_gemm(x.cuda(), weight, prefill="fp8")
    x[1, 7], x[70, 9] = float("nan"), float("inf")
    found = ops.nvfp4_gemm(x.cuda(), weight, prefill="fp8")
    assert found[1].isnan().all()
    assert not found[70].isfinite().any()
    others = [row for row in range(90) if row not in (1, 70)]
    assert_same(found[others], clean[others])


@pytest.mark.usefixtures("in_fp8")
@pytest.mark.parametrize("rows", [100, 1000, 2000])
def test_the_same_bits_every_run(rows: int) -> None:
    weight = ops.prepare_nvfp4_weight(cuda(nvfp4.quantize(torch.randn(10240, 2048))))
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    first = ops.nvfp4_gemm(x, weight, prefill="fp8")
    for _ in range(20):
        assert torch.equal(ops.nvfp4_gemm(x, weight, prefill="fp8"), first)


@pytest.mark.usefixtures("in_fp8")
def test_strides_of_x() -> None:
    x, weight, bias = exact_operands(100, 24, 64, torch.float16)
    prepared, bias = ops.prepare_nvfp4_weight(cuda(weight)), bias.cuda()
    expected = ops.nvfp4_gemm(x.cuda(), prepared, bias, prefill="fp8")
    for base, view in (
        (torch.zeros(200, 130), lambda t: t[::2, 1:129:2]),
        (torch.zeros(100, 67), lambda t: t[:, 3:]),
        (torch.zeros(100, 72), lambda t: t[:, 8:]),
    ):
        wide = base.half().cuda()
        view(wide).copy_(x)
        assert_same(ops.nvfp4_gemm(view(wide), prepared, bias, prefill="fp8"), expected)
