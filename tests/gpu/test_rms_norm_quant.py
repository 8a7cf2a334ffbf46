# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of rms_norm_quant_fp8 against the composition of the reference's norm and quantization."""

import pytest
import torch

from llm_quant_rocm import hardware, ops, reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops import rms_norm_quant as operator
from tests.inputs import assert_same, code_distance, nasty_rows, random_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def assert_close_to_reference(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-6
) -> None:
    """The sum bit for bit; codes and scales but for what another order of the sum of squares can change.

    That order moves the norm by some 1e-7. Rounded to x's dtype, a value then moves by one unit in the last place or,
    nearly always, not at all: a scale where the row's largest value is the one that moves, a code where it sat at a
    rounding boundary.
    """
    found = ops.rms_norm_quant_fp8(x.cuda(), weight.cuda(), eps, None if residual is None else residual.cuda())
    fmt = fp8.for_device(found[0].device)
    q, scale, total = reference.rms_norm_quant_fp8(x.cpu(), weight.cpu(), eps, residual, fmt)
    if residual is not None:
        assert_same(found[2], total)
    found_q, found_scale = found[0].cpu(), found[1].cpu()
    torch.testing.assert_close(found_scale, scale, rtol=2 * torch.finfo(x.dtype).eps, atol=0, equal_nan=True)
    same_scale = torch.isclose(found_scale, scale, rtol=1e-6, atol=0, equal_nan=True).flatten()
    assert (~same_scale).sum() <= 1 + same_scale.numel() // 100
    nan = q.float().isnan()
    assert torch.equal(found_q.float().isnan(), nan)
    distance = code_distance(found_q, q).masked_fill(nan, 0)
    assert distance.max() <= 1
    assert (distance[same_scale] != 0).float().mean() <= 1e-3


@pytest.mark.parametrize("width", [1, 7, 100, 2880, 5120, 8192, 14336, 28672, 65536])
@pytest.mark.parametrize("with_residual", [False, True], ids=["norm", "add_norm"])
def test_bf16(width: int, with_residual: bool) -> None:
    call = operator.RowCall(hardware.detect(torch.device("cuda")), width)
    assert operator._choose(call).backend.name == "triton"
    x = random_rows(64, width, torch.bfloat16)
    weight = 1 + 0.1 * random_rows(1, width, torch.bfloat16, seed=1)[0]
    residual = random_rows(64, width, torch.bfloat16, seed=2) if with_residual else None
    assert_close_to_reference(x, weight, residual)


@pytest.mark.parametrize("width", [1, 100, 1025, 5120, 9000, 28672, 40000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["norm", "add_norm"])
def test_every_bit_where_the_sum_of_squares_is_exact(width: int, dtype: torch.dtype, with_residual: bool) -> None:
    """Rows of +-2**k: their mean square is 4**k in any order of summation, so the codes and scales have one value."""
    generator = torch.Generator().manual_seed(width)
    size = torch.arange(-6, 6).float().exp2()[:, None]
    x = torch.where(torch.rand(12, width, generator=generator) < 0.5, size, -size).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    residual = x if with_residual else None
    found = ops.rms_norm_quant_fp8(x.cuda(), weight.cuda(), 0.0, x.cuda() if with_residual else None)
    expected = reference.rms_norm_quant_fp8(x, weight, 0.0, residual, fp8.for_device(found[0].device))
    for result, value in zip(found, expected, strict=False):  # without a residual the operator returns no sum
        assert_same(result, value)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16,) * 2, (torch.float32,) * 2],
    ids=str,
)
def test_dtypes_and_nasty_rows(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x = nasty_rows(512, dtype)
    weight = torch.linspace(-2, 2, 512).to(weight_dtype)
    assert_close_to_reference(x, weight)
    assert_close_to_reference(x, weight, x.flip(0))


@pytest.mark.parametrize("shape", [(0, 64), (64,), (2, 3, 64), (3, 0)], ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["norm", "add_norm"])
def test_shapes(shape: tuple[int, ...], with_residual: bool) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16).cuda()
    weight = torch.ones(shape[-1], dtype=torch.bfloat16, device="cuda")
    found = ops.rms_norm_quant_fp8(x, weight, residual=x if with_residual else None)
    assert [tuple(t.shape) for t in found] == [shape, (*shape[:-1], 1), shape][: len(found)]


def test_strides() -> None:
    wide = random_rows(64, 1024, torch.bfloat16)
    weight = torch.linspace(-2, 2, 1024, dtype=torch.bfloat16)[::2]
    assert_close_to_reference(wide.cuda()[:, :512], weight, wide[:, 512:])
    assert_close_to_reference(wide.cuda()[:, ::2], weight, wide[:, 1::2])


def test_eps_is_used() -> None:
    x = torch.full((4, 64), 1e-3, dtype=torch.bfloat16)
    for eps in (1e-8, 1e-5, 1e-2):
        assert_close_to_reference(x, torch.ones(64), eps=eps)


def test_no_trace_of_uninitialized_memory(poisoned: None) -> None:
    x = random_rows(33, 100, torch.bfloat16)
    assert_close_to_reference(x, torch.ones(100), x.flip(0))
