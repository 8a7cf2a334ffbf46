# SPDX-License-Identifier: Apache-2.0
"""What an engine says when a checkpoint cannot be served, and what it leaves unquantized on request."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoints
import engines
import pytest
import torch
from conftest import succeed
from safetensors.torch import load_file, save_file


def changed(checkpoint: Path, folder: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of the checkpoint in `folder` with one tensor changed."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor] = change(tensors[tensor])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def broken(weight: torch.Tensor) -> torch.Tensor:
    weight[1, 3] = float("nan")
    return weight


def refusal(folder: Path, checkpoint: Path, **settings: object) -> str:
    result = engines.run(folder, checkpoint, quantization="ptpc_fp8", **settings)
    assert result.returncode != 0
    return result.log


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("dense", "model.layers.1.self_attn.k_proj.weight"),
        ("moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
    ],
)
def test_nan_names_the_tensor(kind: str, tensor: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    checkpoint = changed(request.getfixturevalue(f"{kind}_checkpoint"), tmp_path / "checkpoint", tensor, broken)
    assert f"{tensor} holds NaN or inf (in 1 rows)" in refusal(tmp_path, checkpoint)


def test_integers_are_not_taken_for_weights(dense_checkpoint: Path, tmp_path: Path) -> None:
    tensor = "model.layers.0.mlp.up_proj.weight"
    checkpoint = changed(dense_checkpoint, tmp_path / "checkpoint", tensor, lambda weight: weight.to(torch.int8))
    assert f"{tensor} is torch.int8 in the checkpoint" in refusal(tmp_path, checkpoint)


def test_a_quantized_checkpoint_is_refused(dense_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(dense_checkpoint, tmp_path / "checkpoint")
    checkpoints.edit_config(checkpoint, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    assert "the checkpoint is already quantized (fp8)" in refusal(tmp_path, checkpoint)


def test_ignored_layers_stay_unquantized(dense_checkpoint: Path, tmp_path: Path) -> None:
    settings = json.dumps({"ignored_layers": ["model.layers.0", "o_proj", "model.layers.7"]})
    result = succeed(
        engines.run(
            tmp_path,
            dense_checkpoint,
            quantization="ptpc_fp8",
            hf_overrides={"quantization_config_dict_json": settings},
        )
    )
    quantized = {name for name, tensor in result.weights[0].items() if tensor.dtype == torch.uint8}
    leaves = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert quantized == {f"model.layers.1.{leaf}.weight" for leaf in leaves}
    assert "quantizing 3 linear layers" in result.log
    assert "5 layers named by ignored_layers" in result.log
    assert "ignored_layers names 'model.layers.7', which no layer of this process matches" in result.log


def test_a_checkpoint_may_ask_for_the_method_itself(dense_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(dense_checkpoint, tmp_path / "checkpoint")
    checkpoints.edit_config(
        checkpoint, quantization_config={"quant_method": "ptpc_fp8", "ignored_layers": ["re:.*down_proj"]}
    )
    result = succeed(engines.run(tmp_path, checkpoint))
    assert "quantizing 6 linear layers" in result.log


def test_fp8_kv_cache(dense: engines.Result, dense_checkpoint: Path, tmp_path: Path) -> None:
    result = succeed(engines.run(tmp_path, dense_checkpoint, quantization="ptpc_fp8", kv_cache_dtype="fp8_e4m3"))
    difference = (result.logprobs - dense.logprobs).abs().mean()
    assert 0 < difference < 0.3
