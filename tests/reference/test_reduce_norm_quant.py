# SPDX-License-Identifier: Apache-2.0
"""The definition of reduce_norm_quant against float64, in flashinfer's cases with a tenth of their tolerances.

Kernels have every bit of the definition (tests/amd, tests/gpu), so what holds here holds of them.
"""

from collections.abc import Sequence

import pytest
import torch

from llm_quant_rocm import reference
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Result, Target

# By dtype, those of tests/comm/test_trtllm_allreduce_fusion.py, divided by ten.
ABSOLUTE, RELATIVE = {torch.bfloat16: 8e-2, torch.float16: 8e-3}, 1e-3


def gaussian(world: int, rows: int, width: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, Norm]:
    """x of every rank, the residual, and a norm without its epsilon, all normally distributed."""
    generator = torch.Generator().manual_seed(rows + width)
    *xs, residual = torch.randn(world + 1, rows, width, generator=generator).to(dtype)
    return xs, residual, Norm(torch.randn(width, generator=generator).to(dtype))


def exact(xs: Sequence[torch.Tensor], residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The next residual and the normalised rows, float64."""
    z = residual.double() + sum(x.double() for x in xs)
    inverse = (z.square().mean(1, keepdim=True) + norm.eps).rsqrt()
    return z, z * inverse * (norm.weight.double() + norm.weight_bias)


def beyond(found: torch.Tensor | None, expected: torch.Tensor, dtype: torch.dtype) -> int:
    """Values beyond the tolerances."""
    assert found is not None
    return int(((found.double() - expected).abs() > ABSOLUTE[dtype] + RELATIVE * expected.abs()).sum())


@pytest.mark.parametrize("dtype", ABSOLUTE, ids=["bf16", "fp16"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (128, 1024), (128, 7168), (1024, 2048), (4, 8192)])
def test_residual_and_norm(world: int, rows: int, width: int, dtype: torch.dtype) -> None:
    xs, residual, given = gaussian(world, rows, width, dtype)
    norm = Norm(given.weight, 1e-3)
    z, normed = exact(xs, residual, norm)
    for shots in (1, 2):
        found: Result = reference.reduce_norm_quant(xs, residual, norm, Target(Quantization.NONE), shots=shots)
        assert beyond(found.residual, z, dtype) == beyond(found.normed, normed, dtype) == 0


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_gemma(bias: float) -> None:
    """8 rows of 2048; a tolerance of 2e-3 and a tenth of a hundredth, and the roundings of bf16, which are larger."""
    xs, residual, given = gaussian(2, 8, 2048, torch.bfloat16)
    norm = Norm(given.weight, 1e-6, bias)
    found = reference.reduce_norm_quant(xs, residual, norm, Target(Quantization.NONE))
    z, normed = exact(xs, residual, norm)
    rounding = torch.finfo(torch.bfloat16).eps / 2
    total = sum(x.double() for x in xs)
    of_z = rounding * (total.abs() + z.abs())
    assert ((found.residual.double() - z).abs() <= 2e-3 + 1e-3 * z.abs() + of_z).all()
    _, of_found = exact([found.residual], residual * 0, norm)
    assert found.normed is not None
    allowed = 2e-3 + (1e-3 + rounding) * of_found.abs()
    assert ((found.normed.double() - of_found).abs() <= allowed).all()
    wrong_bias = exact([found.residual], residual * 0, Norm(norm.weight, norm.eps, 1.0 - bias))[1]
    assert not ((found.normed.double() - wrong_bias).abs() <= allowed).all()


def test_a_column_that_is_left_out_is_found() -> None:
    xs, residual, norm = gaussian(2, 4, 1024, torch.bfloat16)
    found = reference.reduce_norm_quant(xs, residual, norm, Target(Quantization.NONE))
    assert found.normed is not None
    found.normed[:, 1000:] = 0
    assert beyond(found.normed, exact(xs, residual, norm)[1], torch.bfloat16) > 80
