# SPDX-License-Identifier: Apache-2.0
"""The runner of the benchmarks, without a GPU: which steps run, how they are called, and that none is forgotten."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import regenerate
from benchmarks.regenerate import HUMMING, SGLANG, STEPS, VLLM, Step, command, why_not

FOLDER = Path(regenerate.__file__).parent
HERE = {"commit": "abc", "device": "a GPU", "torch": "1", "triton": "3", "date": "today"}


def test_every_benchmark_is_a_step() -> None:
    """A script that writes results is run, and every step's script is there."""
    writing = {file.name for file in FOLDER.glob("*.py") if "harness.write(" in file.read_text()}
    assert {step.script for step in STEPS} == writing - {"_harness.py"}


def test_the_report_reads_what_the_steps_write() -> None:
    names = {step.result.format(arch="sm_90") for step in STEPS}
    text = "".join((FOLDER / file).read_text() for file in ("report.py", "_nvfp4_report.py", "_fusion_report.py"))
    read = set(re.findall(r'"(\w[\w-]*_sm_90)(?:\.json)?"', text))
    assert read <= names, read - names


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
        (Step("x", "x.py", engine="vllm"), None, False, "needs vllm: name its folder by --vllm"),
        (Step("x", "x.py", engine="sglang"), None, False, None),
        (Step("x", "x.py"), HERE | {"date": "yesterday"}, False, "measured already"),
        (Step("x", "x.py"), HERE, True, None),
        (Step("x", "x.py"), HERE | {"commit": "def"}, False, None),
        (Step("x", "x.py"), HERE | {"device": "another"}, False, None),
    ],
    ids=["new", "gpus", "no-engine", "engine", "there", "again", "commit", "device"],
)
def test_what_is_passed_over(
    tmp_path: Path, step: Step, there: dict[str, str] | None, again: bool, reason: str | None
) -> None:
    path = tmp_path / "x.json"
    if there:
        path.write_text(json.dumps({"environment": there}))
    assert why_not(step, 2, ["sglang"], path, HERE, again) == reason


def test_changes_are_measured_anew(tmp_path: Path) -> None:
    dirty = HERE | {"commit": "abc-dirty"}
    (tmp_path / "x.json").write_text(json.dumps({"environment": dirty}))
    assert why_not(Step("x", "x.py"), 1, [], tmp_path / "x.json", dirty, False) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu() -> None:
    with pytest.raises(SystemExit, match="regenerate: FAILED. no GPU is here"):
        regenerate.run(STEPS, {VLLM: None, SGLANG: None, HUMMING: None}, 1.0, False)
