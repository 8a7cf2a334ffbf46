# SPDX-License-Identifier: Apache-2.0
"""The crossovers of the all-reduce with made-up times: what is kept, gone on with, and read by the policy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from llm_quant_rocm.comm import policy
from llm_quant_rocm.comm.policy import Algorithm, Policy, Settings
from llm_quant_rocm.formats.wire import codec_named
from llm_quant_rocm.measure import all_reduce
from llm_quant_rocm.tune.quick_reduce import tune

MEASURED_ON = {"device": "2 x a GPU", "torch": "2", "triton": "3", "commit": "abc", "date": "today"}


def row(nbytes: int) -> dict[str, Any]:
    """FP4 is twice as fast as NCCL from 1 MiB on, half as fast below."""
    return {"bytes": nbytes, "us": {"NCCL": 10.0, "FP4": 5.0 if nbytes >= 1 << 20 else 20.0}}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes that each measurement was asked for; it comes to eight of them."""
    asked: list[tuple[int, ...]] = []

    def measure(world: int, heard: Callable[[str, Any], None], sizes: tuple[int, ...], seconds: float) -> None:
        asked.append(sizes)
        for size in sizes[:8]:
            heard("row", row(size))

    monkeypatch.setattr(all_reduce, "measure", measure)
    return asked


def test_it_goes_on_behind_what_was_measured_and_the_policy_serves_by_it(
    sizes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    file = tmp_path / "quick_reduce" / "sm_90.json"
    heard: list[str] = []
    left = tune(2, file, MEASURED_ON, lambda word, what: heard.append(word))
    assert len(left) == len(all_reduce.SIZES) - 8 and not file.exists() and heard == ["row"] * 8
    tune(2, file, MEASURED_ON | {"date": "tomorrow"}, lambda word, what: None)
    while tune(2, file, MEASURED_ON, lambda word, what: None):
        pass
    assert [len(each) for each in sizes] == [len(all_reduce.SIZES) - 8 * turn for turn in range(len(sizes))]
    assert sorted(file.parent.iterdir()) == [file], "nothing half-done stays"
    with patch.object(policy, "cache_file", return_value=file):
        found = Policy(Settings(codec_named("FP4")), 2, "sm_90")
    assert found.measured
    assert found.choose(1 << 19, torch.bfloat16).algorithm is Algorithm.ENGINE
    assert found.choose(1 << 20, torch.bfloat16).algorithm is Algorithm.TWO_SHOT


def test_other_numbers_of_ranks_stay(sizes: list[tuple[int, ...]], tmp_path: Path) -> None:
    file = tmp_path / "sm_90.json"
    for world in (2, 4):
        while tune(world, file, MEASURED_ON, lambda word, what: None):
            pass
    assert [entry["world_size"] for entry in json.loads(file.read_text())["crossovers"]] == [2, 4]


def test_other_numbers_of_ranks_that_are_measured_meanwhile_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And one that is done takes nothing from another with as many ranks."""
    file, rows_file = tmp_path / "sm_90.json", tmp_path / "sm_90.tp2.part"

    def measure(world: int, heard: Callable[[str, Any], None], sizes: tuple[int, ...], seconds: float) -> None:
        for size in sizes:
            heard("row", row(size))
            if world == 2 and size == sizes[3]:
                tune(4, file, MEASURED_ON, lambda word, what: None)
                rows_file.unlink()

    monkeypatch.setattr(all_reduce, "measure", measure)
    assert tune(2, file, MEASURED_ON, lambda word, what: None) == []
    found = json.loads(file.read_text())["crossovers"]
    assert {entry["world_size"]: len(entry["steps"]) for entry in found if entry["codec"] == "FP4"} == {2: 2, 4: 2}
    assert list(tmp_path.iterdir()) == [file]


def test_another_version_is_measured_anew(sizes: list[tuple[int, ...]], tmp_path: Path) -> None:
    tune(2, tmp_path / "sm_90.json", MEASURED_ON, lambda word, what: None)
    heard: list[Any] = []
    tune(2, tmp_path / "sm_90.json", MEASURED_ON | {"triton": "4"}, lambda word, what: heard.append((word, what)))
    assert sizes[0] == sizes[1] == all_reduce.SIZES
    word, left = heard[0]
    assert word == "anew" and left.others == ["triton 3"] and left.path == tmp_path / "sm_90.tp2.part"


def test_another_version_of_what_does_not_count_is_gone_on_with(sizes: list[tuple[int, ...]], tmp_path: Path) -> None:
    """The crossovers then say both."""
    file = tmp_path / "sm_90.json"
    for number in range(3):
        tune(2, file, MEASURED_ON | {"torch": str(number)}, lambda word, what: None)
    assert len(sizes) == 3
    assert json.loads(file.read_text())["crossovers"][0]["measured_on"] == MEASURED_ON | {"torch": "0; 1; 2"}


@pytest.mark.parametrize("text", ["", "[]", '{"measured_on": {}}'])
def test_broken_files_are_measured_anew(text: str, sizes: list[tuple[int, ...]], tmp_path: Path) -> None:
    file = tmp_path / "sm_90.json"
    file.with_name("sm_90.tp2.part").write_text(text)
    assert tune(2, file, MEASURED_ON, lambda word, what: None) and sizes == [all_reduce.SIZES]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"5", b"\xff", b'{"crossovers": 5}', b'{"crossovers": [1]}', b'{"crossovers": [{}]}',
     b'{"crossovers": [{"world_size": [], "codec": "FP4"}]}', b'{"crossovers": [{"world_size": "2", "codec": "FP4"}]}'],
    ids=repr,
)  # fmt: skip
def test_a_broken_file_of_crossovers_is_written_anew(
    content: bytes, sizes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """As the policy's message asks for: what took minutes to measure is not lost over it."""
    file = tmp_path / "sm_90.json"
    file.write_bytes(content)
    while tune(2, file, MEASURED_ON, lambda word, what: None):
        pass
    with patch.object(policy, "cache_file", return_value=file):
        assert Policy(Settings(codec_named("FP4")), 2, "sm_90").measured


def test_the_table_of_replays_covers_every_size() -> None:
    assert max(all_reduce.SIZES) <= max(all_reduce.REPLAYS) and len(set(all_reduce.SIZES)) == len(all_reduce.SIZES)
