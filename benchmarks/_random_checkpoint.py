# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a model's shape with random NVFP4 weights, written at the speed of the disk: nothing is quantized.

Codes are uniform, block scales are in E4M3's upper two octaves, and global scales give rows of unit gain, so that
activations stay finite and no kernel meets zeros. The tensors are those of ModelOpt's W4A16_NVFP4, of
compressed-tensors, or what they decode to in bf16: the same model, for the same seed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llm_quant_rocm.checkpoint.layouts import LAYOUTS
from llm_quant_rocm.formats.nvfp4 import BLOCK, NvFp4Weight

_NORMS = ("input_layernorm", "post_attention_layernorm")
_SCALES = 0x70, 0x7E  # the bytes of 128 and 448
# Root mean squares of the values of uniform E2M1 codes, and of uniform bytes between _SCALES as E4M3.
_RMS_OF_CODES, _RMS_OF_SCALES = 2.93, 280.0


def write(folder: Path, config: dict[str, Any], layout: str, device: str = "cuda") -> None:
    """Write config.json and a file a layer to `folder`, for a Llama or Qwen3-MoE `config` (of transformers).

    Args:
        layout: one of `checkpoint.layouts.LAYOUTS`, or "" for bf16.
    """
    folder.mkdir()
    torch.manual_seed(0)
    hidden, head = config["hidden_size"], config["head_dim"]
    moe = "num_experts" in config
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    kept = ["model.embed_tokens", "lm_head"]
    ends = {
        "model.embed_tokens.weight": _dense(config["vocab_size"], hidden, device) * hidden**0.5,
        "lm_head.weight": _dense(config["vocab_size"], hidden, device),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    save_file(ends, folder / "ends.safetensors", metadata={"format": "pt"})
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        tensors = {f"{layer}.{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in _NORMS}
        linear = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
        }
        if moe:
            kept.append(f"{layer}.mlp.gate")
            tensors[f"{layer}.mlp.gate.weight"] = _dense(config["num_experts"], hidden, device)
            tensors |= {
                f"{layer}.self_attn.{name}.weight": torch.ones(head, dtype=torch.bfloat16)
                for name in ("q_norm", "k_norm")
            }
            for expert in range(config["num_experts"]):
                linear |= _mlp(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        else:
            linear |= _mlp("mlp", hidden, config["intermediate_size"])
        for name, (n, k) in linear.items():
            weight = _weight(n, k, device)
            parts = LAYOUTS[layout].weight(weight) if layout else {"weight": weight.dequantize(torch.bfloat16)}
            tensors |= {f"{layer}.{name}.{part}": tensor.cpu() for part, tensor in parts.items()}
        save_file(tensors, folder / f"layer-{number}.safetensors", metadata={"format": "pt"})
    describe(folder, config, kept, layout)


def describe(folder: Path, config: dict[str, Any], kept: Sequence[str], layout: str) -> None:
    """Write the files beside the tensors: config.json, and what else the layout has. `kept` modules are in bf16."""
    files = LAYOUTS[layout].describe(config, kept, False) if layout else {"config.json": config}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def _mlp(name: str, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    return {
        f"{name}.gate_proj": (inner, hidden),
        f"{name}.up_proj": (inner, hidden),
        f"{name}.down_proj": (hidden, inner),
    }


def _dense(n: int, k: int, device: str) -> torch.Tensor:
    return (torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5).cpu()


def _weight(n: int, k: int, device: str) -> NvFp4Weight:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(_SCALES[0], _SCALES[1] + 1, (n, k // BLOCK), dtype=torch.uint8, device=device)
    global_scale = torch.full((n,), 1 / (_RMS_OF_CODES * _RMS_OF_SCALES * k**0.5), device=device)
    return NvFp4Weight(codes, scales.view(torch.float8_e4m3fn), global_scale)
