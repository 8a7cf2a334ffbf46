# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter over an NVFP4 checkpoint, against the checkpoint's values in BF16 with the adapter merged in."""

import json
import shutil
from pathlib import Path

import engines
import nvfp4_checkpoints
import torch
from conftest import succeed
from safetensors.torch import load_file, save_file

# Of attention and of the dense layer; experts have projections by these names too, and no adapter.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 8


def test_layers_beside_experts_have_adapters(folder: Path, nvfp4_moe: nvfp4_checkpoints.Quantized) -> None:
    model = nvfp4_moe.write_modelopt(folder / "nvfp4-lora", ignore=("lm_head", "mlp.gate"))
    values = nvfp4_moe.write_values(folder / "nvfp4-lora-values")
    adapter, merged = write_adapter(values, folder / "adapter", folder / "nvfp4-lora-merged")
    options = {"max_lora_rank": RANK, "lora_target_modules": TARGETS}
    served = succeed(engines.run(folder / "nvfp4-lora-run", model, adapter=adapter, **options))
    expected = succeed(engines.run(folder / "nvfp4-lora-merged-run", merged))
    without = succeed(engines.run(folder / "nvfp4-lora-values-run", values))
    # Rounded to BF16 before the adapter is added, and not after.
    assert (served.logprobs - expected.logprobs).abs().mean() < 0.06
    assert (expected.logprobs - without.logprobs).abs().mean() > 0.5


def write_adapter(model: Path, adapter: Path, merged: Path) -> tuple[Path, Path]:
    """The folder of an adapter for TARGETS of the 16-bit checkpoint `model`, and `model` with it merged."""
    generator = torch.Generator().manual_seed(0)
    tensors, adapters = load_file(model / "model.safetensors"), {}
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] not in TARGETS or ".experts." in layer:
            continue
        rows, columns = weight.shape
        a = (torch.randn(RANK, columns, generator=generator) / columns**0.5).bfloat16()
        b = (torch.randn(rows, RANK, generator=generator) / RANK**0.5).bfloat16()
        adapters[f"base_model.model.{layer}.lora_A.weight"] = a
        adapters[f"base_model.model.{layer}.lora_B.weight"] = b
        tensors[name] = (weight.float() + b.float() @ a.float()).bfloat16()
    adapter.mkdir()
    save_file(adapters, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": TARGETS}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    shutil.copytree(model, merged, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    return adapter, merged
