# SPDX-License-Identifier: Apache-2.0
"""The README's example runs and prints what it says, and its error is the one that comes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parents[2] / "tools"
TEXT = (FOLDER / "gcnsim" / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]


def run(tmp_path, code):
    (tmp_path / "example.py").write_text(code)
    command = [sys.executable, "-W", "ignore", "example.py"]
    environment = {"PYTHONPATH": f"{FOLDER}:{':'.join(sys.path)}", "TRITON_CACHE_DIR": str(tmp_path)}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)


def test_example(tmp_path):
    done = run(tmp_path, EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == EXAMPLE.rsplit("# ", 1)[1].strip()


def test_the_error_without_masks(tmp_path):
    done = run(tmp_path, EXAMPLE.replace(", mask=i < n", ""))
    shown = re.search(r"```\n(gcnsim\.errors.*?)```", TEXT, re.DOTALL)[1].splitlines()
    found = done.stderr[done.stderr.rindex("gcnsim.errors") :].splitlines()  # nanobind may have the last word
    assert found[0] == shown[0]
    # Registers, lines of the assembly and columns of the source are the compiler's choice.
    assert re.sub(r"line \d+: (\w+).*", r"\1", found[1]) == re.sub(r"line \d+: (\w+).*", r"\1", shown[1])
    assert found[2].rsplit(":", 1)[0] == shown[2].rsplit(":", 1)[0]


def test_every_file_has_its_place_in_the_table():
    listed = set(re.findall(r"`(\w+\.py)`", TEXT))
    files = {path.name for path in (FOLDER / "gcnsim").glob("*.py")} - {"__init__.py"}
    assert listed == files
