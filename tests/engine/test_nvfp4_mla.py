# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V3 in NVFP4 without a flag, against its own values in BF16."""

from pathlib import Path

import checkpoints
import engines
import nvfp4_checkpoints
import torch
from conftest import succeed

# What vLLM fuses is named by its shards, with wildcards; kv_a_proj_with_mqa is not quantized by the writer.
IGNORE = ("lm_head", "mlp.gate", "q_a_proj", "kv_a_proj_with_mqa")


def test_latent_attention_and_shared_experts(folder: Path) -> None:
    quantized = nvfp4_checkpoints.Quantized(checkpoints.mla(folder / "mla"))
    # Attention multiplies this layer's weight into others: it reads the weight by serving an identity matrix.
    assert "model.layers.0.self_attn.kv_b_proj" in quantized.layers
    model = quantized.write_modelopt(folder / "nvfp4-mla", ignore=IGNORE)
    result = succeed(engines.run(folder / "nvfp4-mla-run", model))
    values = quantized.write_values(folder / "nvfp4-mla-values")
    expected = succeed(engines.run(folder / "nvfp4-mla-values-run", values))
    assert (result.logprobs - expected.logprobs).abs().mean() < 0.03
    assert "10 linear layers" in result.log
    assert "1 mixture-of-experts layers" in result.log
    weights = result.weights[0]
    # By their scales: where CPUs have AMX, vLLM packs some weights into its own layout and leaves none behind.
    assert "model.layers.0.self_attn.fused_qkv_a_proj.weight_scale" not in weights
    assert weights["model.layers.0.self_attn.kv_b_proj.weight_scale"].dtype == torch.uint8
