# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of a whole vLLM asks of its GPU, without one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import vllm_engine


def test_steps_are_timed_on_the_gpu_and_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of 300 us, begun every 1400 us, where the host takes the rest."""
    clock = SimpleNamespace(now=0.0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def elapsed_time(self, later: "Event") -> float:
            return later.at - self.at

    def original(graph: Any) -> None:
        clock.now += 0.3

    graph = type("CUDAGraph", (), {"replay": original})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = SimpleNamespace()
    assert vllm_engine.StepTimes()(model) is None
    for _ in range(32):
        graph().replay()
        clock.now += 1.1
    assert vllm_engine.StepTimes(stop=True)(model) == {"graphs": 32, "graph_us": 300.0, "begin_to_begin_us": 1400.0}
    assert graph.replay is original


def test_kernels_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run in every one."""
    runs = {"a norm": [2.0, 4.0, 3.0, 3.0], "a gemm": [90.0, 91.0], "of the prefill": [700.0]}
    events = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(elapsed_us=lambda us=us: us))
        for name, times in runs.items()
        for us in times
    ]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = SimpleNamespace(profile=SimpleNamespace(stop=lambda: None, events=lambda: events))
    found = vllm_engine.Profile(stop=True, steps=2)(model)
    assert list(found.items()) == [("a gemm", [1.0, 90.5]), ("a norm", [2.0, 3.0])]
    assert vllm_engine.Profile(stop=True)(model) == {"a norm": 4}
