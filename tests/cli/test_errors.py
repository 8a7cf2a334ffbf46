# SPDX-License-Identifier: Apache-2.0
"""What the system refuses is one sentence that names the file, whatever the command."""

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from llm_quant_rocm.cli import _vllm
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli.bench import _output
from tests.checkpoint.test_quantize import DEMO_MODEL

LONG = 300 * "a"
CURE = "(File name too long): name another, make room there, or give this user the right to.\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["quantize", LONG, "out", "--scheme", "nvfp4"], LONG),
        (["quantize", DEMO_MODEL, LONG, "--scheme", "nvfp4"], LONG),
        (["demo", "--model", LONG], f"{LONG}/config.json"),
        (["eval", LONG], f"{LONG}/config.json"),
        (["bench", "serve", LONG], f"{LONG}/config.json"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_name_that_is_too_long(command: list[object], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vllm, "require", lambda: None)
    result = CliRunner().invoke(app, [*map(str, command)])
    assert result.exit_code == 1
    output = result.output.split(": FAILED. ")
    assert len(output) == 2 and output[1] == f"{name} cannot be used {CURE}"


def test_a_model_whose_name_is_too_long_for_doctor() -> None:
    result = CliRunner().invoke(app, ["doctor", LONG])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"doctor: FAILED. {LONG} cannot be read (File name too long): give this user the")
    assert "name another" in result.stderr


def test_an_output_without_room() -> None:
    program = "from llm_quant_rocm.cli import main; main()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program, "doctor", str(DEMO_MODEL)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.startswith("doctor: FAILED. the output cannot be used (No space left on device): name another")


def test_a_plot_that_cannot_be_written_costs_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    rows = [{"m": 1, "us": {"ours": 2.0}}]
    panels = [_output.Panel("speed", "rows", {"ours": [(1, 2.0)]})]
    table = _output.times("layers", {"m": "rows"}, rows, "ours")
    environment = {"device": "a GPU", "date": "today"}
    with pytest.raises(OSError, match="File name too long"):
        _output.show(console, table, panels, {"rows": rows}, environment, tmp_path / f"{LONG}.png", as_json=True)
    assert '"ours": 2.0' in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_of_the_checkpoint_that_may_not_be_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, and neither as one that is not there nor as one of the output."""
    file = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model")) / name

    def opened(path: object, *arguments: object, **options: object) -> object:
        if str(path) == str(file):  # root may read whatever its mode is
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return io.open(path, *arguments, **options)  # type: ignore[call-overload]  # noqa: UP020

    monkeypatch.setattr("shutil.open", opened, raising=False)
    monkeypatch.setattr(Path, "open", opened)
    result = CliRunner().invoke(app, ["quantize", str(file.parent), str(tmp_path / "out"), "--scheme", "ptpc_fp8"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"quantize: FAILED. {file} cannot be used (Permission denied): name another")


@pytest.mark.parametrize("name", ["1_Pooling", "1_Pooling/deeper"])
def test_a_folder_of_the_checkpoint_that_may_not_be_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it would be missing from the output: that is said before anything is written."""
    source = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    folder, of_the_disk = source / name, source / "lost+found"
    folder.mkdir(parents=True)
    of_the_disk.mkdir()
    scandir = os.scandir

    def closed(path: object) -> object:
        if str(path) in (str(folder), str(of_the_disk)):  # root may read whatever its mode is
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", closed)
    target = tmp_path / "out"
    result = CliRunner().invoke(app, ["quantize", str(tmp_path / "model"), str(target), "--scheme", "ptpc_fp8"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"quantize: FAILED. {folder} cannot be used (Permission denied): name another")
    assert not target.exists()
    shutil.rmtree(source / "1_Pooling")
    result = CliRunner().invoke(app, ["quantize", str(source), str(target), "--scheme", "ptpc_fp8"])
    assert (result.exit_code, target.exists()) == (0, True), result.stderr


def test_what_the_system_says_of_a_target_is_in_its_words_alone() -> None:
    result = CliRunner().invoke(app, ["quantize", str(DEMO_MODEL), "/dev/null/target", "--scheme", "ptpc_fp8"])
    assert result.stderr.startswith("quantize: FAILED. /dev/null/target cannot be written (Not a directory): make room")
