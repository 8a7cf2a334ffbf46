# SPDX-License-Identifier: Apache-2.0
"""What vLLM's user reads, before any token is served, when an NVFP4 checkpoint is broken."""

import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoints
import engines
import nvfp4_checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

ATTENTION = "model.layers.1.self_attn"
EXPERT = "model.layers.1.mlp.experts.3"

Change = Callable[[dict[str, torch.Tensor]], None]


def put(tensor: str, value: float) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        # Through fp32: torch assigns no value to an element of FP8.
        changed = tensors[tensor].float()
        changed.view(-1)[5 % changed.numel()] = value
        tensors[tensor] = changed.to(tensors[tensor].dtype)

    return change


def drop(tensor: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[tensor]

    return change


def replace(tensor: str, by: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({tensor: by(tensors[tensor]).contiguous()})


def unquantize(layer: str) -> Change:
    """The layer in BF16, which compressed-tensors calls by another name than codes."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        packed = tensors.pop(f"{layer}.weight_packed")
        for name in ("weight_scale", "weight_global_scale", "input_global_scale"):
            del tensors[f"{layer}.{name}"]
        tensors[f"{layer}.weight"] = torch.zeros(packed.shape[0], packed.shape[1] * 2, dtype=torch.bfloat16)

    return change


# name: (format, what is changed, what the user reads)
BROKEN: dict[str, tuple[str, Change, str]] = {
    "negative scale": (
        "modelopt",
        put(f"{ATTENTION}.k_proj.weight_scale", -1.0),
        f"{ATTENTION}.k_proj.weight_scale holds 1 negative block scales",
    ),
    "NaN scale": (
        "compressed-tensors",
        put(f"{ATTENTION}.v_proj.weight_scale", torch.nan),
        f"{ATTENTION}.v_proj.weight_scale holds 1 NaN block scales",
    ),
    "zero global scale": (
        "modelopt",
        put("model.layers.0.mlp.up_proj.weight_scale_2", 0.0),
        "model.layers.0.mlp.up_proj.weight_scale_2 is 0",
    ),
    "infinite divisor": (
        "compressed-tensors",
        put("model.layers.0.mlp.down_proj.weight_global_scale", torch.inf),
        "model.layers.0.mlp.down_proj.weight_global_scale is inf",
    ),
    "no global scale of one shard": (
        "modelopt",
        drop(f"{ATTENTION}.k_proj.weight_scale_2"),
        f"{ATTENTION}.k_proj.weight_scale_2 is missing from the checkpoint",
    ),
    "no global scale": (
        "compressed-tensors",
        drop(f"{ATTENTION}.o_proj.weight_global_scale"),
        f"{ATTENTION}.o_proj.weight_global_scale is missing from the checkpoint",
    ),
    "no codes of one shard": (
        "compressed-tensors",
        drop("model.layers.0.mlp.gate_proj.weight_packed"),
        "model.layers.0.mlp.gate_proj.weight_packed is missing from the checkpoint",
    ),
    "too many rows": (
        "modelopt",
        replace(f"{ATTENTION}.q_proj.weight", lambda codes: codes.repeat(2, 1)),
        f"{ATTENTION}.q_proj.weight has shape (256, 64) in the checkpoint; the model's configuration needs (128, 64)",
    ),
    "too few columns": (
        "compressed-tensors",
        replace("model.layers.0.mlp.down_proj.weight_scale", lambda scale: scale[:, ::2]),
        "model.layers.0.mlp.down_proj.weight_scale has shape (128, 11) in the checkpoint",
    ),
    "a layer in BF16 that no list ignores": (
        "modelopt",
        replace(f"{ATTENTION}.o_proj.weight", lambda codes: torch.zeros(128, 128, dtype=torch.bfloat16)),
        f"{ATTENTION}.o_proj.weight is torch.bfloat16 in the checkpoint",
    ),
    "a layer in BF16 that no list ignores, compressed-tensors": (
        "compressed-tensors",
        unquantize(f"{ATTENTION}.k_proj"),
        f"{ATTENTION}.k_proj.weight is torch.bfloat16 in the checkpoint",
    ),
    "an expert in BF16 that no list ignores, compressed-tensors": (
        "moe, compressed-tensors",
        unquantize(f"{EXPERT}.up_proj"),
        f"{EXPERT}.up_proj.weight is torch.bfloat16 in the checkpoint",
    ),
    "global scale with several values": (
        "modelopt",
        replace(f"{ATTENTION}.o_proj.weight_scale_2", lambda scale: scale * torch.arange(1, 5)),
        f"{ATTENTION}.o_proj.weight_scale_2 has shape (4,)",
    ),
    "negative scale of an expert": (
        "moe",
        put(f"{EXPERT}.up_proj.weight_scale", -2.0),
        f"{EXPERT}.up_proj.weight_scale holds 1 negative block scales",
    ),
    "zero global scale of an expert": (
        "moe",
        put(f"{EXPERT}.down_proj.weight_scale_2", 0.0),
        f"{EXPERT}.down_proj.weight_scale_2 is 0",
    ),
    "no global scale of an expert": (
        "moe",
        drop(f"{EXPERT}.gate_proj.weight_scale_2"),
        f"{EXPERT}.gate_proj.weight_scale_2 is missing from the checkpoint",
    ),
    "shape of an expert": (
        "moe",
        replace(f"{EXPERT}.gate_proj.weight", lambda codes: codes[:80]),
        f"{EXPERT}.gate_proj.weight has shape (80, 64) in the checkpoint; the model's configuration needs (96, 64)",
    ),
}
# What is wrong with a configuration or a file: the words that the user reads.
OTHERS = {
    "unknown algorithm": "quant_algo NVFP4_SVD is not known",
    "group size": "NVFP4 has group_size 32, and NVFP4 has blocks of 16",
    "truncated": "is the first of 1 tensors that are cut off",
    "NVFP4 activations without scales": "input_scale is missing from the checkpoint, and activations in NVFP4 need it",
    "NVFP4 activations, compiled": "experts with activations in NVFP4 cannot be compiled: add --enforce-eager",
    "classifier of a head": "lm_head is quantized, and classifier_from_token makes a classifier of its rows in 16 bits",
    "stored by rank": "--load-format sharded_state cannot read layers that llm-quant-rocm serves",
}


@pytest.fixture(scope="module")
def answers(
    folder: Path,
    nvfp4_modelopt: Path,
    nvfp4_dense: nvfp4_checkpoints.Quantized,
    nvfp4_moe: nvfp4_checkpoints.Quantized,
) -> dict[str, str]:
    """What vLLM says to each checkpoint, by name; "" where it serves it."""
    sound = {
        "modelopt": nvfp4_modelopt,
        "compressed-tensors": nvfp4_dense.write_compressed_tensors(folder / "sound-ct", activations=True),
        "moe": nvfp4_moe.write_modelopt(folder / "sound-moe", ignore=("lm_head", "mlp.gate")),
        "moe, compressed-tensors": nvfp4_moe.write_compressed_tensors(
            folder / "sound-moe-ct", activations=True, ignore=("lm_head", "mlp.gate")
        ),
    }
    models = dict(sound)
    for name, (kind, change, _) in BROKEN.items():
        models[name] = Path(shutil.copytree(sound[kind], folder / f"broken {name}"))
        tensors = load_file(models[name] / "model.safetensors")
        change(tensors)
        save_file(tensors, models[name] / "model.safetensors", metadata={"format": "pt"})
    models["unknown algorithm"] = nvfp4_dense.write_modelopt(folder / "broken algorithm", "NVFP4_SVD")
    models["group size"] = nvfp4_dense.write_modelopt(folder / "broken group size", group_size=32)
    models["truncated"] = Path(shutil.copytree(nvfp4_modelopt, folder / "broken file"))
    file = models["truncated"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for name, algorithm in (
        ("NVFP4 activations without scales", "W4A16_NVFP4"),
        ("NVFP4 activations, compiled", "NVFP4"),
    ):
        models[name] = nvfp4_moe.write_modelopt(
            folder / f"broken {name}", algorithm, ignore=("lm_head", "mlp.gate"), activations="nvfp4"
        )
    requests: dict[str, dict[str, object]] = {name: {"model": str(model)} for name, model in models.items()}
    requests["NVFP4 activations, compiled"]["enforce_eager"] = False
    requests["stored by rank"] = {"model": str(nvfp4_modelopt), "load_format": "sharded_state"}
    head = {"model": str(nvfp4_dense.write_modelopt(folder / "nvfp4-head", ignore=())), "runner": "pooling"}
    classifier = {"architectures": ["LlamaForSequenceClassification"], "method": "from_2_way_softmax"}
    requests["embeds without its head"] = {**head, "convert": "embed"}
    requests["classifier of a head"] = {**head, "hf_overrides": {**classifier, "classifier_from_token": ["a", "b"]}}
    for kind in sound:
        requests[f"{kind} without weights"] = {**requests[kind], "load_format": "dummy"}
        # By which vLLM names what is missing beside our layers: theirs must all count as loaded.
        requests[f"{kind} tracked"] = {**requests[kind], "model_loader_extra_config": {"enable_weights_track": True}}
    return engines.refusals(folder / "nvfp4-refusals", requests)


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors", "moe", "moe, compressed-tensors"])
@pytest.mark.parametrize("weights", ["", " without weights", " tracked"])
def test_sound_checkpoints_are_served(answers: dict[str, str], kind: str, weights: str) -> None:
    assert answers[kind + weights] == ""


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tensors_are_named(answers: dict[str, str], name: str) -> None:
    assert BROKEN[name][2] in answers[name]


@pytest.mark.parametrize("name", OTHERS)
def test_other_refusals(answers: dict[str, str], name: str) -> None:
    assert OTHERS[name] in answers[name]


def test_a_quantized_head_is_not_asked_for_where_vllm_loads_none(answers: dict[str, str]) -> None:
    """It was said to be missing from the checkpoint."""
    assert answers["embeds without its head"] == ""


def test_blocks_that_tensor_parallelism_would_cut(folder: Path) -> None:
    source = checkpoints.dense(folder / "ragged", intermediate_size=336)
    model = nvfp4_checkpoints.Quantized(source).write_modelopt(folder / "nvfp4-ragged")
    result = engines.run(folder / "nvfp4-ragged-run", model, tensor_parallel_size=2)
    assert result.returncode != 0
    # Two workers said so, the engine and its front end then failed: it is said again below (last_line.py), where only
    # Python's tracker of shared memory may write after it, two lines for each thing that the workers left.
    lines = [line for line in result.log.splitlines() if "resource_tracker" not in line]
    said_last = [line for line in lines[-8:] if line.startswith("llm-quant-rocm: ")]
    assert len(said_last) == 1
    assert "model.layers.0.mlp.down_proj has 168 of 336 input features on each of 2 ranks" in said_last[0]
