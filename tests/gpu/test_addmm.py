# SPDX-License-Identifier: Apache-2.0
"""torch.addmm applies alpha, and a bias to a contiguous result, in fp32 before its only rounding: on that stands
`nvfp4_slices.multiply_runs`.

Of AMD's kernels nothing is needed: formats/nvfp4.py expands the weight."""

from collections.abc import Iterator

import pytest
import torch

from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.kernels import nvfp4_slices
from tests.inputs import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
SHAPES = pytest.mark.parametrize(("m", "n", "k"), [(1024, 1024, 512), (1500, 200, 272), (4096, 2560, 1024)], ids=str)
# fp32 values of 24 significant bits, which bf16 and fp16 would round.
SCALES = (0.012345679, 1.7654321, 3.1415927e-3)


@pytest.fixture(autouse=True)
def fp32_sums() -> Iterator[None]:
    """cuBLAS may add up parts of a sum in 16 bits unless it is told not to; ROCm's libraries have no such switch."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction = before


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [m, k], weight [n, k], and their product in fp64: small integers, so that fp32 sums are exact in any order."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, weight = (
        torch.randint(-16, 17, (rows, k), device="cuda", generator=generator).to(dtype).contiguous() for rows in (m, n)
    )
    return x, weight, (x.float() @ weight.float().t()).double().round()


def in_columns(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """[m, n] as columns of a wider matrix, as a shard's are of a fused layer's result."""
    return torch.full((m, 3 * n), float("nan"), dtype=dtype, device="cuda")[:, n : 2 * n]


@HALF
@SHAPES
def test_alpha_before_the_rounding(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """The bits of an fp32 product that is scaled in fp32 and rounded."""
    x, weight, product = operands(m, n, k, dtype)
    for scale in SCALES:
        out = in_columns(m, n, dtype)
        torch.addmm(out, x, weight.t(), beta=0, alpha=scale, out=out)
        once = (product.float() * torch.tensor(scale, device="cuda")).to(dtype)
        twice = product.to(dtype) * torch.tensor(scale, device="cuda", dtype=torch.float32)
        assert not torch.equal(once, twice.to(dtype)), "the operands tell one rounding from two"
        assert_same(out.contiguous(), once)


@HALF
@SHAPES
def test_a_bias_before_the_rounding(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Half a unit of the last place from the exact sum, and what fp32 loses besides."""
    x, weight, product = operands(m, n, k, dtype)
    generator = torch.Generator(device="cuda").manual_seed(1)
    bias = torch.randn(n, device="cuda", generator=generator).to(dtype)
    for scale in SCALES:
        exact = product * torch.tensor(scale, dtype=torch.float32).double() + bias.double()
        slack = 2**-22 * (exact.abs() + bias.double().abs())
        out = torch.empty(m, n, dtype=dtype, device="cuda")
        torch.addmm(bias, x, weight.t(), alpha=scale, out=out)
        assert ((out.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + slack).all()


@HALF
@pytest.mark.parametrize("values", [2**26, 2**18], ids=["whole", "slices"])
@pytest.mark.parametrize("biased", [False, True], ids=["no_bias", "bias"])
def test_the_product_of_runs(biased: bool, values: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rounding from float64, and closer to it than upstream's emulation, which rounds the weight too."""
    monkeypatch.setattr(nvfp4_slices, "EXPANDED_VALUES", values)
    shards, sizes = (1000, 300, 236), (1.0, 30.0, 0.03)
    parts = [nvfp4.quantize(torch.randn(n, 1024) * size / 32) for n, size in zip(shards, sizes, strict=True)]
    weight = nvfp4.NvFp4Weight(*(torch.cat([getattr(part, name) for part in parts]).cuda() for name in vars(parts[0])))
    x = torch.randn(1024, 1024, device="cuda").to(dtype)
    bias = torch.cat([torch.randn(n) * size / 4 for n, size in zip(shards, sizes, strict=True)]).to(dtype).cuda()
    bias = bias if biased else None
    added = 0 if bias is None else bias.double()
    expected = x.double() @ weight.dequantize(torch.float64).t() + added
    emulated = (x.float() @ weight.dequantize(dtype).float().t() + (0 if bias is None else bias.float())).to(dtype)

    def expand(first: int, rows: int) -> torch.Tensor:
        some = slice(first, first + rows)
        return nvfp4.block_values(weight.codes[some], weight.scales[some]).to(dtype)

    runs = [(n, part.global_scale[0].item()) for n, part in zip(shards, parts, strict=True)]
    out = nvfp4_slices.multiply_runs(x, runs, bias, torch.full_like(emulated, float("nan")), expand)
    for columns in torch.arange(sum(shards)).split(shards):
        error, theirs = ((found.double() - expected)[:, columns].norm() for found in (out, emulated))
        assert error < 0.9 * theirs
        assert error < expected[:, columns].norm() * (2.2e-3 if dtype == torch.bfloat16 else 3e-4)
