# SPDX-License-Identifier: Apache-2.0
"""The compiler of candidates: what fails, and what takes its process with it, is left out and costs nothing else."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from llm_quant_rocm import timing
from llm_quant_rocm.tune.search import Compiler, fastest


def compile_one(config: int) -> None:
    if config == 3:
        raise ValueError("out of shared memory")
    if config == 5:
        os._exit(1)


def test_what_fails_or_crashes_is_left_out() -> None:
    with Compiler(compile_one) as compiler:
        assert compiler.fit([1, 2, 3]) == [1, 2]
        assert compiler.reasons[3] == "ValueError out of shared memory"
        assert compiler.fit([1, 5, 6, 7]) == [1, 6, 7]
        assert compiler.reasons[5] == "it ends the process that compiles it"
        assert compiler.fit([7, 8]) == [7, 8], "there is a pool again"


def fails_once(file: str) -> None:
    os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    raise ValueError("out of shared memory")


def test_each_is_tried_once(tmp_path: Path) -> None:
    """What several layers have in common is compiled for the first of them."""
    file = str(tmp_path / "tried")
    with Compiler(fails_once) as compiler:
        for _ in range(2):
            assert compiler.fit([file]) == []
            assert compiler.reasons[file] == "ValueError out of shared memory", "not FileExistsError"


def who_hears_ctrl_c(config: int) -> None:
    raise ValueError(signal.Handlers(signal.getsignal(signal.SIGINT)).name)


def test_ctrl_c_is_not_for_the_compiling_processes() -> None:
    with Compiler(who_hears_ctrl_c) as compiler:
        compiler.fit([1])
        assert compiler.reasons == {1: "ValueError SIG_IGN"}


def test_the_fastest_is_that_of_the_careful_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are fast in the rough one, which may be wrong by more than what parts them."""
    rough = {"a": 10.0, "b": 11.0, "c": 12.0, "d": 30.0}
    careful = {"a": 11.5, "b": 10.5, "c": 11.0, "d": 1.0, "peer": 9.0}
    asked: list[list[str]] = []

    def time_variants(variants: dict[str, Any], **options: Any) -> dict[str, float]:
        asked.append(list(variants))
        return {name: (rough[calls] if options else careful[name]) for name, calls in variants.items()}

    monkeypatch.setattr(timing, "time_variants", time_variants)
    candidates: dict[Any, Any] = {name: name for name in ("d", "c", "b", "a")}
    assert fastest(candidates, {"peer": "peer"}) == ("b", {"ours": 10.5, "peer": 9.0})
    assert asked == [[""], [""], [""], [""], ["a", "b", "c", "peer"]]
