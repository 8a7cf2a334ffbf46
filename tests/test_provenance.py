# SPDX-License-Identifier: Apache-2.0
"""What stands beside figures says how many GPUs gave them, and which packages."""

from importlib import metadata
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from llm_quant_rocm import provenance

ROOT = Path(__file__).parents[1]


def test_a_machine_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance.subprocess, "run", git := Mock(side_effect=FileNotFoundError("git")))
    monkeypatch.delenv("LLM_QUANT_ROCM_COMMIT", raising=False)
    assert "commit" not in provenance.environment()
    assert git.called == (ROOT / ".git").exists()


def test_a_run_that_changes_the_repository_names_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_COMMIT", "abc1234")
    assert provenance.environment()["commit"] == "abc1234"


@pytest.mark.parametrize(
    ("there", "used", "device"),
    [(1, None, "H200"), (1, 1, "H200"), (4, None, "4 x H200"), (4, 4, "4 x H200"), (4, 2, "2 of 4 x H200")],
)
def test_gpus_of_figures(there: int, used: int | None, device: str) -> None:
    with (
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.cuda, "device_count", return_value=there),
        patch.object(torch.cuda, "get_device_name", return_value="H200"),
    ):
        assert provenance.environment(used)["device"] == device
        assert provenance.without_count(device) == "H200"


def test_amds_name_of_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(distribution: str) -> str:
        if distribution != "amd-aiter":
            raise metadata.PackageNotFoundError(distribution)
        return "0.1.7"

    monkeypatch.setattr(metadata, "version", find)
    assert provenance.environment()["aiter"] == "0.1.7"
