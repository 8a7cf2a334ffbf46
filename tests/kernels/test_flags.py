# SPDX-License-Identifier: Apache-2.0
"""Which stream gets which zeros, with the CPU for a GPU. tests/gpu/test_flags.py has streams and graphs."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_quant_rocm.kernels import flags

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Each thread has a stream of its own, and none captures unless `capturing`."""
    state = SimpleNamespace(capturing=False)
    monkeypatch.setattr(flags, "_all", {})
    monkeypatch.setattr(flags, "_flags", {})
    active = SimpleNamespace(get_current_stream=lambda device: threading.get_native_id())
    monkeypatch.setattr(flags, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    yield state


def test_threads_that_come_at_once_get_zeros_of_their_own(
    streams: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)

    class SlowFlags(dict[Any, torch.Tensor]):
        """Whoever counts them is held up until another does, if it is let."""

        def __iter__(self) -> Iterator[Any]:
            known = list(super().__iter__())
            with suppress(threading.BrokenBarrierError):
                together.wait(0.3)
            return iter(known)

    monkeypatch.setattr(flags, "_flags", SlowFlags())
    start = threading.Barrier(2)

    def both(_: int) -> tuple[int, int]:
        start.wait()
        return flags.flags_of(CPU).data_ptr(), flags.flags_of(CPU).data_ptr()

    with ThreadPoolExecutor(2) as threads:
        (first, first_again), (second, second_again) = threads.map(both, range(2))
    assert first != second
    assert (first, second) == (first_again, second_again)


def test_a_first_capture_gets_zeros_of_its_graph(streams: SimpleNamespace) -> None:
    streams.capturing = True
    assert flags.flags_of(CPU).shape == (flags.FLAGS,)
    assert not flags._all and not flags._flags
    streams.capturing = False
    assert flags.flags_of(CPU).data_ptr() == flags.flags_of(CPU).data_ptr()


def test_zeros_are_of_no_pool_of_the_thread(streams: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's pool of weights serves the thread that loads them, and is emptied while the engine sleeps."""
    zeros, threads = torch.zeros, []

    def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
        threads.append(threading.get_ident())
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", allocated)
    assert flags.flags_of(CPU).count_nonzero() == 0
    assert threads and threading.get_ident() not in threads


def test_a_stream_too_many_gets_new_zeros(streams: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "STREAMS", 1)
    mine = flags.flags_of(CPU)
    with ThreadPoolExecutor(1) as thread:
        first, second = (thread.submit(flags.flags_of, CPU).result() for _ in range(2))
    assert len({mine.data_ptr(), first.data_ptr(), second.data_ptr()}) == 3
    assert flags.flags_of(CPU).data_ptr() == mine.data_ptr()
