# SPDX-License-Identifier: Apache-2.0
"""Weights that vLLM reloads into an engine that is up (`reload_weights`), as reinforcement learning has it do."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import engines
import forks
import nvfp4_checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

IGNORE = ("lm_head", "mlp.gate")
TRAINED = "model.layers.0.self_attn.o_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"
# kind: (how many tensors our layers serve, a tensor that a broken checkpoint lacks, arguments of vllm.LLM)
KINDS = {
    "compressed-tensors": (24, "model.layers.1.self_attn.k_proj.weight_packed", {}),
    # Of an FP8 layer, which any positive number would do. Not every CPU has a KV cache in FP8.
    "mixed": (20, "model.layers.0.self_attn.o_proj.weight_scale", {"kv_cache_dtype": "bfloat16"}),
    "moe": (24, f"{EXPERT}.weight_scale_2", {}),
    "ptpc": (16, f"{EXPERT}.weight", {"quantization": "ptpc_fp8"}),
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def sound(
    kind: str, tmp_path: Path, nvfp4_dense: nvfp4_checkpoints.Quantized, nvfp4_moe: nvfp4_checkpoints.Quantized
) -> Path:
    folder = tmp_path / "sound"
    if kind == "compressed-tensors":
        return nvfp4_dense.write_compressed_tensors(folder, activations=False)
    if kind == "mixed":
        return nvfp4_dense.write_mixed(folder)
    return nvfp4_moe.source if kind == "ptpc" else nvfp4_moe.write_modelopt(folder, ignore=IGNORE)


def other(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What another checkpoint might have in its place."""
    if "proj.weight" not in name:
        return tensor
    return tensor * 2 if tensor.numel() == 1 else tensor.view(torch.uint8).flip(0).view(tensor.dtype)


def changed(checkpoint: Path, folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    shutil.copytree(checkpoint, folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def reload(folder: Path, reloads: list[Path], loaded: Path, **settings: object) -> list[list[str] | str]:
    """What reload_process.py answers."""
    request, answer = folder / "request.json", folder / "answer.json"
    given = {**engines.SETTINGS, **settings}
    checkpoints = {"reloads": [str(checkpoint) for checkpoint in reloads], "loaded": str(loaded)}
    request.write_text(json.dumps({"settings": given, **checkpoints}))
    process = subprocess.run(
        [forks.python(), str(engines.HERE / "reload_process.py"), str(request), str(answer)],
        env=engines.environment(**engines.EAGER),
        text=True,
        capture_output=True,
        timeout=engines.LIMIT,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(answer.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_reloaded(kind: str, sound: Path, tmp_path: Path) -> None:
    """All of them, or those of some layers. A checkpoint that lacks a tensor of a layer is refused, as at first.

    What comes to the model's own load_weights, as trainers send it, is refused, and nothing copied.
    """
    count, lacking, settings = KINDS[kind]
    others = changed(sound, tmp_path / "others", lambda tensors: {name: other(name, tensors[name]) for name in tensors})
    layer = changed(others, tmp_path / "layer", lambda all: {name: all[name] for name in all if ".layers.1." in name})
    broken = changed(sound, tmp_path / "broken", lambda all: {name: all[name] for name in all if name != lacking})
    trained = changed(sound, tmp_path / "trained", lambda all: {TRAINED: torch.zeros(128, 128, dtype=torch.bfloat16)})
    reloads = [others, sound, layer, broken]
    refusal, of_loaded, of_others, of_sound, of_layer, error = reload(
        tmp_path, reloads, trained, model=str(sound), **settings
    )
    assert f"{TRAINED} was prepared for its kernels when the checkpoint was loaded, and no other can be" in refusal
    assert of_loaded == []
    assert len(of_others) == count
    assert of_sound == []
    assert of_layer == [name for name in of_others if ".layers.1." in name]
    assert f"{lacking} is missing from the checkpoint" in error
