# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a command with exit status 130 and no traceback, whatever it imports then."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint.test_quantize import DEMO_MODEL

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds: a machine with much else to do takes minutes
# What a shell starts in the background passes over Ctrl-C, and so does all that it starts: these tests, say.
HEEDS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
# Says when Ctrl-C is ours: main() has a handler of SIGALRM last.
MAIN = """
import signal
from llm_quant_rocm import cli

def set_it(number, handler, set_it=signal.signal):
    set_it(number, handler)
    if number == signal.SIGALRM:
        print('begins', flush=True)

signal.signal = set_it
cli.main()
"""

# Is interrupted as soon as Ctrl-C is ours.
AT_ONCE = MAIN.replace("print('begins', flush=True)", "signal.raise_signal(signal.SIGINT)")

# A module that swallows Ctrl-C, or makes another error of it, as torch and numpy do.
SWALLOWS = """
import time
print('importing', flush=True)
try:
    time.sleep(20)
except BaseException:
    pass
raise RuntimeError('initialized twice')
"""
# One that is soon imported, and interrupted meanwhile.
SMALL = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""
IMPORTS_IT = """
import sys, time
from llm_quant_rocm import cli
from llm_quant_rocm.cli import _app

def app():
    try:
        import small
        time.sleep(int(sys.argv[1]))
        print('goes on')
    finally:
        print('cleans up')

_app.app = app
cli._PATIENCE_SECONDS = 2
cli.main()
"""


def start(program: str, *arguments: str, modules: Path = ROOT) -> subprocess.Popen[str]:
    """Of `modules` it imports those that it finds there."""
    environment = {**os.environ, "PYTHONPATH": f"{modules}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", HEEDS_CTRL_C + program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("typer", []),
        ("torch", ["doctor"]),
        ("torch", ["quantize", str(DEMO_MODEL), "out", "--scheme", "nvfp4"]),
        ("torch", ["bench", "gemm"]),
        ("torch", ["tune"]),
        ("torch", ["eval", str(DEMO_MODEL)]),
    ],
    ids=lambda value: value[0] if value and isinstance(value, list) else "",
)
def test_whatever_is_imported(module: str, command: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(SWALLOWS)
    command = [str(tmp_path / "out") if argument == "out" else argument for argument in command]
    with start(MAIN, *command, modules=tmp_path) as process:
        assert process.stdout and [process.stdout.readline() for _ in range(2)] == ["begins\n", "importing\n"]
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=LIMIT)
    assert (process.returncode, output, errors) == (130, "", "")
    assert not (tmp_path / "out").exists()


def test_again_while_something_is_imported(tmp_path: Path) -> None:
    """The next Ctrl-C waits for nothing."""
    (tmp_path / "torch.py").write_text(SWALLOWS)
    program = f"from llm_quant_rocm import cli; cli._PATIENCE_SECONDS = {LIMIT}\n{MAIN}"
    with start(program, "doctor", modules=tmp_path) as process:
        assert process.stdout and [process.stdout.readline() for _ in range(2)] == ["begins\n", "importing\n"]
        while process.poll() is None:  # a signal may meet the one before
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert process.communicate(timeout=LIMIT) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("before", "seconds", "status", "output"),
    [
        ("", LIMIT, 130, "cleans up\n"),
        ("import signal; signal.signal(2, signal.SIG_IGN)", 0, 0, "goes on\ncleans up\n"),
    ],
    ids=["", "ignored"],
)
def test_a_small_import_comes_to_its_end(before: str, seconds: int, status: int, output: str, tmp_path: Path) -> None:
    """And what the command has started is ended. Whoever has started it may want it to pass over Ctrl-C."""
    (tmp_path / "small.py").write_text(SMALL)
    with start(before + IMPORTS_IT, str(seconds), modules=tmp_path) as process:
        assert process.communicate(timeout=LIMIT) == (output, "")
    assert process.returncode == status


def test_the_first_moment() -> None:
    with start(AT_ONCE) as process:
        assert process.communicate(timeout=LIMIT) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.4, 0.8, 1.2, 1.8])
def test_any_moment(seconds: float, tmp_path: Path) -> None:
    with start(MAIN, "quantize", str(DEMO_MODEL), str(tmp_path / "out"), "--scheme", "nvfp4") as process:
        assert process.stdout and process.stdout.readline() == "begins\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=LIMIT)
    assert (process.returncode, output) == (130, "")
    assert errors in ("", "quantize: stopped; the same command goes on.\n")
