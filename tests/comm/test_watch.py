# SPDX-License-Identifier: Apache-2.0
"""The watch over lost ranks."""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_quant_rocm.comm.watch import Watch

ROOT = Path(__file__).parents[2]
LIMIT = 1800  # seconds that no machine takes to get there
MESSAGE = "rank 1 of the group did not arrive in call 7"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """caplog for the library's logger, whether or not an engine's plugin has hung it below another."""
    logger = logging.getLogger("llm_quant_rocm")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def wait_for_the_end(watch: Watch) -> None:
    watch._thread.join(LIMIT)
    assert not watch._thread.is_alive(), "the watch goes on"


def in_a_process(program: str) -> tuple[int, str]:
    """How it ended, and what it said."""
    program = f"from {__name__} import *\n{program}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, done.stderr


def test_the_next_call_raises_what_the_check_raised(log: pytest.LogCaptureFixture) -> None:
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise RuntimeError(MESSAGE)

    watch = Watch(check, interval=0.01, grace=2 * LIMIT)
    watch.raise_if_lost()
    lost.set()
    deadline = time.monotonic() + LIMIT
    with pytest.raises(RuntimeError, match=MESSAGE):
        while time.monotonic() < deadline:
            watch.raise_if_lost()
            time.sleep(0.01)
    watch.stop()
    wait_for_the_end(watch)  # it says so after the first call can raise
    assert f"{MESSAGE}. No result is valid from there on" in log.text


def test_no_check_after_the_stop() -> None:
    checked = threading.Event()
    watch = Watch(checked.set, interval=0.01)
    assert checked.wait(LIMIT)
    watch.stop()
    wait_for_the_end(watch)


def test_a_process_in_which_nobody_calls_ends() -> None:
    """As one that replays graphs; with the message."""
    program = """
def check():
    raise RuntimeError(MESSAGE)

watch = Watch(check, interval=0.01, grace=0.5)
threading.Event().wait(2 * LIMIT)
"""
    how, said = in_a_process(program)
    assert how == -signal.SIGTERM and MESSAGE in said


def test_a_watch_that_is_stopped_meanwhile_ends_no_process() -> None:
    """It waits no longer to do so, and only says what was lost."""
    program = """
failed = threading.Event()

def check():
    failed.set()
    raise RuntimeError(MESSAGE)

watch = Watch(check, interval=0.01, grace=2 * LIMIT)
assert failed.wait(LIMIT)
watch.stop()
wait_for_the_end(watch)
"""
    how, said = in_a_process(program)
    assert how == 0 and MESSAGE in said


def test_the_end_of_a_process_is_no_lost_rank() -> None:
    """What the check needs may be gone by then."""
    program = """
import atexit

checked = threading.Event()
atexit.register(lambda: wait_for_the_end(watch))  # what was registered first is called last: the watch has been stopped
watch = Watch(checked.set, interval=0.01)
assert checked.wait(LIMIT)
"""
    assert in_a_process(program) == (0, "")
