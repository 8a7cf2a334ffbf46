# SPDX-License-Identifier: Apache-2.0
"""What an engine says when a checkpoint cannot be served, and what it leaves unquantized on request."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import engines
import pytest
import torch
from conftest import succeed
from safetensors.torch import load_file, save_file
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig

from llm_quant_rocm_vllm.engine_layers import refuse_offloading

DENSE, EXPERT = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"


def put_nan(weight: torch.Tensor) -> torch.Tensor:
    weight[1, 3] = float("nan")
    return weight


# name: (checkpoint, tensor, what becomes of it, what the user reads)
BROKEN: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "NaN": ("dense", DENSE, put_nan, f"{DENSE} holds NaN or inf (in 1 rows)"),
    "NaN in an expert": ("moe", EXPERT, put_nan, f"{EXPERT} holds NaN or inf (in 1 rows)"),
    "integers": ("dense", DENSE, lambda weight: weight.to(torch.int8), f"{DENSE} is torch.int8 in the checkpoint"),
    # vLLM would cut what is too long, and leave the rest of an expert that is too short as memory was.
    "too long": ("dense", DENSE, lambda weight: torch.cat([weight, weight]), f"{DENSE} has shape (128, 128) in the"),
    "an expert too short": ("moe", EXPERT, lambda weight: weight[16:].clone(), f"{EXPERT} has shape (80, 128) in the"),
    # vLLM looks for what is missing in quantized checkpoints alone, and would quantize what was in memory.
    "missing": ("dense", DENSE, lambda weight: None, f"{DENSE} is missing from the checkpoint"),
    "missing in an expert": ("moe", EXPERT, lambda weight: None, f"{EXPERT} is missing from the checkpoint"),
}

# By which vLLM names what is missing beside our layers, of which it asks nothing by itself.
UNQUANTIZED = {"dense": "model.embed_tokens.weight", "moe": "model.layers.1.mlp.gate.weight"}
TRACKED = {"model_loader_extra_config": {"enable_weights_track": True}}
# name: (checkpoint, what is asked for, the option that is refused)
MOVED: dict[str, tuple[str, dict[str, Any], str]] = {
    "moved to the host": ("dense", {"cpu_offload_gb": 1}, "--cpu-offload-gb"),
    "some layers moved": ("dense", {"cpu_offload_gb": 1, "cpu_offload_params": ["down_proj"]}, "--cpu-offload-gb"),
    "experts moved": ("moe", {"cpu_offload_gb": 1, "cpu_offload_params": ["w2_weight"]}, "--cpu-offload-gb"),
    "no quantized layer moved": ("dense", {"cpu_offload_gb": 1, "cpu_offload_params": ["input_layernorm"]}, ""),
}


@pytest.fixture(scope="module")
def answers(folder: Path, dense_checkpoint: Path, moe_checkpoint: Path) -> dict[str, str]:
    """What vLLM says to each checkpoint, by name; "" where it serves it."""
    sound = {"dense": dense_checkpoint, "moe": moe_checkpoint}
    models = {}
    for name, (kind, tensor, change, _) in BROKEN.items():
        models[name] = Path(shutil.copytree(sound[kind], folder / f"bf16 {name}"))
        tensors = load_file(models[name] / "model.safetensors")
        changed = change(tensors.pop(tensor))
        tensors |= {} if changed is None else {tensor: changed}
        save_file(tensors, models[name] / "model.safetensors", metadata={"format": "pt"})
    models["truncated"] = Path(shutil.copytree(dense_checkpoint, folder / "bf16 truncated"))
    file = models["truncated"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    models["quantized"] = Path(shutil.copytree(dense_checkpoint, folder / "fp8"))
    checkpoints.edit_config(
        models["quantized"], quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}
    )
    requests: dict[str, dict[str, object]] = {name: {"model": str(model)} for name, model in models.items()}
    requests |= {f"{kind} without weights": {"model": str(sound[kind]), "load_format": "dummy"} for kind in sound}
    for kind, lacking in UNQUANTIZED.items():
        models[f"{kind} lacking"] = Path(shutil.copytree(sound[kind], folder / f"bf16 {kind} lacking"))
        tensors = load_file(models[f"{kind} lacking"] / "model.safetensors")
        del tensors[lacking]
        save_file(tensors, models[f"{kind} lacking"] / "model.safetensors", metadata={"format": "pt"})
        requests[f"{kind} lacking"] = {"model": str(models[f"{kind} lacking"]), **TRACKED}
        requests[f"{kind} tracked"] = {"model": str(sound[kind]), **TRACKED}
    for name, (kind, settings, _) in MOVED.items():
        requests[name] = {"model": str(sound[kind]), **settings}
    requests["stored by rank"] = {"model": str(dense_checkpoint), "load_format": "sharded_state"}
    return engines.refusals(
        folder / "refusals", {name: {**request, "quantization": "ptpc_fp8"} for name, request in requests.items()}
    )


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tensors_are_named(answers: dict[str, str], name: str) -> None:
    assert BROKEN[name][3] in answers[name]


def test_what_vllm_stored_is_not_read(answers: dict[str, str]) -> None:
    """vLLM ended with a KeyError: it looks for the tensors of a loaded model before the model is loaded."""
    assert "--load-format sharded_state cannot read layers that llm-quant-rocm serves" in answers["stored by rank"]


@pytest.mark.parametrize("kind", UNQUANTIZED)
def test_vllm_names_what_is_missing_beside_our_layers(answers: dict[str, str], kind: str) -> None:
    """Our parameters satisfy its option. Without it a model without a router answers NaN, as in bf16."""
    assert answers[f"{kind} tracked"] == ""
    assert f"not initialized from checkpoint: {{'{UNQUANTIZED[kind]}'}}" in answers[f"{kind} lacking"]


@pytest.mark.parametrize("name", MOVED)
def test_weights_are_not_moved_before_they_are_loaded(answers: dict[str, str], name: str) -> None:
    """torch ended with `Cannot copy out of meta tensor; no data!`."""
    option = MOVED[name][2]
    assert (f"{option} moves weights before they are loaded" if option else "") in answers[name]
    assert bool(answers[name]) == bool(option)


def test_weights_are_not_prefetched_before_they_are_loaded() -> None:
    """vLLM does so on GPUs alone. Of a layer with a weight that is yet to come it does nothing right, whatever part of
    it is chosen."""
    settings: Any = OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=2, offload_params={"norm"}))
    with pytest.raises(ValueError, match="^--offload-group-size moves weights before they are loaded"):
        refuse_offloading(SimpleNamespace(offload_config=settings), "model.layers.0.mlp.down_proj.weight")


def test_broken_files_are_named(answers: dict[str, str]) -> None:
    assert "model.safetensors is truncated: " in answers["truncated"]


def test_a_quantized_checkpoint_is_refused(answers: dict[str, str]) -> None:
    assert "the checkpoint is already quantized (fp8)" in answers["quantized"]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_random_weights_are_served(answers: dict[str, str], kind: str) -> None:
    assert answers[f"{kind} without weights"] == ""


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


@pytest.mark.skipif(not engines.FP8_KV_CACHE, reason="vLLM's KV cache in FP8 wants a CPU with AVX-512")
def test_fp8_kv_cache(dense: engines.Result, dense_checkpoint: Path, tmp_path: Path) -> None:
    result = succeed(engines.run(tmp_path, dense_checkpoint, quantization="ptpc_fp8", kv_cache_dtype="fp8_e4m3"))
    difference = (result.logprobs - dense.logprobs).abs().mean()
    assert 0 < difference < 0.3
