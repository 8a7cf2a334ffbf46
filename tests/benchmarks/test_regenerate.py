# SPDX-License-Identifier: Apache-2.0
"""The runner of the benchmarks, without a GPU: which steps run, how they are called, and that none is forgotten."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import regenerate
from benchmarks.regenerate import HUMMING, SGLANG, STEPS, VLLM, Step, command, finish, why_not
from llm_quant_rocm import provenance

FOLDER = Path(regenerate.__file__).parent
HERE = {"commit": "abc", "device": "2 x a GPU", "torch": "1", "triton": "3", "date": "today"}


def test_every_benchmark_is_a_step() -> None:
    """A script that writes results is run, and every step's script is there."""
    writes = re.compile(r"harness\.write\(|_experts\.main\(")
    writing = {file.name for file in FOLDER.glob("[!_]*.py") if writes.search(file.read_text())}
    assert len({step.result for step in STEPS}) == len(STEPS)
    assert {step.script for step in STEPS} == writing


def test_folders_that_are_not_known_take_their_option_along() -> None:
    step = Step("x", "nvfp4_gemm.py", ("--vllm-ops", VLLM, "--humming", HUMMING, "--layers", "o"))
    start = [sys.executable, str(FOLDER / "nvfp4_gemm.py")]
    assert command(step, {VLLM: None, HUMMING: None}) == [*start, "--layers", "o"]
    assert command(step, {VLLM: "/v", HUMMING: None}) == [*start, "--vllm-ops", "/v", "--layers", "o"]
    assert command(step, {VLLM: None, HUMMING: "/h"}) == [*start, "--humming", "/h", "--layers", "o"]


@pytest.mark.parametrize(
    ("step", "there", "again", "reason"),
    [
        (Step("x", "x.py"), None, False, None),
        (Step("x", "x.py", gpus=4), None, False, "needs 4 GPUs, 2 are here"),
        (Step("x", "x.py", gpus=0), None, False, "it is about a machine without GPUs"),
        (Step("x", "x.py", engine="vllm"), None, False, "needs vllm: name its folder by --vllm"),
        (Step("x", "x.py", engine="sglang"), None, False, None),
        (Step("x", "x.py"), HERE | {"date": "yesterday"}, False, "measured already"),
        (Step("x", "x.py"), HERE | {"device": "1 of 2 x a GPU"}, False, "measured already"),
        (Step("x", "x.py"), HERE, True, None),
        (Step("x", "x.py"), HERE | {"unfinished": "yes"}, False, None),
        (Step("x", "x.py"), HERE | {"commit": "def"}, False, None),
        (Step("x", "x.py"), HERE | {"device": "another"}, False, None),
    ],
    ids=["new", "gpus", "no-gpus", "no-engine", "engine", "there", "fewer", "again", "unfinished", "commit", "device"],
)
def test_what_is_passed_over(
    tmp_path: Path, step: Step, there: dict[str, str] | None, again: bool, reason: str | None
) -> None:
    paths = tmp_path / "out" / "x.json", tmp_path / "x.json"
    if there:
        paths[1].write_text(json.dumps({"environment": there}))
        if "unfinished" not in there:
            finish(paths[1], 12.3)
            assert json.loads(paths[1].read_text()) == {"environment": there, "seconds": 12.3}
    assert why_not(step, 2, ["sglang"], paths, HERE, again) == reason


def test_changes_are_measured_anew(tmp_path: Path) -> None:
    dirty = HERE | {"commit": "abc-dirty"}
    (tmp_path / "x.json").write_text(json.dumps({"environment": dirty, "seconds": 1}))
    assert why_not(Step("x", "x.py"), 1, [], [tmp_path / "x.json"], dirty, False) is None


NOBODY: dict[str, str | None] = {VLLM: None, SGLANG: None, HUMMING: None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    on_gpus = [step for step in STEPS if step.gpus]
    assert regenerate.run(on_gpus, NOBODY, 1.0, False, False) == []
    said = capsys.readouterr().out
    assert said.count("passed over, needs ") == len(on_gpus) and f"0 of {len(on_gpus)} steps, about 0 s" in said


SCRIPT = """
import json, os, pathlib, sys
path = pathlib.Path(os.environ["OUT"], "NAME.json")
path.write_text(json.dumps({"environment": {"commit": os.environ["LLM_QUANT_ROCM_COMMIT"]}}))
sys.exit(STATUS)
"""


def test_steps_run_one_after_the_other_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second fails, and the third's time is more than is left; a second call has those two to do."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(provenance, "environment", lambda: {"commit": "abc"})
    monkeypatch.setattr(provenance, "line", str)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def made_up(step: Step, folders: object) -> list[str]:
        text = SCRIPT.replace("NAME", step.result).replace("STATUS", "1" if step.result == "second" else "0")
        return [sys.executable, "-c", text]

    monkeypatch.setattr(regenerate, "command", made_up)
    steps = [Step("first", "x.py", gpus=0, seconds=1), Step("second", "x.py", gpus=0, seconds=1)]
    steps.append(Step("third", "x.py", gpus=0, seconds=500))
    assert regenerate.run(steps, NOBODY, 100.0, False, False) == ["second", "third"]
    said = capsys.readouterr().out
    assert "3 of 3 steps, about 502 s" in said and "[1/3] first: done in 0 s" in said
    assert "[2/3] second: FAILED with status 1" in said and "[3/3] third: not begun" in said
    assert regenerate.run(steps, NOBODY, 1e9, False, True) == []
    said = capsys.readouterr().out
    assert "first: passed over, measured already" in said and "2 of 3 steps" in said
    assert not (tmp_path / "third.json").exists(), "a list runs nothing"
