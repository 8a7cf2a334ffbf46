# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of per_token_quant_fp8 against the reference on the CPU, bit for bit."""

import pytest
import torch

from llm_quant_rocm import hardware, ops, reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops import per_token_quant as operator
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, nasty_rows, random_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WIDTHS = (1, 7, 16, 100, 2880, 5120, 7168, 8192, 12800, 28672, 65536)


def assert_equals_reference(x: torch.Tensor) -> None:
    """The operator on the GPU against the reference on the CPU, for x on the CPU or a view on the GPU."""
    q, scale = ops.per_token_quant_fp8(x.cuda())
    expected_q, expected_scale = reference.per_token_quant_fp8(x.cpu(), fp8.for_device(q.device))
    assert_same(scale, expected_scale)
    assert_same(q, expected_q)


@pytest.mark.parametrize("width", WIDTHS)
def test_triton_serves_every_width(width: int) -> None:
    call = operator.RowCall(hardware.detect(torch.device("cuda")), width)
    assert operator._choose(call).backend.name == "triton"


@pytest.mark.parametrize("width", WIDTHS)
def test_bits_bf16(width: int) -> None:
    assert_equals_reference(nasty_rows(width, torch.bfloat16))


@pytest.mark.parametrize("width", [7, 16, 5120, 65536])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_bits_of_other_dtypes(width: int, dtype: torch.dtype) -> None:
    assert_equals_reference(nasty_rows(width, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_16_bit_value_under_many_scales(dtype: torch.dtype) -> None:
    """All finite values of the dtype in one row, under 64 scales: no quotient may round differently."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    limits = torch.logspace(-3, 4, 64, dtype=torch.float64).to(dtype)
    rows = values.repeat(64, 1)
    rows[rows.abs() > limits[:, None]] = 0
    rows[:, 0] = limits
    assert_equals_reference(rows)


@pytest.mark.parametrize("count", [0, 1, 3, 17, 4096, 70001])
def test_row_counts(count: int) -> None:
    assert_equals_reference(random_rows(count, 48, torch.bfloat16))


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (64,), (2, 3, 64), (2, 3, 4, 64), (2, 0, 64)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    assert_equals_reference(torch.randn(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :100],
        lambda x: x[:, 3:260],
        lambda x: x[::3],
        lambda x: x.t(),
        lambda x: x[:1].expand(5, -1),
        lambda x: x.view(8, 16, 512).transpose(0, 1),
        lambda x: x[:, ::2],
    ],
    ids=["narrow", "unaligned", "every third row", "transposed", "expanded", "permuted", "every second column"],
)
def test_strides(view) -> None:  # type: ignore[no-untyped-def]
    assert_equals_reference(view(random_rows(128, 512, torch.bfloat16).cuda()))


def test_rows_too_wide_for_registers() -> None:
    assert_equals_reference(nasty_rows(65537, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_no_trace_of_uninitialized_memory(poisoned: None, dtype: torch.dtype) -> None:
    for width in (1, 100, 4096):
        assert_equals_reference(random_rows(33, width, dtype))
