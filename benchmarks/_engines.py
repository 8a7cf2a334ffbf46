# SPDX-License-Identifier: Apache-2.0
"""Whole engines that start side by side and are measured alone.

A start is a minute of Python, of compilation and of loading, on few cores, and leaves the GPU idle; a measurement wants
the GPU to itself. So each engine is a process of its own: `run` starts several at once, waits until each is up or has
ended, and has one after the other measured while the others sleep. Scripts that run at the same time keep out of each
other's way by a lock in the temporary folder, one for a user: who starts engines shares it, who measures has it alone.

An engine's process calls `serve`. The two tell each other how far they are by files in the engine's folder: "prepared"
(the checkpoint is whole), "ready" (the engine is up), "go", and "result".
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent
START = time.monotonic()
# How long an engine may start and be measured, and how long all may wait for those of other scripts.
START_S, MEASURE_S, OTHERS_S = 240, 120, 900
# And how long a driver may take to free the memory of one that was ended.
END_S = 20
_POLL_S = 0.05
# By engine, the group of its plugins' entry points and ours.
PLUGINS = {
    "vllm": ("vllm.general_plugins", "llm_quant_rocm_vllm:register"),
    "sglang": ("sglang.srt.plugins", "llm_quant_rocm_sglang:register"),
}


@dataclass(frozen=True)
class Job:
    """One engine to measure.

    Attributes:
        name: unique within a call of `run`; its log is NAME.log, in $OUT where that is set.
        command: of a process that calls `serve` with the folder that is appended to the command.
        variables: what it sets in the environment.
    """

    name: str
    command: Sequence[str]
    variables: Mapping[str, str]


def serve(folder: Path, start: Callable[[], Callable[[], dict[str, Any]]]) -> NoReturn:
    """In an engine's process: `start` the engine, and leave what the function that it returns measures."""
    threading.Thread(target=_end_without, args=(int((folder / "parent").read_text()),), daemon=True).start()
    status = 1
    try:
        _wait_for(folder / "prepared")
        measure = start()
        (folder / "ready").touch()
        _wait_for(folder / "go")
        result = measure()
        # An engine that says NaN of a text has computed nothing, and JSON has no such number.
        (folder / "part").write_text(json.dumps(result, allow_nan=False))
        (folder / "part").rename(folder / "result")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # Without the engine's farewell, which takes long or for ever; the parent ends what is left.
        os._exit(status)


def _end_without(parent: int) -> None:
    """End this process and its workers, which are of one session, when nobody is left who would ask it."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(_POLL_S)


def run(
    jobs: Sequence[Job], at_once: int, start_s: float = START_S, prepare: Callable[[], object] = lambda: None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Start `at_once` engines side by side and measure each alone, then the next ones.

    Args:
        jobs: the engines.
        at_once: their weights, caches and graphs share the GPUs' memory.
        start_s: an engine that is not up after so many seconds has failed.
        prepare: what engines need, a checkpoint say; called once, while the first ones import what they need.

    Yields:
        Each engine's result and its log, in the order of `jobs`. The result is {"failed": why, "log": its end} where
        the engine ended by itself or was too late.

    Raises:
        TimeoutError: other scripts had the GPUs for too long.
    """
    scratch = Path(tempfile.mkdtemp(prefix="engines-"))
    # `timeout` and service managers ask by this signal: engines must not outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for first in range(0, len(jobs), at_once):
            engines: list[_Engine] = []
            try:
                with gpus(shared=True):
                    for job in jobs[first : first + at_once]:
                        say(f"{job.name} starts")
                        engines.append(_Engine(job, scratch))
                    if first == 0:
                        prepare()
                    up = _all_up(engines, time.monotonic() + start_s)
                with gpus(shared=False):
                    for engine, is_up in zip(engines, up, strict=True):
                        say(f"{engine.name} {'is measured' if is_up else 'did not start'}")
                        yield engine.measure() if is_up else engine.failure("up"), engine.said()
                        engine.end()
            finally:
                for engine in engines:
                    engine.end()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _all_up(engines: Sequence["_Engine"], deadline: float) -> list[bool]:
    """Whether each is up. Returns when each is, or has ended, or at `deadline`, and says what happens."""
    for engine in engines:
        engine.hear("prepared")
    up: dict[str, bool] = {}
    while len(up) < len(engines):
        for engine in engines:
            if engine.name not in up and (engine.has("ready") or engine.has_ended or time.monotonic() > deadline):
                up[engine.name] = engine.has("ready")
                say(f"{engine.name} is {'' if up[engine.name] else 'not '}up")
        time.sleep(_POLL_S)
    return [up[engine.name] for engine in engines]


