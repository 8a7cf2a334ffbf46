# SPDX-License-Identifier: Apache-2.0
"""Folders whose JSON files are not what they should be. tests/cli/test_doctor_model.py has the tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llm_quant_rocm.checkpoint.survey import survey


def folder(path: Path, config: dict[str, Any], index: Any = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    save_file({"a_proj.weight": torch.zeros(2, 16)}, path / "model.safetensors")
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": ["model.safetensors"]}], ids=str)
def test_an_index_without_a_map_is_a_fault(tmp_path: Path, index: Any) -> None:
    found = survey(folder(tmp_path, {}, index))
    assert len(found.faults) == 1
    assert found.faults[0].endswith("model.safetensors.index.json has no weight_map: download it again")
    assert [module.name for module in found.modules] == ["a_proj"]


@pytest.mark.parametrize(
    "config",
    [{"text_config": None}, {"text_config": {}}, {"quantization_config": None}, {"quantization_config": {}}],
    ids=str,
)
def test_a_checkpoint_that_says_nothing_of_quantization(tmp_path: Path, config: dict[str, Any]) -> None:
    assert survey(folder(tmp_path, config)).quantization is None


def test_the_quantization_of_a_text_model_inside(tmp_path: Path) -> None:
    inside = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert survey(folder(tmp_path, {"text_config": {"quantization_config": inside}})).quantization == inside


def test_older_compressed_tensors_describe_it_under_another_key(tmp_path: Path) -> None:
    older = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    assert survey(folder(tmp_path, {"compression_config": older})).quantization == older
    newer = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    for config in ({"quantization_config": newer}, {"text_config": {"quantization_config": newer}}):
        assert survey(folder(tmp_path, config | {"compression_config": older})).quantization == newer
    with pytest.raises(ValueError, match=r"compression_config in .* is no JSON object: download"):
        survey(folder(tmp_path, {"compression_config": "nvfp4"}))
