# SPDX-License-Identifier: Apache-2.0
"""An engine's process ends with all that it started: a child that went on would keep its memory."""

import fcntl
import time
from pathlib import Path

import pytest

from llm_quant_rocm.cli import _worker
from llm_quant_rocm.cli._errors import CommandError

# Fails once its child holds the lock.
ENGINE = """
import json, subprocess, sys
child = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
lock = json.loads(sys.argv[1])["lock"]
subprocess.Popen([sys.executable, "-c", child, lock], stdout=subprocess.PIPE).stdout.readline()
sys.exit("out of memory")
"""


def test_children_end_with_their_engine(tmp_path: Path) -> None:
    (tmp_path / "an_engine.py").write_text(ENGINE)
    lock = tmp_path / "lock"
    lock.touch()
    with pytest.raises(CommandError, match="^serving ended with exit code 1:\nout of memory$"):
        _worker.run("an_engine", {"lock": str(lock)}, "serving", {"PYTHONPATH": str(tmp_path)}, timeout=60)
    with lock.open() as held:
        end = time.monotonic() + 20
        while True:
            try:
                return fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < end, "its child lives"
                time.sleep(0.05)


@pytest.mark.parametrize(("option", "cure"), [("--timeout", r" \(raise --timeout\)"), (None, "")])
def test_what_takes_too_long_names_the_option(tmp_path: Path, option: str | None, cure: str) -> None:
    (tmp_path / "an_engine.py").write_text("import time\ntime.sleep(600)")
    with pytest.raises(CommandError, match=f"^serving was not done after 1 s{cure}:\n$"):
        _worker.run("an_engine", {}, "serving", {"PYTHONPATH": str(tmp_path)}, 1, option)
