# SPDX-License-Identifier: Apache-2.0
"""ops.act_and_mul_quant_fp8 on the CPU, where the reference runs."""

import pytest
import torch
from torch.nn import functional

from llm_quant_rocm import ops
from llm_quant_rocm.formats import fp8
from tests.inputs import DTYPE_IDS, DTYPES, assert_close_codes, assert_same, nasty_rows, random_rows

OPERATOR = torch.ops.llm_quant_rocm.act_and_mul_quant_fp8.default
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def in_double(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up in float64, by definition, rounded to x's dtype."""
    gate, up = x.double().chunk(2, dim=-1)
    if activation == "silu":
        gate = gate / (1 + torch.exp(-gate))
    elif activation == "gelu":
        gate = gate / 2 * (1 + torch.erf(gate / 2**0.5))
    else:
        gate = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    return (gate * up).to(x.dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_against_float64(dtype: torch.dtype, activation: str) -> None:
    x = random_rows(64, 400, dtype).clamp(-300, 300)
    expected = fp8.quantize_rows(in_double(x, activation), fp8.OCP)
    assert_close_codes(ops.act_and_mul_quant_fp8(x, activation), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("width", [1, 7, 100])
def test_nasty_values_behind_an_open_gate(dtype: torch.dtype, width: int) -> None:
    """silu(64) is 64 in fp32: what is quantized is 64 * up, in bits."""
    up = nasty_rows(width, dtype)
    found = ops.act_and_mul_quant_fp8(torch.cat([torch.full_like(up, 64), up], dim=1))
    for result, value in zip(found, fp8.quantize_rows((up.float() * 64).to(dtype), fp8.OCP), strict=True):
        assert_same(result, value)


def test_it_is_what_torch_compile_makes_of_the_separate_operators() -> None:
    """Inductor computes silu and the product in fp32 and rounds once; one by one torch rounds silu as well."""

    def apart(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.per_token_quant_fp8(functional.silu(x[:, :96]) * x[:, 96:])

    x = random_rows(40, 192, torch.bfloat16)
    assert_close_codes(ops.act_and_mul_quant_fp8(x), torch.compile(apart, fullgraph=True)(x), torch.bfloat16)


@pytest.mark.parametrize("shape", [(0,), (8,), (0, 8), (3, 0), (2, 3, 8), (2, 0, 8), (2, 1, 3, 8)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    q, scale = ops.act_and_mul_quant_fp8(torch.randn(shape))
    assert (q.shape, scale.shape) == ((*shape[:-1], shape[-1] // 2), (*shape[:-1], 1))


def test_strides() -> None:
    x = random_rows(12, 40, torch.bfloat16)
    for view in (x.t(), x[::2, ::4], x.view(3, 4, 40).transpose(0, 1), x[:1].expand(5, -1)):
        for found, expected in zip(
            ops.act_and_mul_quant_fp8(view), ops.act_and_mul_quant_fp8(view.clone()), strict=True
        ):
            assert_same(found, expected)


@pytest.mark.parametrize("x", [random_rows(3, 16, torch.bfloat16), torch.empty(0, 4), torch.randn(2, 3, 6)])
def test_registration(x: torch.Tensor) -> None:
    torch.library.opcheck(OPERATOR, (x, "gelu"))


def test_compiles_to_one_graph() -> None:
    compiled = torch.compile(ops.act_and_mul_quant_fp8, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (0, 2, 3, 20):
        x = random_rows(count, 48, torch.bfloat16)
        for found, expected in zip(compiled(x), ops.act_and_mul_quant_fp8(x), strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"act_and_mul_quant_fp8: x is {dtype}, not bf16, fp16 or fp32"):
        ops.act_and_mul_quant_fp8(torch.zeros(2, 4, dtype=dtype))


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)], ids=str)
def test_refuses_what_has_no_halves(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="its last dimension is gate, then up, of one width"):
        ops.act_and_mul_quant_fp8(torch.ones(shape))


def test_refuses_other_activations() -> None:
    with pytest.raises(ValueError, match="activation 'relu' is not one of silu, gelu, gelu_tanh"):
        ops.act_and_mul_quant_fp8(torch.ones(2, 4), "relu")
