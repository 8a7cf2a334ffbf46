# SPDX-License-Identifier: Apache-2.0
"""The layers of a model, from its config.json."""

from typing import Any

import pytest

from llm_quant_rocm.tune.shapes import WELL_KNOWN, WELL_KNOWN_EXPERTS, experts_of_model, of_model

LLAMA: dict[str, Any] = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
QWEN_MOE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768, "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
}  # fmt: skip


def test_well_known_models_come_out_of_their_configs() -> None:
    assert {f"llama-{layer}": shape for layer, shape in of_model(LLAMA, 1).items()}.items() <= WELL_KNOWN.items()
    assert of_model(QWEN_MOE, 1) == {"qkv": WELL_KNOWN["qwen3-qkv"], "o": WELL_KNOWN["qwen3-o"]}
    deepseek = of_model(DEEPSEEK, 1)
    for layer in ("qkv_a", "q_b", "o", "shared_down"):
        assert deepseek[layer] == WELL_KNOWN[f"deepseek-{layer}"]
    assert deepseek["kv_b"] == (32768, 512)
    assert (deepseek["gate_up"], deepseek["down"]) == ((36864, 7168), (7168, 18432))


def test_ranks_cut_columns_or_rows() -> None:
    assert of_model(LLAMA, 8) == {"qkv": (1280, 8192), "o": (8192, 1024), "gate_up": (7168, 8192), "down": (8192, 3584)}
    # 16 ranks share 8 key heads in pairs.
    assert of_model(LLAMA, 16)["qkv"] == ((4 + 2) * 128, 8192)
    assert of_model(DEEPSEEK, 8)["qkv_a"] == (2112, 7168), "every rank has it whole"
    assert of_model(DEEPSEEK, 8)["o"] == (7168, 2048)


def test_experts_are_cut_over_all_ranks() -> None:
    experts = {"num_experts_per_tok": 8}
    assert experts_of_model(QWEN_MOE | experts, 1) == {"experts": WELL_KNOWN_EXPERTS["qwen3-30b-a3b"]}
    assert experts_of_model(DEEPSEEK | experts, 8) == {"experts": WELL_KNOWN_EXPERTS["deepseek-v3/8"]}
    mixtral = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert experts_of_model({"text_config": mixtral}, 1) == {"experts": WELL_KNOWN_EXPERTS["mixtral-8x7b"]}
    assert experts_of_model(LLAMA, 1) == {}
    with pytest.raises(ValueError, match="3 ranks cannot share 2048 columns of the experts"):
        experts_of_model(DEEPSEEK | experts, 3)
    with pytest.raises(ValueError, match="config.json has no num_experts_per_tok"):
        experts_of_model(QWEN_MOE, 1)


def test_a_model_within_a_model() -> None:
    assert of_model({"vision_config": {}, "text_config": LLAMA}, 2) == of_model(LLAMA, 2)


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        ({}, 1, "config.json has no hidden_size"),
        (LLAMA, 3, "3 ranks cannot share 64 attention heads"),
        (LLAMA | {"num_key_value_heads": 6}, 4, "4 ranks cannot share 6 key heads"),
        (LLAMA | {"intermediate_size": 28671}, 2, "2 ranks cannot share 28671 columns of the MLP"),
    ],
    ids=["empty", "heads", "keys", "mlp"],
)
def test_models_that_cannot_be_cut(config: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_model(config, ranks)
