# SPDX-License-Identifier: Apache-2.0
"""What is timed: copies that no cache holds, and right results alone. Time itself is for tests/gpu."""

from contextlib import nullcontext

import pytest
import torch

from llm_quant_rocm import timing


@pytest.mark.parametrize(("mib", "copies"), [(1, 256), (100, 3), (1024, 2)])
def test_operands_rotate_out_of_the_cache(mib: int, copies: int) -> None:
    assert timing.copies(mib << 20) == copies


def test_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "capture", lambda calls: None)
    monkeypatch.setattr(timing, "time_graphs", lambda graphs: dict.fromkeys(graphs, 1.0))
    found = timing.measure({"nan": [lambda: torch.full((2,), torch.nan)]}, torch.ones(2), {"nan": 0.1})
    assert not found["us"] and "exceeds 0.1" in found["failed"]["nan"]


def test_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(timing, "_seconds", lambda call, count: 1e-3)
    assert timing.copy_bandwidth("cpu", 10**6) == 2 * 10**6 / 1e-3
