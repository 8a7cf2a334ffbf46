# SPDX-License-Identifier: Apache-2.0
"""A file of measured configurations in the making: what is gone on with, and what is measured anew."""

from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from llm_quant_rocm.tune.record import Record

HERE = {
    "device": "a GPU",
    "torch": "2.11",
    "triton": "3.6",
    "llm-quant-rocm": "0.1",
    "commit": "1234567",
    "date": "2026-11-22",
}
KEY = {"n": 8, "k": 16, "m": 1}


@dataclass(frozen=True)
class Config:
    block: int


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({}, []),
        ({"date": "2026-11-23"}, []),
        ({"device": "8 x a GPU"}, []),
        ({"device": "1 of 8 x a GPU"}, []),
        ({"torch": "2.12", "vllm": "0.33", "commit": "7654321-dirty"}, []),
        ({"device": "another"}, ["a GPU"]),
        ({"triton": "3.9"}, ["triton 3.6"]),
        ({"llm-quant-rocm": "0.2"}, ["llm-quant-rocm 0.1"]),
    ],
    ids=["same", "next-day", "more-gpus", "one-gpu-of-them", "what-does-not-count", "device", "triton", "package"],
)
def test_what_is_gone_on_with(tmp_path: Path, changes: dict[str, str], others: list[str]) -> None:
    """A GPU that is measured over midnight is not measured again, nor is one after another package came."""
    file = tmp_path / "operator" / "arch.json"
    Record(file, HERE).add(KEY, "triton", Config(64))
    found = Record(file, HERE | changes)
    assert (found.holds(KEY), found.others) == (not others, others)


def test_the_file_says_every_environment_that_it_is_of(tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "arch.json", HERE | {"commit": "7654321", "vllm": "0.33"}
    Record(file, HERE).add(KEY, "triton", Config(64))
    assert Record(file, elsewhere).content()["measured_on"] == HERE, "nothing was measured there yet"
    for m in (2, 3):
        Record(file, elsewhere).add(KEY | {"m": m}, "triton", Config(64))
    Record(file, HERE).add(KEY | {"m": 4}, "triton", Config(64))
    found = Record(file, HERE).content()
    assert found["measured_on"] == HERE | {"commit": "1234567; 7654321", "vllm": "none; 0.33"}
    assert [shape["m"] for shape in found["shapes"]] == [1, 2, 3, 4]


def test_gpus_of_several_runs_are_one_gpu(tmp_path: Path) -> None:
    file = tmp_path / "arch.json"
    for m, device in enumerate(["a GPU", "8 x a GPU", "2 of 8 x a GPU"], 1):
        Record(file, HERE | {"device": device}).add(KEY | {"m": m}, "triton", Config(64))
    found = Record(file, HERE)
    assert len(found.entries) == 3 and found.measured_on["device"] == "a GPU; 8 x a GPU; 2 of 8 x a GPU"


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
    assert list(tmp_path.iterdir()) == [file], "nothing half-written stays"


def test_two_runs_at_once_keep_what_both_measured(tmp_path: Path) -> None:
    file = tmp_path / "arch.json"
    one, other = Record(file, HERE), Record(file, HERE | {"commit": "7654321"})
    for m in range(1, 4):
        one.add(KEY | {"m": m}, "triton", Config(1))
        other.add(KEY | {"m": 10 * m}, "triton", Config(10))
        other.add(KEY | {"m": m}, "triton", Config(10))
    found = Record(file, HERE)
    assert sorted(shape["m"] for shape in found.entries) == [1, 2, 3, 10, 20, 30], "each once"
    assert found.measured_on["commit"] == "7654321; 1234567"
    assert [item.name for item in tmp_path.iterdir()] == ["arch.json"]


def add_many(file: Path, first: int) -> None:
    for m in range(first, first + 100):
        Record(file, HERE).add(KEY | {"m": m}, "triton", Config(m))


def test_processes_on_one_file_wait_for_each_other(tmp_path: Path) -> None:
    """Each reads it anew every time, and so knows nothing that is not in the file."""
    file = tmp_path / "operator" / "arch.json"
    processes = [get_context("spawn").Process(target=add_many, args=(file, first)) for first in (1, 101, 201)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(shape["m"] for shape in Record(file, HERE).entries) == list(range(1, 301))
    assert list(file.parent.iterdir()) == [file]
