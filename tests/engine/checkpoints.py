# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights and a byte tokenizer, made on the fly: no test here downloads anything."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SPECIAL = ("<bos>", "<eos>")
_VOCABULARY = len(_SPECIAL) + 256


def dense(path: Path, dtype: torch.dtype = torch.bfloat16, **settings: object) -> Path:
    """A Llama with an untied `lm_head`, about 0.6 million parameters unless `settings` say otherwise."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=_VOCABULARY, max_position_embeddings=256, **{**sizes, **settings})
    return _save(LlamaForCausalLM(config), path, dtype)


def moe(path: Path, dense_layers: tuple[int, ...] = (0,), inner: int = 96) -> Path:
    """A Qwen3-MoE of two layers. `dense_layers` have a dense MLP, the others 8 experts with `inner` features, 2 a
    token."""
    config = Qwen3MoeConfig(
        vocab_size=_VOCABULARY,
        max_position_embeddings=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=list(dense_layers),
        norm_topk_prob=True,
    )
    return _save(Qwen3MoeForCausalLM(config), path, torch.bfloat16)


def mla(path: Path) -> Path:
    """A DeepSeek-V3: attention over a latent of the width that vLLM asks for, and a second layer with 8 experts in 2
    groups, 2 a token, beside a shared one."""
    config = DeepseekV3Config(
        vocab_size=_VOCABULARY,
        max_position_embeddings=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
    )
    _save(DeepseekV3ForCausalLM(config), path, torch.bfloat16)
    edit_config(path, topk_method="noaux_tc")  # which transformers takes for granted, and vLLM looks up
    return path


def edit_config(path: Path, **settings: object) -> None:
    """Set keys of a checkpoint's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def _save(model: PreTrainedModel, path: Path, dtype: torch.dtype) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Large enough that logits are not flat: a small error then moves a logprob little.
            std = 1.5 / parameter.shape[-1] ** 0.5 if "embed" not in name else 1.0
            parameter.data.normal_(0.0, std, generator=generator)
    model.to(dtype).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
