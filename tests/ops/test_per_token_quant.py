# SPDX-License-Identifier: Apache-2.0
"""ops.per_token_quant_fp8 on the CPU, where the reference runs."""

import pytest
import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats import fp8
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, nasty_rows, random_rows

OPERATOR = torch.ops.llm_quant_rocm.per_token_quant_fp8.default


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("width", [1, 7, 1000])
def test_equals_the_format(dtype: torch.dtype, width: int) -> None:
    x = nasty_rows(width, dtype)
    for found, expected in zip(ops.per_token_quant_fp8(x), fp8.quantize_rows(x, fp8.OCP), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("shape", [(0,), (7,), (0, 7), (3, 0), (2, 3, 7), (2, 0, 7), (2, 1, 3, 7)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    q, scale = ops.per_token_quant_fp8(x)
    assert (q.shape, scale.shape) == (x.shape, (*shape[:-1], 1))
    error = (fp8.dequantize(q, scale) - x).abs()
    assert (error <= x.abs() * 2**-4 * 1.001 + scale * 2**-10).all()


def test_strides() -> None:
    x = random_rows(12, 40, torch.bfloat16)
    for view in (x.t(), x[::2, ::3], x.view(3, 4, 40).transpose(0, 1), x[:1].expand(5, -1)):
        for found, expected in zip(ops.per_token_quant_fp8(view), ops.per_token_quant_fp8(view.clone()), strict=True):
            assert_same(found, expected)


def test_the_result_owns_its_memory() -> None:
    x = random_rows(4, 16, torch.float32)
    before = x.clone()
    q, scale = ops.per_token_quant_fp8(x)
    q.view(torch.uint8).fill_(1)
    scale.fill_(1)
    assert torch.equal(x, before)


@pytest.mark.parametrize("x", [random_rows(3, 16, torch.bfloat16), torch.empty(0, 4), torch.randn(2, 3, 5)])
def test_registration(x: torch.Tensor) -> None:
    torch.library.opcheck(OPERATOR, (x,))


def test_compiles_to_one_graph() -> None:
    compiled = torch.compile(ops.per_token_quant_fp8, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (0, 2, 3, 20):
        x = random_rows(count, 48, torch.bfloat16)
        for found, expected in zip(compiled(x), ops.per_token_quant_fp8(x), strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"per_token_quant_fp8: x is {dtype}, not bf16, fp16 or fp32"):
        ops.per_token_quant_fp8(torch.zeros(2, 4, dtype=dtype))


def test_refuses_a_scalar() -> None:
    with pytest.raises(ValueError, match="x is a scalar; it needs a last dimension"):
        ops.per_token_quant_fp8(torch.tensor(1.0))
