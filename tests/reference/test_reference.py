# SPDX-License-Identifier: Apache-2.0
"""The references against float64."""

import math

import numpy as np
import pytest
import torch

from llm_quant_rocm import reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.fp8 import FNUZ, OCP, Fp8Format
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Target
from llm_quant_rocm.reference.rms_norm_quant import mean_square, rms_norm
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, integer_product, nasty_rows, product64, random_rows

FORMATS = pytest.mark.parametrize("fmt", [OCP, FNUZ], ids=["ocp", "fnuz"])


@FORMATS
@pytest.mark.parametrize("out_dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 33), (40, 64, 512), (0, 4, 8), (4, 0, 8), (4, 8, 0)], ids=str)
def test_ptpc_gemm_is_exact_on_integers(fmt: Fp8Format, out_dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    *operands, bias = integer_product(*shape, fmt.dtype)
    for chosen in (None, bias):
        found = reference.ptpc_gemm(*operands, chosen, out_dtype)
        assert_same(found, product64(*operands, chosen).float().to(out_dtype))


@FORMATS
@pytest.mark.parametrize("k", [1, 100, 4096])
def test_ptpc_gemm_errs_no_more_than_a_sum_in_fp32(fmt: Fp8Format, k: int) -> None:
    xq, xscale = fp8.quantize_rows(random_rows(20, k, torch.float32, seed=1), fmt)
    wq, wscale = fp8.quantize_rows(random_rows(30, k, torch.float32, seed=2), fmt)
    bias = torch.linspace(-3, 3, 30)
    found = reference.ptpc_gemm(xq, xscale, wq, wscale, bias, torch.float32).double()
    # The products are exact in fp32: k - 1 additions, two scales and the bias each round once.
    terms = product64(*(t.float().abs() for t in (xq, xscale, wq, wscale)), bias.abs())
    assert ((found - product64(xq, xscale, wq, wscale, bias)).abs() <= (k + 2) * 2**-24 * terms).all()


def test_ptpc_gemm_applies_one_scale_after_the_other() -> None:
    """Scales whose product overflows leave a sum of zero what it is."""
    codes, large = torch.tensor([[1.0, 1.0]]).to(OCP.dtype), torch.full((1, 1), 1e30)
    found = reference.ptpc_gemm(codes, large, torch.tensor([[2.0, -2.0]]).to(OCP.dtype), large, None, torch.float32)
    assert found.item() == 0


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_ptpc_gemm_rounds_once(out_dtype: torch.dtype) -> None:
    operands = (*fp8.quantize_rows(torch.randn(20, 64), OCP), *fp8.quantize_rows(torch.randn(30, 64), OCP))
    bias = torch.linspace(-9, 9, 30)
    exact = reference.ptpc_gemm(*operands, bias, torch.float32)
    assert_same(reference.ptpc_gemm(*operands, bias, out_dtype), exact.to(out_dtype))


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_experts_round_where_they_say(dtype: torch.dtype, fmt: Fp8Format) -> None:
    """Every sum has one term, so the definition's own steps give the bits."""
    x, router = random_rows(50, 16, dtype), torch.rand(50, 2)

    def diagonal(value: float) -> tuple[torch.Tensor, torch.Tensor]:
        codes = (torch.eye(16) * value).expand(2, -1, -1).to(fmt.dtype)
        return codes, torch.tensor([[0.3], [0.7]]).expand(2, 16).unsqueeze(-1) / value

    (gate_codes, gate_scale), (up_codes, up_scale), w2 = diagonal(1.5), diagonal(3.0), diagonal(1.25)
    w13 = torch.cat([gate_codes.view(torch.uint8), up_codes.view(torch.uint8)], 1).view(fmt.dtype)
    w13_scale, ids = torch.cat([gate_scale, up_scale], 1), torch.tensor([[0, 1]]).expand(50, 2)
    found = reference.ptpc_moe(x, w13, w13_scale, *w2, router, ids, "silu", fmt)
    (xq, xscale), total = fp8.quantize_rows(x, fmt), torch.zeros(50, 16)
    for expert in range(2):
        products = torch.cat([xq.float() * 1.5, xq.float() * 3.0], 1)
        gate, up = (products * xscale * w13_scale[expert].t()).to(dtype).float().chunk(2, dim=-1)
        aq, ascale = fp8.quantize_rows((torch.nn.functional.silu(gate) * up).to(dtype), fmt)
        y = aq.float() * 1.25 * ascale * w2[1][expert].t()
        total += (y * router[:, expert, None]).to(dtype).float()
    assert_same(found, total.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("with_residual", [False, True], ids=["norm", "add_norm"])
def test_rms_norm(dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = random_rows(50, 333, dtype), torch.linspace(-2, 2, 333).to(dtype)
    residual = random_rows(50, 333, dtype, seed=1) if with_residual else None
    normed, total = rms_norm(x, weight, 1e-5, residual)
    z = x.double() if residual is None else (x.double() + residual.double()).to(dtype).double()
    expected = z / (z.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_same(total, z.to(dtype))
    assert normed.dtype == dtype
    # One rounding to the dtype, after a few in fp32.
    half_unit = expected.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
    assert ((normed.double() - expected).abs() <= half_unit + expected.abs() * 1e-6).all()


@pytest.mark.parametrize("width", [1, 7, 8, 333, 4096])
def test_the_mean_square_is_a_sum_of_eights(width: int) -> None:
    """Bit by bit what the docstring says, which is what the kernels compute: three rounds of neighbours in fp32, the
    rest in fp64."""
    x = random_rows(200, width, torch.float32)
    squares = np.zeros((200, -(-width // 8) * 8), np.float32)
    squares[:, :width] = np.square(x.numpy())
    for _ in range(3):
        squares = squares[:, 0::2] + squares[:, 1::2]
    sums = np.array([math.fsum(row) for row in squares.tolist()]).astype(np.float32)
    assert_same(mean_square(x)[:, 0], torch.from_numpy(sums / np.float32(width)))


def test_rms_norm_rounds_where_it_says() -> None:
    """Bit by bit in numpy's fp32: a root, its reciprocal, and two products."""
    x, weight = random_rows(300, 77, torch.float32), torch.linspace(-2, 2, 77)
    inverse = np.float32(1) / np.sqrt((mean_square(x) + 1e-5).numpy())
    assert_same(rms_norm(x, weight, 1e-5, None)[0], torch.from_numpy(x.numpy() * inverse * weight.numpy()))


@FORMATS
def test_static_fp8_multiplies_by_the_reciprocal(fmt: Fp8Format) -> None:
    """Ties of E4M3 times 41, exact in fp16: a quotient would be the tie again, but 41 * (1 / 41) is not 1 in fp32."""
    numbers = torch.arange(8, 0x7E, dtype=torch.uint8).view(fmt.dtype).float()
    ties = (numbers[:-1] + numbers[1:]) / 2
    ties = ties[ties < min(fmt.max, 65504 / 41)]
    normed, scale = (ties * 41).half(), torch.tensor([41.0])
    assert (normed.float() / 41 == ties).all()
    target = Target(Quantization.FP8_STATIC, fmt)
    found = reference.norm_quant(torch.ones(1, len(ties)).half(), None, Norm(normed, 0.0, scale=scale), target)
    expected = torch.from_numpy(normed.float().numpy() * (np.float32(1) / np.float32(41))).to(fmt.dtype)
    assert found.normed is not None and found.codes is not None
    assert_same(found.normed[0], normed)
    assert_same(found.codes[0], expected)
    assert not torch.equal(found.codes[0].float(), ties.to(fmt.dtype).float())


@FORMATS
def test_static_fp8_saturates(fmt: Fp8Format) -> None:
    """Also where torch's conversion makes NaN of what is too large."""
    normed = torch.tensor([fmt.max, fmt.max * 2, 65504.0, -fmt.max * 2, -torch.inf, torch.nan, 0.0, 1.0])
    norm = Norm(normed, 0.0, scale=torch.ones(1))
    found = reference.norm_quant(torch.ones(1, 8).bfloat16(), None, norm, Target(Quantization.FP8_STATIC, fmt))
    assert found.codes is not None
    assert_same(found.codes[0].float(), normed.clamp(-fmt.max, fmt.max))


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_rms_norm_quant_is_the_composition(fmt: Fp8Format, dtype: torch.dtype) -> None:
    x, weight = nasty_rows(65, dtype), torch.linspace(-2, 2, 65).to(dtype)
    for residual in (None, x.flip(0)):
        normed, total = rms_norm(x, weight, 1e-6, residual)
        found = reference.rms_norm_quant_fp8(x, weight, 1e-6, residual, fmt)
        for part, expected in zip(found, (*reference.per_token_quant_fp8(normed, fmt), total), strict=True):
            assert_same(part, expected)


def test_a_zero_row_normalises_to_zero() -> None:
    q, scale, _ = reference.rms_norm_quant_fp8(torch.zeros(2, 8), torch.ones(8), 1e-6, None, OCP)
    assert (q.float() == 0).all()
    assert (scale == torch.tensor(OCP.min_scale)).all()
