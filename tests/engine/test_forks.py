# SPDX-License-Identifier: Apache-2.0
"""A fork of the process that has imported vLLM is like a Python that was started for the command."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest

SAYS = """
import atexit, os, sys
atexit.register(print, "at the end")
print(sys.argv, sys.path[0], os.getcwd(), os.environ.get("GIVEN"), "HOME" in os.environ, sys.stdin.read())
print("also", file=sys.stderr)
"""
ENDS = {
    "well": "",
    "status": "sys.exit(3)",
    "text": "sys.exit('why')",
    "error": "raise ValueError('why')",
    "signal": "sys.stdout.flush(); os.kill(os.getpid(), 9)",
}
# A program with a child, both of which end when they are asked to, and only then.
STAYS = r"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
os.fork()
os.write(1, b"%d\n" % os.getpid())
time.sleep(600)
"""


def both(arguments: list[str], **options: object) -> list[tuple[int, str, str]]:
    """What a new Python and a fork do with a command line: status and streams."""
    done = [
        subprocess.run([python, *arguments], capture_output=True, text=True, check=False, **options)
        for python in (sys.executable, forks.python())
    ]
    return [(one.returncode, one.stdout, one.stderr.splitlines()[-1]) for one in done]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["file", "module"])
def test_what_is_given_and_what_comes_back(kind: str, end: str, tmp_path: Path) -> None:
    program = tmp_path / "folder" / "program.py"
    program.parent.mkdir()
    program.write_text(SAYS + ENDS[end])
    arguments = [str(program)] if kind == "file" else ["-m", "folder.program"]
    environment = {"GIVEN": "yes", "PATH": os.environ["PATH"]}
    new, fork = both([*arguments, "one", "-m"], cwd=tmp_path, env=environment, input="something")
    assert fork == new
    assert "something" in fork[1]


def running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_ends_with_its_children(how: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(STAYS)
    with subprocess.Popen([forks.python(), str(program)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        found = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(how)
        assert process.wait(60) == (5 if how == signal.SIGTERM else -how)
    deadline = time.monotonic() + 60
    while any(map(running, found)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_first_command_need_not_wait_for_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.delenv(forks._VARIABLE)
    config: Any = SimpleNamespace(add_cleanup=ends.append)
    forks.start(config, dict(os.environ))
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(str(Path(forks.python()).with_name("socket")))
    program = tmp_path / "program.py"
    program.write_text("print('done')")
    assert subprocess.run([forks.python(), str(program)], capture_output=True, text=True).stdout == "done\n"
    ends.pop()()


def test_what_has_been_imported_holds_nothing_of_ours() -> None:
    """A plugin is found, imported and registered by each fork."""
    found = forks.modules()
    assert "vllm" in found and not [name for name in found if "quant_rocm" in name]
