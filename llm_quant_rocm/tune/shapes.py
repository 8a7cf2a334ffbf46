# SPDX-License-Identifier: Apache-2.0
"""The weights that engines multiply by, dense [N, K] and of routed experts: of well-known models, and of a model's
config.json."""

from collections.abc import Mapping
from functools import partial
from typing import Any

# One rank's layers of Llama-3-70B, Qwen3-30B-A3B and DeepSeek-V3.
WELL_KNOWN = {
    "llama-qkv": (10240, 8192),
    "llama-o": (8192, 8192),
    "llama-gate_up": (57344, 8192),
    "llama-down": (8192, 28672),
    "qwen3-qkv": (5120, 2048),
    "qwen3-o": (2048, 4096),
    "deepseek-qkv_a": (2112, 7168),
    "deepseek-q_b": (24576, 1536),
    "deepseek-kv_b": (32768, 512),
    "deepseek-o": (7168, 16384),
    "deepseek-shared_gate_up": (4096, 7168),
    "deepseek-shared_down": (7168, 2048),
    "deepseek-gate_up": (36864, 7168),
    "deepseek-down": (7168, 18432),
}
# (experts, top-k, hidden, inner) of Qwen3-30B-A3B, of DeepSeek-V3 cut over eight ranks, and of Mixtral 8x7B.
WELL_KNOWN_EXPERTS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3/8": (256, 8, 7168, 256),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}


def of_model(config: Mapping[str, Any], ranks: int) -> dict[str, tuple[int, int]]:
    """One rank's dense weights of a decoder, as engines fuse and cut them: routed experts are not among them.

    Args:
        config: config.json of a Hugging Face model.
        ranks: the tensor-parallel size.

    Raises:
        ValueError: a field is missing, or the ranks cannot share the model.
    """
    config = config.get("text_config") or config
    field, share = partial(_field, config), partial(_share, ranks)
    hidden, heads = field("hidden_size"), field("num_attention_heads")
    mine = share(heads, "attention heads")
    layers: dict[str, tuple[int, int]] = {}
    if config.get("kv_lora_rank"):
        rope, nope, value = field("qk_rope_head_dim"), field("qk_nope_head_dim"), field("v_head_dim")
        rank = config.get("q_lora_rank")
        if rank:
            layers["qkv_a"] = (rank + field("kv_lora_rank") + rope, hidden)
            layers["q_b"] = (mine * (nope + rope), rank)
        else:
            layers["q"] = (mine * (nope + rope), hidden)
            layers["kv_a"] = (field("kv_lora_rank") + rope, hidden)
        layers["kv_b"] = (mine * (nope + value), field("kv_lora_rank"))
        layers["o"] = (hidden, mine * value)
    else:
        head = config.get("head_dim") or hidden // heads
        keys = config.get("num_key_value_heads") or heads
        # Ranks beyond the number of key heads share them.
        mine_keys = 1 if ranks >= keys and ranks % keys == 0 else share(keys, "key heads")
        layers["qkv"] = ((mine + 2 * mine_keys) * head, hidden)
        layers["o"] = (hidden, mine * head)
    dense = not _experts(config) or config.get("first_k_dense_replace") or config.get("mlp_only_layers")
    if dense:
        layers |= _mlp("", share(field("intermediate_size"), "columns of the MLP"), hidden)
    shared = config.get("shared_expert_intermediate_size") or (
        (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    )
    if shared:
        layers |= _mlp("shared_", share(shared, "columns of the shared experts"), hidden)
    return layers


def experts_of_model(config: Mapping[str, Any], ranks: int) -> dict[str, tuple[int, int, int, int]]:
    """One rank's routed experts (experts, top-k, hidden, inner), every expert cut over all ranks; none of a dense
    model.

    Args and Raises: those of `of_model`.
    """
    config = config.get("text_config") or config
    experts = _experts(config)
    if not experts:
        return {}
    inner = config.get("moe_intermediate_size") or _field(config, "intermediate_size")
    inner = _share(ranks, inner, "columns of the experts")
    return {"experts": (experts, _field(config, "num_experts_per_tok"), _field(config, "hidden_size"), inner)}


def _experts(config: Mapping[str, Any]) -> int:
    """How many routed experts a layer has; 0 of a dense model."""
    return config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0


def _field(config: Mapping[str, Any], name: str) -> int:
    if not isinstance(config.get(name), int):
        raise ValueError(f"config.json has no {name}: tune for the well-known models, without --model")
    return config[name]


def _share(ranks: int, count: int, what: str) -> int:
    if count % ranks:
        raise ValueError(f"{ranks} ranks cannot share {count} {what}: take another --tp")
    return count // ranks


def _mlp(prefix: str, inner: int, hidden: int) -> dict[str, tuple[int, int]]:
    return {f"{prefix}gate_up": (2 * inner, hidden), f"{prefix}down": (hidden, inner)}
