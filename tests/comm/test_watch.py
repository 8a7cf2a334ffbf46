# SPDX-License-Identifier: Apache-2.0
"""The watch over lost ranks."""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from llm_quant_rocm.comm.watch import Watch

MESSAGE = "rank 1 of the group did not arrive in call 7"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """caplog for the library's logger, whether or not an engine's plugin has hung it below another."""
    logger = logging.getLogger("llm_quant_rocm")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_the_next_call_raises_what_the_check_raised(log: pytest.LogCaptureFixture) -> None:
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise RuntimeError(MESSAGE)

    watch = Watch(check, interval=0.01, grace=60)
    watch.raise_if_lost()
    lost.set()
    deadline = time.monotonic() + 10
    with pytest.raises(RuntimeError, match=MESSAGE):
        while time.monotonic() < deadline:
            watch.raise_if_lost()
    watch.stop()
    assert f"{MESSAGE}. No result is valid from there on" in log.text


def test_no_check_after_the_stop() -> None:
    checked = threading.Event()
    watch = Watch(checked.set, interval=0.01)
    assert checked.wait(10)
    watch.stop()
    time.sleep(0.1)
    checked.clear()
    assert not checked.wait(0.1)


@pytest.mark.parametrize("stops", [False, True], ids=["nobody_calls", "stopped"])
def test_a_process_in_which_nobody_calls_ends(stops: bool) -> None:
    """As one that replays graphs; with the message, and not if the watch was stopped meanwhile."""
    program = f"""
import time
from llm_quant_rocm.comm.watch import Watch

def check():
    raise RuntimeError("{MESSAGE}")

watch = Watch(check, interval=0.01, grace=0.5)
time.sleep(0.2)
if {stops}:
    watch.stop()
time.sleep(60 if not {stops} else 1)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == (0 if stops else -signal.SIGTERM)
    assert MESSAGE in ended.stderr


def test_the_end_of_a_process_is_no_lost_rank() -> None:
    """What the check needs may be gone by then."""
    program = """
import atexit, time
from llm_quant_rocm.comm.watch import Watch

gone = []

def take_away():
    gone.append(True)
    time.sleep(1)

atexit.register(take_away)  # what was registered first is called last

def check():
    if gone:
        raise RuntimeError("it is gone")

watch = Watch(check, interval=0.01, grace=0.1)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
