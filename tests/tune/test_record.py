# SPDX-License-Identifier: Apache-2.0
"""A file of measured configurations in the making: what is gone on with, and what is measured anew."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llm_quant_rocm.tune.record import Record

HERE = {"device": "a GPU", "torch": "2.11", "triton": "3.6", "commit": "1234567", "date": "2026-11-22"}
KEY = {"n": 8, "k": 16, "m": 1}


@dataclass(frozen=True)
class Config:
    block: int


@pytest.mark.parametrize(
    ("changes", "goes_on"),
    [({}, True), ({"date": "2026-11-23"}, True), ({"device": "another"}, False), ({"triton": "3.9"}, False)],
    ids=["same", "next-day", "device", "triton"],
)
def test_what_is_gone_on_with(tmp_path: Path, changes: dict[str, str], goes_on: bool) -> None:
    """A GPU that is measured over midnight is not measured again."""
    file = tmp_path / "operator" / "arch.json"
    Record(file, HERE).add(KEY, "triton", Config(64))
    assert Record(file, HERE | changes).holds(KEY) is goes_on


def test_the_file_is_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "arch.json"
    record = Record(file, HERE)
    record.add(KEY, "triton", Config(64))
    write = Path.write_text

    def half(path: Path, text: str, *args: Any) -> int:
        write(path, text[: len(text) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        record.add(KEY | {"m": 2}, "triton", Config(32))
    found = Record(file, HERE)
    assert found.holds(KEY) and not found.holds(KEY | {"m": 2})
