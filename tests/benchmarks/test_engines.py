# SPDX-License-Identifier: Apache-2.0
"""Engines that start side by side and are measured alone, with processes that only sleep and say when."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _engines as engines
from benchmarks._engines import ROOT, Job

# Starts for argv[1] seconds and is measured for argv[2], then says when; a start of less than 0 fails.
# JSON has no number for an argv[2] that is not finite.
ENGINE = """
import os, sys, time
from pathlib import Path
from benchmarks import _engines
begun = time.monotonic()
def start():
    print("it starts", flush=True)
    assert float(sys.argv[1]) >= 0, "no such model"
    time.sleep(float(sys.argv[1]))
    up = time.monotonic()
    def measure():
        began = time.monotonic()
        time.sleep(max(0.0, float(sys.argv[2])))
        return {"slept": float(sys.argv[2]), "begun": begun, "up": up, "measured": (began, time.monotonic())}
    return measure
_engines.serve(Path(sys.argv[3]), start)
"""


def job(name: str, start: float, measure: float = 0.2) -> Job:
    command = [sys.executable, "-c", ENGINE, str(start), str(measure)]
    return Job(name, command, {"PYTHONPATH": str(ROOT)})


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run at the same time do not wait for each other, and handlers stay as they are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def apart(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[1] <= second[0] or second[1] <= first[0]


def test_all_are_up_before_one_is_measured_alone() -> None:
    jobs = [job("slow", 1.0), job("quick", 0.0), job("none", -1.0)]
    (slow, _), (quick, log), (none, _) = engines.run(jobs, 3)
    assert max(slow["up"], quick["up"]) <= min(slow["measured"][0], quick["measured"][0])
    assert apart(slow["measured"], quick["measured"]) and "it starts" in log
    assert none["failed"] == "ended with status 1, before it was up" and "no such model" in none["log"]


def test_an_engine_that_says_nan_has_failed() -> None:
    (found, log) = next(iter(engines.run([job("nan", 0.0, float("-inf"))], 1)))
    assert "failed" in found and "not JSON compliant" in log + found["log"]


def test_the_next_ones_start_when_the_first_are_measured() -> None:
    made = []
    jobs = [job("first", 0.0), job("second", 0.0), job("third", 0.0)]
    first, second, third = (result for result, _ in engines.run(jobs, 2, prepare=lambda: made.append(1)))
    assert made == [1] and third["begun"] >= max(first["measured"][1], second["measured"][1])


def test_one_that_is_too_late_or_ends_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MEASURE_S", 0.5)
    began = time.monotonic()
    hangs, stuck = (result for result, _ in engines.run([job("hangs", 600), job("stuck", 0.0, 600)], 2, start_s=8))
    assert hangs["failed"] == "was too late, before it was up" and time.monotonic() - began < 60
    assert stuck["failed"] == "was too late, before it was measured"


def test_one_that_leaves_its_result_and_ends_in_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks: it has no result yet, and then has both left it and ended."""
    engine = engines._Engine(Job("one", ["true"], {}), tmp_path)
    looked = []

    def ends_now(engine: engines._Engine) -> bool:
        looked.append(engine.has("result"))
        (tmp_path / "one" / "result").write_text('{"us": 1.5}')
        return True

    monkeypatch.setattr(engines._Engine, "has_ended", property(ends_now))
    assert engine.measure() == {"us": 1.5} and looked == [False]
    engine.end()


def test_an_engine_is_killed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is waited for, its number may be that of another's session."""
    killed, kill = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda *session: killed.append(session) or kill(*session))
    engine = engines._Engine(Job("one", ["sh", "-c", "exec sleep 600"], {}), tmp_path)
    for _ in range(2):
        engine.end()
    assert killed == [(engine._process.pid, signal.SIGKILL)] and engine._process.returncode == -signal.SIGKILL


def test_the_next_is_measured_when_workers_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes a while to end, as one does whose GPU's memory is freed."""
    asked = iter([True, True, False])
    seen: list[int] = []
    monkeypatch.setattr(engines, "_runs", lambda group: seen.append(group) or next(asked))
    engine = engines._Engine(job("engine", 0.0), tmp_path)
    engine.end()
    assert seen == [engine._process.pid] * 3


def test_a_process_that_has_ended_does_not_run() -> None:
    assert engines._runs(os.getpgrp())
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert engines._runs(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not engines._runs(process.pid), "it waits to be asked how it ended"
    process.wait()


def test_what_a_checkpoint_lacks_ends_the_engines(tmp_path: Path) -> None:
    def prepare() -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        next(engines.run([job("one", 0.0)], 1, prepare=prepare))
    assert not list(tmp_path.glob("engines-*")), "folders that are left over"


SCRIPT = """
import json, sys
from benchmarks import _engines
from tests.benchmarks.test_engines import job
for result, _ in _engines.run([job(name, float(start)) for name, start in zip("ab", sys.argv[1:])], 2):
    print(json.dumps(result))
"""


def script(tmp_path: Path, *starts: float) -> subprocess.Popen[str]:
    variables = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, *map(str, starts)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)


def results(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_scripts_at_the_same_time_measure_when_no_engine_starts(tmp_path: Path) -> None:
    """Whoever has started first waits for the engines of the other, and no two are measured at once."""
    found = [one for process in [script(tmp_path, 0, 4), script(tmp_path, 3, 0)] for one in results(process)]
    assert len(found) == 4
    last = max(one["up"] for one in found)
    assert all(one["measured"][0] >= last for one in found)
    spans = sorted(one["measured"] for one in found)
    assert all(apart(*pair) for pair in zip(spans, spans[1:], strict=False))


def test_who_waits_to_measure_comes_before_those_that_start_later() -> None:
    order = []

    def take(shared: bool) -> None:
        with engines.gpus(shared):
            order.append("start" if shared else "measure")

    with engines.gpus(shared=True):
        threads = [threading.Thread(target=take, args=(shared,)) for shared in (False, True)]
        for thread in threads:
            thread.start()
            time.sleep(0.5)
        assert order == []
    for thread in threads:
        thread.join(30)
    assert order == ["measure", "start"]


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "OTHERS_S", 0.3)
    said = r"other benchmarks had this machine's GPUs for 0.3 s: .*`fuser .*\.lock`"
    with engines.gpus(shared=True), pytest.raises(TimeoutError, match=said):
        engines.gpus(shared=False).__enter__()
    with engines.gpus(shared=False), pytest.raises(TimeoutError, match=said):
        engines.gpus(shared=True).__enter__()
    with engines.gpus(shared=False):
        pass


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["asked", "killed"])
def test_engines_end_with_the_script(tmp_path: Path, how: signal.Signals) -> None:
    """One that sleeps until it is asked, and one that starts; and the lock is free."""
    process = script(tmp_path, 0, 600)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("engines-*/a/ready")) or "starts" not in started(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, how)
    process.communicate(timeout=60)
    while running(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with engines.gpus(shared=False):
        pass


def started(tmp_path: Path) -> str:
    """What the second engine says."""
    return "".join(log.read_text() for log in tmp_path.glob("engines-*/b/b.log"))


def running(tmp_path: Path) -> bool:
    """Whether there are processes with a folder of this test on their command line."""
    lines = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    return any(str(tmp_path).encode() + b"/engines-" in line for line in lines)
