# SPDX-License-Identifier: Apache-2.0
"""What is written beside a benchmark's figures."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks import _harness as harness


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
