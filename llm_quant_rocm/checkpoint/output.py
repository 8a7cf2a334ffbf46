# SPDX-License-Identifier: Apache-2.0
"""The folder that a quantized checkpoint is written to: it can be interrupted at any moment and gone on with.

Every file is written under the name NAME.llm-quant-rocm-part, flushed to the disk, and renamed. `REPORT` lists the
files that are whole, so that a later run with the same settings goes on behind them, and keeps what is known of their
layers. config.json is written last: a folder that has it is whole, and no engine loads one that is not.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

REPORT = "quantization_report.json"
# Nobody else's: what has it is removed.
_PART = ".llm-quant-rocm-part"
# What users call the settings and their values: the options of `quantize`.
_OPTIONS = {
    "scheme": "--scheme", "layout": "--format", "ignore": "--ignore", "device": "--device",
    "share_global_scales": "--global-scales", "search": "--block-scales",
}  # fmt: skip
_VALUES = {
    "share_global_scales": {"True": "shared", "False": "separate"},
    "search": {"True": "search", "False": "nearest"},
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Output:
    """What a run has written so far. Use within `with`: another run on the same folder is refused meanwhile.

    Attributes:
        files: by the name of every whole weight file, what was recorded of it.

    Raises:
        ValueError: the folder holds something else, or what other settings made, or another run is at work.
        OSError: the disk is full, or may not be written to; the message names the cure.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._settings = json.loads(json.dumps(settings))
        self.files: dict[str, Any] = self._read()

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Holds the folder, and clears what an interrupted run left half-written."""
        with _explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self._folder} is being written by another run: let it end, or stop it") from None
            self.files = self._read()  # another run may have come and gone since
            for left in self._folder.rglob(f"*{_PART}"):
                left.unlink()
            self._record()
            yield
            os.fsync(handle)
        finally:
            os.close(handle)

    @property
    def complete(self) -> bool:
        """Whether a run has ended here."""
        return (self._folder / "config.json").exists()

    def save(self, file: str, tensors: dict[str, torch.Tensor], record: Any) -> None:
        """Write a weight file and record it."""

        def write(path: Path) -> None:
            save_file(tensors, path, metadata={"format": "pt"})
            # safetensors lets the owner alone read it; the user's umask has decided on the report's mode.
            shutil.copymode(self._folder / REPORT, path)

        self._place(file, write)
        self.files[file] = {"bytes": (self._folder / file).stat().st_size, **record}
        self._record()

    def write_json(self, file: str, value: Any) -> None:
        """Write a JSON file that people can read."""
        self._place(file, lambda path: path.write_text(json.dumps(value, indent=2) + "\n"))

    def copy(self, source: Path, file: str) -> None:
        """Copy a file."""
        self._place(file, lambda path: shutil.copy2(source, path))

    def _place(self, file: str, write: Callable[[Path], Any]) -> None:
        """`file` may be in a folder of the checkpoint."""
        part = self._folder / f"{file}{_PART}"
        with _explained(part):
            part.parent.mkdir(parents=True, exist_ok=True)
            write(part)
            with part.open("rb") as written:
                os.fsync(written.fileno())
            part.replace(self._folder / file)

    def _record(self) -> None:
        self.write_json(REPORT, {"settings": self._settings, "files": dict(sorted(self.files.items()))})

    def _read(self) -> dict[str, Any]:
        """The whole files of an earlier run with the same settings."""
        report, cure = self._folder / REPORT, "name another folder, or remove it"
        left = [file.name for file in self._folder.iterdir()] if self._folder.is_dir() else []
        if not self._folder.exists() or (self._folder.is_dir() and left in ([], [f"{REPORT}{_PART}"])):
            return {}  # the report is written first
        if not report.is_file():
            # It may be the user's only copy of something: nobody is told to remove it.
            raise ValueError(f"{self._folder} is not an empty folder: name another folder")
        try:
            found = json.loads(report.read_text())
            settings, files = found["settings"], found["files"]
            others = {name: settings.get(name) for name, value in self._settings.items() if settings.get(name) != value}
            whole = {
                file: record for file, record in files.items() if not others and self._holds(file, record["bytes"])
            }
        except (AttributeError, ValueError, KeyError, TypeError):
            raise ValueError(f"{report} cannot be read: {cure}") from None
        for name, value in others.items():
            raise ValueError(f"{self._folder} holds {_other(name, value)}: {cure}")
        return whole

    def _holds(self, file: str, size: int) -> bool:
        path = self._folder / file
        return path.is_file() and path.stat().st_size == size


def _other(setting: str, value: Any) -> str:
    """Whose folder it is, by one of its settings that is not this run's."""
    if setting == "source":
        return "another model"
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    value = _VALUES.get(setting, {}).get(str(value), value)
    return f"another run, whose {_OPTIONS.get(setting, setting)} was {value}"


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What the disk refuses of `path`, with the cure."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # the latter is no OSError
        copied = str(getattr(error, "filename", None) or path) != str(path)
        if copied and getattr(error, "errno", None) not in _FULL:  # what was to be copied is at fault
            raise
        cure = "make room, or see who may write there, and the same command goes on"
        # The system's words without its number, and without the name again.
        raise OSError(f"{path} cannot be written ({getattr(error, 'strerror', None) or error}): {cure}") from error
