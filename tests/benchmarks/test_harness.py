# SPDX-License-Identifier: Apache-2.0
"""What is written beside a benchmark's figures."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks import _harness as harness
from benchmarks._markdown import named_gpu
from llm_quant_rocm import hardware


@pytest.mark.parametrize(
    ("result", "device"),
    [({"world": 2}, "2 of 4 x H200"), ({"ranks": 1}, "1 of 4 x H200"), ({"ranks": 4}, "4 x H200"), ({}, "4 x H200")],
)
def test_the_gpus_of_a_result(
    result: dict[str, int], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    with (
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.cuda, "device_count", return_value=4),
        patch.object(torch.cuda, "get_device_name", return_value="H200"),
    ):
        found = json.loads(harness.write("name", {**result, "rows": []}, vllm="0.26.0").read_text())
    assert found["environment"]["device"] == device and found["environment"]["vllm"] == "0.26.0"
    assert found["rows"] == []


@pytest.mark.parametrize(
    ("name", "found", "expected", "title"),
    [
        ("NVIDIA H100 80GB HBM3", hardware.nvidia(9, 0), "sm_90", ""),
        ("NVIDIA H200", hardware.nvidia(9, 0), "h200_sm_90", ", H200"),
        ("NVIDIA GH200 480GB", hardware.nvidia(9, 0), "gh200_sm_90", ", GH200"),
        ("AMD Instinct MI300X", hardware.amd("gfx942"), "mi300x_gfx942", ", MI300X"),
    ],
)
def test_files_of_other_gpus_are_others(
    name: str, found: hardware.Hardware, expected: str, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured on one does not take the place of what was on another, nor has its title."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(hardware, "detect", lambda device: found)
    assert harness.gpu() == expected
    assert named_gpu(f"nvfp4_moe_{harness.gpu()}", {"environment": {"device": name}}) == title


def test_several_gpus_name_no_file() -> None:
    assert named_gpu("quick_reduce_sm_90_tp2", {"environment": {"device": "2 of 4 x NVIDIA H200"}}) == ""
