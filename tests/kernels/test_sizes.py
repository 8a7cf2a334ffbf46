# SPDX-License-Identifier: Apache-2.0
"""The host's sizes of launches are Triton's."""

import pytest

triton = pytest.importorskip("triton")
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2  # noqa: E402


def test_sizes_are_those_of_triton() -> None:
    for number in (1, 2, 3, 16, 17, 5120, 65536, 65537):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for by in (1, 3, 16, 128):
            assert cdiv(number, by) == triton.cdiv(number, by)
    assert cdiv(0, 8) == triton.cdiv(0, 8)
