# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped goes on where it was, and nothing half-written is taken for whole."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from llm_quant_rocm.checkpoint import output
from llm_quant_rocm.checkpoint.output import Output
from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint
from tests.checkpoint.test_quantize import tensors_of_a_model, write

ROOT = Path(__file__).parents[2]
REPORT = output.REPORT
LIMIT = 1800  # seconds: a machine with much else to do takes minutes


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", tensors_of_a_model(), 3)


def test_killed_anywhere_it_goes_on_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_process.py")
    command = [sys.executable, str(script), str(source), str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points == 30  # 3 each: the report, 3 weight files with the report, the tokenizer, the index, config.json
    quantize_checkpoint(source, tmp_path / "undisturbed", search=True)
    expected = contents(tmp_path / "undisturbed")
    for point in range(points + 1):
        assert contents(tmp_path / "killed" / str(point)) == expected, point


# The command, which stands still before its fourth weight file: whenever it is killed before, some are left to do.
STANDS_STILL = """
import itertools, threading
from llm_quant_rocm.checkpoint.output import Output

save, calls = Output.save, itertools.count(1)

def save_or_wait(self, *arguments):
    if next(calls) == 4:
        threading.Event().wait()
    save(self, *arguments)

Output.save = save_or_wait
"""


def test_the_command_killed_from_outside_goes_on(tmp_path: Path) -> None:
    """kill -9 on the process itself, some moment after its first file."""
    source = write(tmp_path / "source", {f"{i}.weight": torch.randn(1024, 1024) for i in range(6)}, 6)
    program = "from llm_quant_rocm.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def command(target: Path, before: str = "") -> list[str]:
        return [sys.executable, "-c", before + program, "quantize", str(source), str(target), "--scheme", "nvfp4"]

    target = tmp_path / "target"
    with subprocess.Popen(command(target, STANDS_STILL), env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + LIMIT
        while not list(target.glob("*.safetensors")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    assert not (target / "config.json").exists()
    before = {file: file.stat().st_mtime_ns for file in target.glob("*.safetensors")}
    assert 1 <= len(before) <= 3
    again = subprocess.run([*command(target), "--json"], env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["quantized"] == 6
    recorded = {file: file.stat().st_mtime_ns for file in before}
    assert sum(recorded[file] != before[file] for file in before) <= 1, "whole files are not made again"
    subprocess.run(command(tmp_path / "other"), env=environment, stdout=subprocess.DEVNULL, check=True, timeout=LIMIT)
    assert contents(target).keys() == contents(tmp_path / "other").keys()
    for name, content in contents(tmp_path / "other").items():
        assert contents(target)[name] == content, name


def test_a_file_is_on_the_disk_before_it_has_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure too, nothing half-written has the name of something whole."""
    flushed = set()
    fsync, replace = os.fsync, Path.replace

    def named(self: Path, name: Path) -> Path:
        assert self.stat().st_ino in flushed, name
        return replace(self, name)

    monkeypatch.setattr(os, "fsync", lambda handle: (flushed.add(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(Path, "replace", named)
    quantize_checkpoint(source, tmp_path / "target")
    assert {file.stat().st_ino for file in [tmp_path / "target", *(tmp_path / "target").iterdir()]} <= flushed


def test_a_file_that_was_cut_off_since_is_made_again(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    quantize_checkpoint(source, target)
    expected = contents(target)
    cut = sorted(target.glob("*.safetensors"))[1]
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 1)
    quantize_checkpoint(source, target)
    assert contents(target) == expected


def test_a_whole_folder_is_left_as_it_is(source: Path, tmp_path: Path) -> None:
    first = quantize_checkpoint(source, tmp_path / "target")
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("target/*.safetensors")}
    modes = {file.stat().st_mode for file in (tmp_path / "target").iterdir()}
    assert len(modes) == 1, "who may read config.json may read the weights"
    assert quantize_checkpoint(source, tmp_path / "target") == first
    assert {file: file.stat().st_mtime_ns for file in times} == times


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "ptpc_fp8"}, "another run, whose --scheme was nvfp4: name another folder, or remove it"),
        ({"layout": "modelopt"}, "another run, whose --format was compressed-tensors"),
        ({"ignore": ("lm_head", "*embed*")}, "another run, whose --ignore was lm_head, \\*.lm_head, output_layer"),
        ({"search": True}, "another run, whose --block-scales was nearest"),
        ({"share_global_scales": False}, "another run, whose --global-scales was shared"),
    ],
    ids=["scheme", "layout", "ignore", "search", "global-scales"],
)
def test_the_folder_of_other_settings(source: Path, tmp_path: Path, arguments: dict, message: str) -> None:
    target = tmp_path / "target"
    quantize_checkpoint(source, target)
    expected = contents(target)
    with pytest.raises(ValueError, match=f"target holds {message}"):
        quantize_checkpoint(source, target, **arguments)
    assert contents(target) == expected


def test_the_folder_of_another_model(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "target")
    other = write(tmp_path / "other", {name: t + 1 for name, t in tensors_of_a_model().items()}, 3)
    with pytest.raises(ValueError, match="target holds another model: name another folder, or remove it"):
        quantize_checkpoint(other, tmp_path / "target")


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "1", '{"settings": 1}', '{"settings": [], "files": {}}', '{"settings": 1, "files": {}}',
     '{"settings": {"package": "0"}, "files": []}'],
)  # fmt: skip
def test_a_broken_report(source: Path, tmp_path: Path, text: str) -> None:
    target = tmp_path / "target"
    quantize_checkpoint(source, target)
    (target / REPORT).write_text(text)
    with pytest.raises(ValueError, match=f"{REPORT} cannot be read: name another folder, or remove it"):
        quantize_checkpoint(source, target)


@pytest.mark.parametrize(
    ("settings", "files"), [({}, []), ({}, {"a.safetensors": 1}), ({}, {"a.safetensors": {}})], ids=str
)
def test_a_report_of_the_same_settings_with_broken_files(tmp_path: Path, settings: dict, files: object) -> None:
    (tmp_path / REPORT).write_text(json.dumps({"settings": settings, "files": files}))
    with pytest.raises(ValueError, match=f"{REPORT} cannot be read: name another folder, or remove it"):
        Output(tmp_path, settings)


def test_files_of_others_are_not_removed(source: Path, tmp_path: Path) -> None:
    """A browser's downloads, for example, have .part too."""
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    (downloads / "film.part").write_text("half of it")
    with pytest.raises(ValueError, match="downloads is not an empty folder: name another folder$"):
        quantize_checkpoint(source, downloads)
    target = tmp_path / "target"
    (source / "notes.part").write_text("one")
    quantize_checkpoint(source, target)
    (target / "film.part").write_text("half of it")
    (target / f"x{output._PART}").write_text("of an earlier run")
    quantize_checkpoint(source, target)
    assert (target / "film.part").exists() and (target / "notes.part").exists()
    assert not (target / f"x{output._PART}").exists()
    assert (downloads / "film.part").read_text() == "half of it"


def test_two_runs_at_once(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    handle = os.open(target, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)  # which two runs that shared would both get
    with pytest.raises(ValueError, match="target is being written by another run: let it end, or stop it"):
        quantize_checkpoint(source, target)
    os.close(handle)
    quantize_checkpoint(source, target)


def test_a_run_that_came_and_went_meanwhile(tmp_path: Path) -> None:
    """Between a run's look at the folder and its lock."""
    same, other, first = (Output(tmp_path / "target", {"scheme": name}) for name in ("nvfp4", "ptpc_fp8", "nvfp4"))
    with first.written():
        first.save("model.safetensors", {"w": torch.zeros(2)}, {})
    with pytest.raises(ValueError, match="another run, whose --scheme was nvfp4"), other.written():
        pass
    with same.written():
        assert same.files == first.files


def test_a_disk_that_fills_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors has an error of its own for it."""

    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(output, "save_file", full)
    with pytest.raises(
        OSError, match=r"safetensors\.llm-quant-rocm-part cannot be written \(I/O error: No space .*: make room"
    ):
        quantize_checkpoint(source, tmp_path / "target")
    monkeypatch.undo()
    quantize_checkpoint(source, tmp_path / "target")
    assert (tmp_path / "target" / "config.json").exists()


def test_a_disk_that_fills_up_before_the_last_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, text: str) -> int:
        if self.name == "config.json.llm-quant-rocm-part":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(self, text)

    write_text = Path.write_text
    monkeypatch.setattr(Path, "write_text", full)
    refusal = r"config\.json\.llm-quant-rocm-part cannot be written \(.*No space left on device\): make room"
    with pytest.raises(OSError, match=refusal):
        quantize_checkpoint(source, tmp_path / "target")
    assert not (tmp_path / "target" / "config.json").exists()
    monkeypatch.undo()
    quantize_checkpoint(source, tmp_path / "target")
    assert (tmp_path / "target" / "config.json").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
def test_a_disk_that_fills_up_under_a_copy(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The system names what was copied first, where the fault is not."""

    def full(copied: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(copied), None, str(target))

    monkeypatch.setattr("shutil.copy2", full)
    part = tmp_path / "target" / "tokenizer.json.llm-quant-rocm-part"
    with pytest.raises(OSError, match=rf"^{part} cannot be written \({os.strerror(code)}\): make room"):
        quantize_checkpoint(source, tmp_path / "target")


def test_a_file_that_cannot_be_copied_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(copied: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(copied))

    monkeypatch.setattr("shutil.copy2", refuse)
    with pytest.raises(PermissionError) as caught:
        quantize_checkpoint(source, tmp_path / "target")
    assert caught.value.filename == str(source / "tokenizer.json")


def test_a_folder_that_may_not_be_made() -> None:
    refusal = r"/dev/null/target cannot be written \(.*Not a directory.*\): .*who may write there"
    with pytest.raises(OSError, match=refusal), Output(Path("/dev/null/target"), {}).written():
        pass


def test_a_target_that_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    with pytest.raises(ValueError, match="target is not an empty folder: name another folder$"):
        quantize_checkpoint(source, tmp_path / "target")
    assert (tmp_path / "target").read_text() == "mine"


def test_a_disk_that_is_too_small(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match=r"has 0 MiB free, and .*target needs 1 MiB"):
        quantize_checkpoint(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_what_is_whole_needs_no_room_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    quantize_checkpoint(source, target)
    (target / "config.json").unlink()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    quantize_checkpoint(source, target)
    assert (target / "config.json").exists()
