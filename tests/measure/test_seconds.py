# SPDX-License-Identifier: Apache-2.0
"""A measurement between GPUs ends in the time that it is given: what compilation took is not the ranks' any more."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from llm_quant_rocm import hardware

pytest.importorskip("triton")

from llm_quant_rocm.measure import all_reduce, reduce_norm_quant


@pytest.mark.parametrize("module", [all_reduce, reduce_norm_quant], ids=["all_reduce", "reduce_norm_quant"])
def test_compilation_counts(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)

    def compile_together(job: Any, arguments: Any) -> int:
        clock.now += 30
        return 7

    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    given: list[float] = []
    monkeypatch.setattr(module, "compile_together", compile_together)
    monkeypatch.setattr(module, "on_every_rank", lambda part, world, arguments, heard, seconds: given.append(seconds))
    monkeypatch.setattr(all_reduce, "detect", lambda device: hardware.nvidia(9, 0))
    monkeypatch.setattr(hardware, "detect", lambda device: hardware.nvidia(9, 0))
    heard: list[tuple[str, Any]] = []
    module.measure(2, lambda *what: heard.append(what), seconds=100.0)
    assert heard == [("compiled", 7)] and given == [70.0]
