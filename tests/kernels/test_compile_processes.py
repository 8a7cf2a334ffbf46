# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled in other processes, and it matters to nobody if these fail."""

import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.amd import isolated, tritons

pytest.importorskip("triton")

from llm_quant_rocm.kernels.compile_processes import Processes, job_of
from llm_quant_rocm.kernels.sizes import next_power_of_2
from tests.kernels import compile_in_processes as asked

TRITONS = pytest.mark.parametrize("triton", tritons.VERSIONS)
LIMIT = 60  # seconds


@TRITONS
def test_this_process_reads_what_others_compiled_and_starts_none_for_what_is_there(triton: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "triton")
    said = isolated.call(triton, asked.compiled, folder, (16, 32, 64))
    assert said == {"started": 1, "compiled here": 0, "kernels": 3}
    said = isolated.call(triton, asked.compiled, folder, (16, 32))
    assert said == {"started": 0, "compiled here": 0, "kernels": 2}
    said = isolated.call(triton, asked.compiled, folder, (16, 32), always=True)
    assert said == {"started": 0, "compiled here": 2, "kernels": 2}


@TRITONS
def test_what_others_compiled_computes_the_reference(triton: str, tmp_path: Path) -> None:
    isolated.call(triton, asked.executed, str(tmp_path))


@TRITONS
def test_a_kernel_that_cannot_be_compiled_is_refused_here(triton: str, tmp_path: Path) -> None:
    assert "N is not 0" in isolated.call(triton, asked.not_compiled, str(tmp_path))


def test_jobs_end_with_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come after the first was killed, before this process knows of it and later. Its children end."""
    started: list[subprocess.Popen[bytes]] = []

    class Kept(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    processes, ended = Processes(2), threading.Semaphore(0)
    processes.submit(b"no pickle", ended.release)
    assert ended.acquire(timeout=LIMIT)
    number = started[0].pid
    children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    started[0].kill()
    processes.submit(b"nor this", ended.release)
    assert ended.acquire(timeout=LIMIT)
    started[0].wait()
    processes.submit(b"nor this", ended.release)
    assert ended.acquire(timeout=LIMIT)
    processes.close()
    assert len(children) == 2
    end = time.monotonic() + LIMIT
    while any(map(is_alive, children)):
        assert time.monotonic() < end
        time.sleep(0.1)


def is_alive(process: str) -> bool:
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_where_no_process_can_be_started_jobs_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(subprocess, "Popen", refuse)
    processes, ended = Processes(2), list[int]()
    for number in range(2):
        processes.submit(b"", partial(ended.append, number))
    processes.close()
    assert ended == [0, 1]


def test_a_compilation_that_is_not_as_tritons_are_is_no_job() -> None:
    assert job_of("key", next_power_of_2) is None
