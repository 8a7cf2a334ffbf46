# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 references against float64."""

import pytest
import torch

from llm_quant_rocm import reference
from llm_quant_rocm.formats import fp8, nvfp4
from tests.inputs import assert_same, random_rows
from tests.nvfp4_inputs import nasty_weight, weight64

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def emulated(x: torch.Tensor, weight: nvfp4.NvFp4Weight) -> torch.Tensor:
    """What vLLM does without FP4 units: block scale times global scale in fp32, the weight in 16 bits, a matmul."""
    codes = nvfp4.e2m1_decode(nvfp4.unpack(weight.codes)).unflatten(-1, (-1, 16))
    scales = weight.scales.float() * weight.global_scale[:, None]
    return x @ (codes * scales[..., None]).flatten(-2).to(x.dtype).t()


@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 5, 48), (20, 70, 512), (0, 4, 32), (4, 0, 32)], ids=str)
def test_the_product_errs_no_more_than_a_sum_in_fp32(shape: tuple[int, int, int], with_bias: bool) -> None:
    m, n, k = shape
    x, weight = random_rows(m, k, torch.float32, seed=1).bfloat16(), nasty_weight(n, k)
    bias = torch.linspace(-3, 3, n) if with_bias else None
    w = weight64(weight)
    expected = x.double() @ w.t() + (0 if bias is None else bias.double())
    # bf16 times six bits is exact in fp32; k - 1 additions, the global scale and the bias each round once.
    terms = x.double().abs() @ w.abs().t() + (0 if bias is None else bias.double().abs())
    for batch_invariant in (False, True):
        found = reference.nvfp4_gemm(x, weight, bias, torch.float32, batch_invariant).double()
        assert found.shape == (m, n)
        assert ((found - expected).abs() <= (k + 2) * 2**-24 * terms).all()


@HALF
def test_the_product_rounds_once(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(9, 64).to(dtype), nvfp4.quantize(torch.randn(30, 64)), torch.linspace(-9, 9, 30)
    exact = reference.nvfp4_gemm(x, weight, bias, torch.float32)
    assert_same(reference.nvfp4_gemm(x, weight, bias, dtype), exact.to(dtype))


@HALF
@pytest.mark.parametrize("k", [64, 1024])
def test_no_further_from_float64_than_upstreams_emulation(dtype: torch.dtype, k: int) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(40, k, generator=generator).to(dtype)
        weight = nvfp4.quantize(torch.randn(100, k, generator=generator) * 0.02)
        expected = x.double() @ weight64(weight).t()
        ours = (reference.nvfp4_gemm(x, weight, None, dtype).double() - expected).norm()
        theirs = (emulated(x, weight).double() - expected).norm()
        assert ours <= theirs
        if dtype == torch.bfloat16:
            assert ours < 0.9 * theirs, "the weights' rounding to bf16 is what the exact product saves"


def test_chunks_of_the_weight_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(5, 64).bfloat16(), nasty_weight(50, 64)
    whole = reference.nvfp4_gemm(x, weight, None, torch.float32, batch_invariant=True)
    monkeypatch.setattr(nvfp4, "_CHUNK_ELEMENTS", 64 * 7)
    parts = reference.nvfp4_gemm(x, weight, None, torch.float32)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5 * whole.abs().max().item())


@pytest.mark.parametrize("fmt", [fp8.OCP, fp8.FNUZ], ids=["ocp", "fnuz"])
@HALF
def test_the_fp8_product_is_ptpc_of_the_decoded_weight(fmt: fp8.Fp8Format, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(70, 96).to(dtype), nasty_weight(40, 96), torch.linspace(-1, 1, 40)
    found = reference.nvfp4_gemm_fp8(x, weight, bias, dtype, fmt)
    assert_same(found, reference.ptpc_gemm(*fp8.quantize_rows(x, fmt), *nvfp4.to_fp8(weight, fmt), bias, dtype))


def test_fp8_costs_what_two_roundings_to_e4m3_cost() -> None:
    x, weight = torch.randn(80, 512).bfloat16(), nvfp4.quantize(torch.randn(128, 512))
    expected = x.double() @ weight64(weight).t()
    found = reference.nvfp4_gemm_fp8(x, weight, None, torch.bfloat16, fp8.OCP).double()
    assert 0.01 < (found - expected).norm() / expected.norm() < 0.033


@HALF
def test_experts_round_where_they_say(dtype: torch.dtype) -> None:
    """Every sum has one term, so the definition's own steps give the bits."""
    generator = torch.Generator().manual_seed(0)
    x, router = torch.randn(50, 16, generator=generator).to(dtype), torch.rand(50, 2, generator=generator)

    def diagonal(code: int, scale: float, global_scale: float) -> nvfp4.NvFp4Weight:
        codes = nvfp4.pack(torch.eye(16, dtype=torch.uint8) * code).expand(2, -1, -1)
        scales = torch.full((2, 16, 1), scale).to(torch.float8_e4m3fn)
        return nvfp4.NvFp4Weight(codes, scales, torch.tensor([[1.0], [3.1]]).expand(2, 16) * global_scale)

    gate_part, up_part, w2 = diagonal(3, 1.0, 0.3), diagonal(5, 1.0, 0.6), diagonal(3, 1.25, 0.7)
    names = ("codes", "scales", "global_scale")
    w13 = nvfp4.NvFp4Weight(*(torch.cat([getattr(part, n) for part in (gate_part, up_part)], 1) for n in names))
    found = reference.nvfp4_moe(x, w13, w2, router, torch.tensor([[0, 1]]).expand(50, 2), "silu")
    total = torch.zeros(50, 16)
    for expert in range(2):
        gate = (x.float() * 1.5 * gate_part.global_scale[expert]).to(dtype).float()
        up = (x.float() * 3.0 * up_part.global_scale[expert]).to(dtype).float()
        inner = (torch.nn.functional.silu(gate) * up).to(dtype).float()
        total += ((inner * 1.875 * w2.global_scale[expert]) * router[:, expert, None]).to(dtype).float()
    assert_same(found, total.to(dtype))
