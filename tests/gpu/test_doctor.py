# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm doctor` on a machine with GPUs: quick, and with figures that can be."""

import time

import pytest
import torch

from llm_quant_rocm.cli.doctor import machine, operators

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_every_gpu_is_measured_in_a_second_each() -> None:
    machine.examine()  # makes contexts
    start = time.monotonic()
    part = machine.examine()
    seconds = time.monotonic() - start
    gpus = torch.cuda.device_count()
    assert seconds < gpus
    assert part.problems == []
    assert [row.device for row in part.rows] == [f"cuda:{index}" for index in range(gpus)]
    for row in part.rows:
        # An RTX 4060 copies some 250 GB/s, a B300 some 7000.
        assert row.copy is None or 100 < row.copy < 20000
        assert 0 < row.free <= row.memory
        assert row.device not in row.reaches


def test_kernels_serve_every_operator_that_has_them_here() -> None:
    part = operators.examine(torch.device("cuda"))
    assert part.problems == []
    if torch.cuda.get_device_capability() == (9, 0):
        assert "reference" not in {row.runs_on for row in part.rows}
