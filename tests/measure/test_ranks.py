# SPDX-License-Identifier: Apache-2.0
"""The processes of a measurement, on the CPU: what they report, how they end."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_quant_rocm.measure import ranks
from llm_quant_rocm.measure.ranks import compile_together, on_every_rank
from tests.measure import parts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would want GPUs")


def test_rank_0_reports_as_it_goes() -> None:
    heard: list[tuple[str, Any]] = []
    assert on_every_rank(parts.add_up, 2, (10, 3), lambda *what: heard.append(what))
    assert heard == [("sum", 21), ("sum", 23), ("sum", 25), ("slowest", 1.0)]


def test_ctrl_c_is_for_the_process_that_ends_the_ranks() -> None:
    heard: list[tuple[str, Any]] = []
    assert on_every_rank(parts.say_what_is_blocked, 1, (), lambda *what: heard.append(what))
    assert heard == [("blocked", {signal.SIGINT})]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_rank_that_fails_ends_all_and_what_was_heard_stays() -> None:
    heard: list[tuple[str, Any]] = []
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="no peer access"):
        on_every_rank(parts.fail, 2, (), lambda *what: heard.append(what))
    assert heard == [("before", 0)]


def test_ranks_are_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still until rank 0 was heard: on a slow machine it takes long to begin."""
    heard: list[tuple[str, Any]] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 if heard else 70.0)
    monkeypatch.setattr(ranks, "time", clock)
    assert not on_every_rank(parts.hang, 2, (), lambda *what: heard.append(what), seconds=20)
    assert heard == [("before", 0)]


def test_all_is_compiled(tmp_path: Path) -> None:
    names = [f"{number}" for number in range(5)]
    assert compile_together(parts.write, [(str(tmp_path), name) for name in names]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with pytest.raises(FileExistsError):
        compile_together(parts.write, [(str(tmp_path), "0")])


def test_ctrl_c_is_not_for_the_compiling_processes() -> None:
    """An idle one that it ended would keep the pool's lock, and the pool would wait for ever."""
    assert compile_together(parts.wants_no_ctrl_c, [()]) == 1
