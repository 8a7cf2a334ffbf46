# SPDX-License-Identifier: Apache-2.0
"""The fork server of a session of tests, one for all of its workers."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_VARIABLE = "FORKED_PYTHON"  # which workers have from the process that started them


def start(config: pytest.Config, environment: dict[str, str], *names: str) -> None:
    """In a conftest.py's `pytest_configure`: lets `python` be a Python that has imported these names
    (as of fork_server.py), in this environment."""
    if _VARIABLE in os.environ:
        return
    folder = Path(tempfile.mkdtemp())
    program = folder / "python"
    here = Path(__file__).parent
    # Isolated, so that it imports next to nothing.
    program.write_text(f"#!{sys.executable} -IS\n" + (here / "forked_python.py").read_text())
    program.chmod(0o755)
    log = folder / "log.txt"
    # Listens from here on: whoever is first need not wait until the server has started.
    with log.open("w") as output, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        command = [sys.executable, str(here / "fork_server.py"), str(program), str(listener.fileno()), *names]
        server = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[listener.fileno()],
        )
    os.environ[_VARIABLE] = str(program)

    def end() -> None:
        server.communicate()  # closes its stdin
        if server.returncode:
            print(log.read_text(), file=sys.stderr)
        shutil.rmtree(folder)

    config.add_cleanup(end)


def python() -> str:
    """In place of sys.executable in a command line."""
    return os.environ[_VARIABLE]


def modules() -> list[str]:
    """The names of the modules that a fork finds imported."""
    program = "import json, sys; print(json.dumps(list(sys.modules)))"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        return json.loads(subprocess.run([python(), file.name], capture_output=True, text=True, check=True).stdout)
