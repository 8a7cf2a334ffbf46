# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of rms_norm_quant_fp8 against the composition of the reference's norm and quantization."""

import pytest
import torch

from llm_quant_rocm import hardware, ops, reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops import rms_norm_quant as operator
from tests.inputs import assert_same, nasty_rows, random_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def assert_equals_reference(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-6
) -> None:
    """Every bit: the order of the sum of squares is part of the definition."""
    found = ops.rms_norm_quant_fp8(x.cuda(), weight.cuda(), eps, None if residual is None else residual.cuda())
    fmt = fp8.for_device(found[0].device)
    expected = reference.rms_norm_quant_fp8(x.cpu(), weight.cpu(), eps, residual, fmt)
    for result, value in zip(found, expected, strict=False):  # without a residual the operator returns no sum
        assert_same(result, value)


@pytest.mark.parametrize("width", [1, 7, 100, 1025, 2880, 5120, 8192, 9000, 14336, 28672, 40000, 65536])
@pytest.mark.parametrize("with_residual", [False, True], ids=["norm", "add_norm"])
def test_bf16(width: int, with_residual: bool) -> None:
    call = operator.RowCall(hardware.detect(torch.device("cuda")), width)
    assert operator._choose(call).backend.name == "triton"
    x = random_rows(64, width, torch.bfloat16)
    weight = 1 + 0.1 * random_rows(1, width, torch.bfloat16, seed=1)[0]
    residual = random_rows(64, width, torch.bfloat16, seed=2) if with_residual else None
    assert_equals_reference(x, weight, residual)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16,) * 2, (torch.float32,) * 2],
    ids=str,
)
def test_dtypes_and_nasty_rows(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x = nasty_rows(512, dtype)
    weight = torch.linspace(-2, 2, 512).to(weight_dtype)
    assert_equals_reference(x, weight)
    assert_equals_reference(x, weight, x.flip(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("width", [16392, 28672, 28680])
def test_many_wide_rows(width: int, dtype: torch.dtype) -> None:
    """On Hopper each program walks over some, up to 28672 columns; the last one's stretch is shorter."""
    x = random_rows(300, width + 8, dtype)
    weight = 1 + 0.1 * random_rows(1, width, dtype, seed=1)[0]
    assert_equals_reference(x.cuda()[:, :width], weight)


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
    assert_equals_reference(wide.cuda()[:, :512], weight, wide[:, 512:])
    assert_equals_reference(wide.cuda()[:, ::2], weight, wide[:, 1::2])


def test_eps_is_used() -> None:
    x = torch.full((4, 64), 1e-3, dtype=torch.bfloat16)
    for eps in (1e-8, 1e-5, 1e-2):
        assert_equals_reference(x, torch.ones(64), eps=eps)


def test_no_trace_of_uninitialized_memory(poisoned: None) -> None:
    x = random_rows(33, 100, torch.bfloat16)
    assert_equals_reference(x, torch.ones(100), x.flip(0))
