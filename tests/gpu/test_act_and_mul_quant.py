# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of act_and_mul_quant_fp8 against the reference on the CPU."""

import pytest
import torch

from llm_quant_rocm import hardware, ops, reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops import act_and_mul_quant as operator
from tests.inputs import DTYPE_IDS, DTYPES, assert_close_codes, assert_same, nasty_rows, random_rows
from tests.routing_inputs import check_activations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WIDTHS = (1, 7, 16, 100, 2880, 9728, 14336, 28672, 53248, 65536)


def assert_equals_reference(x: torch.Tensor, activation: str = "silu") -> None:
    """The operator on the GPU against the reference on the CPU, for x on the CPU or a view on the GPU."""
    found = ops.act_and_mul_quant_fp8(x.cuda(), activation)
    expected = reference.act_and_mul_quant_fp8(x.cpu(), activation, fp8.for_device(found[0].device))
    assert_close_codes(found, expected, x.dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_triton_serves_every_width(width: int) -> None:
    call = operator.RowCall(hardware.detect(torch.device("cuda")), width)
    assert operator._choose(call).backend.name == "triton"


@pytest.mark.parametrize("width", WIDTHS)
def test_bits_behind_an_open_gate(width: int) -> None:
    """silu(64) is 64: what is left is the quantization of 64 * up, of nasty rows, bit for bit."""
    up = nasty_rows(width, torch.bfloat16)
    x = torch.cat([torch.full_like(up, 64), up], dim=1)
    found = ops.act_and_mul_quant_fp8(x.cuda())
    for result, value in zip(found, reference.act_and_mul_quant_fp8(x, "silu", fp8.OCP), strict=True):
        assert_same(result, value)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_every_dtype_and_activation(dtype: torch.dtype, activation: str) -> None:
    for width in (7, 16, 5120):
        assert_equals_reference(random_rows(64, 2 * width, dtype), activation)


@pytest.mark.parametrize("count", [0, 1, 3, 17, 4096, 70001])
def test_row_counts(count: int) -> None:
    """More rows than programs, too."""
    assert_equals_reference(random_rows(count, 96, torch.bfloat16))


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (64,), (2, 3, 64), (2, 3, 4, 64), (2, 0, 64)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    assert_equals_reference(torch.randn(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, :100], lambda x: x[:, 3:261], lambda x: x[::3], lambda x: x.t(), lambda x: x[:1].expand(5, -1)],
    ids=["narrow", "unaligned", "every third row", "transposed", "expanded"],
)
def test_strides(view) -> None:  # type: ignore[no-untyped-def]
    assert_equals_reference(view(random_rows(128, 512, torch.bfloat16).cuda()))


def test_rows_too_wide_for_registers() -> None:
    assert_equals_reference(random_rows(3, 2 * 65537, torch.bfloat16))


def test_no_trace_of_uninitialized_memory(poisoned: None) -> None:
    for width in (1, 100, 4096):
        assert_equals_reference(random_rows(33, 2 * width, torch.bfloat16))


def test_slots_whose_expert_is_not_here_have_no_row() -> None:
    check_activations(hardware.detect(torch.device("cuda")), "cuda")