class _Engine:
    """One job's process, and those that it starts."""

    def __init__(self, job: Job, scratch: Path) -> None:
        self.name, self._folder = job.name, scratch / job.name
        self._killed = False
        self._folder.mkdir()
        (self._folder / "parent").write_text(str(os.getpid()))
        self._log = Path(os.environ.get("OUT", self._folder)) / f"{job.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*job.command, str(self._folder)], env={**os.environ, "HF_HUB_OFFLINE": "1", **job.variables},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def has(self, file: str) -> bool:
        return (self._folder / file).exists()

    def hear(self, file: str) -> None:
        (self._folder / file).touch()

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def measure(self) -> dict[str, Any]:
        self.hear("go")
        deadline = time.monotonic() + MEASURE_S
        while True:
            over = self.has_ended or time.monotonic() > deadline  # asked first: it may leave its result and end now
            if self.has("result"):
                return json.loads((self._folder / "result").read_text())
            if over:
                return self.failure("measured")
            time.sleep(_POLL_S)

    def failure(self, what: str) -> dict[str, Any]:
        """What is kept of an engine that failed or was too late."""
        how = f"ended with status {self._process.returncode}" if self.has_ended else "was too late"
        return {"failed": f"{how}, before it was {what}", "log": self.said()[-3000:]}

    def end(self) -> None:
        """Its workers too, which are of one session; returns when they are gone, and with them their memory."""
        if self._killed:  # the session's number may be another's by now
            return
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + END_S
        while _runs(self._process.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _runs(group: int) -> bool:
    """Whether a process of the group is left; one that only waits to be asked how it ended is not. On Linux."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


@contextmanager
def gpus(shared: bool) -> Iterator[None]:
    """The machine's GPUs, to start engines on beside others, or alone.

    Taken in turn: nobody who comes later is before one who waits, so engines that start do not keep a measurement off
    for ever. Both files are locked by this process alone, not by those that it starts, and with its end.

    Raises:
        TimeoutError: others had them for OTHERS_S.
    """
    name = f"llm-quant-rocm-{os.getuid()}"
    turn, lock = (Path(tempfile.gettempdir()) / f"{name}.{ending}" for ending in ("turn", "lock"))
    # To read too: network file systems want that of who shares a lock.
    with turn.open("a+") as waiting, lock.open("a+") as held:
        deadline = time.monotonic() + OTHERS_S
        for file, path, how in (
            (waiting, turn, fcntl.LOCK_EX),
            (held, lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX),
        ):
            said = False
            while not _locked(file.fileno(), how):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"other benchmarks had this machine's GPUs for {OTHERS_S} s: end the processes that "
                        f"`fuser {path}` names"
                    )
                if not said:
                    say(f"waiting to {'start' if shared else 'measure'}: others {'measure' if shared else 'start'}")
                    said = True
                time.sleep(_POLL_S)
        fcntl.flock(waiting, fcntl.LOCK_UN)
        yield


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def agreement(greedy: Sequence[int], expected: Sequence[int]) -> float:
    """At what share of a text's positions the most likely token is the expected one."""
    return round(sum(a == b for a, b in zip(greedy, expected, strict=True)) / len(expected), 4)


def difference(logprobs: Sequence[float], expected: Sequence[float]) -> float:
    """Mean absolute difference of log probabilities."""
    return round(sum(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) / len(expected), 4)


def say(line: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {line}", flush=True)


def plugin_path(engine: str, scratch: Path) -> str:
    """PYTHONPATH with this repository and, where nobody installed it, an entry point for the plugin of `engine`."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    group, plugin = PLUGINS[engine]
    if not entry_points(group=group, name="llm_quant_rocm"):
        info = scratch / "entry" / "llm_quant_rocm-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-quant-rocm\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\nllm_quant_rocm = {plugin}\n")
        paths.insert(0, str(info.parent))
    return os.pathsep.join(paths)


def add_options(parser: argparse.ArgumentParser, at_once: str) -> None:
    parser.add_argument("--at-once", type=int, help=f"engines that share the GPUs' memory; by default {at_once}")
    parser.add_argument("--start-seconds", type=float, default=START_S, help="that an engine has to start")
