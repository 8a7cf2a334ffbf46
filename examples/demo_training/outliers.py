# SPDX-License-Identifier: Apache-2.0
"""Rescalings that leave a Llama's function as it is and make its numbers as uneven as those of large models.

Large models carry activations of a few channels that are far above the rest, and weight rows of very different size.
Training a small model for minutes does not grow them, so they are put in by hand. Every factor is a power of two:
BF16 values only change their exponents and the function is the same up to the order of rounding.
"""

from collections.abc import Iterable

import torch
from transformers import LlamaForCausalLM


@torch.no_grad()
def scale_channels(
    norm: torch.nn.Module, linears: Iterable[torch.nn.Linear], channels: torch.Tensor, factor: float
) -> None:
    """Make ``channels`` of a norm's output ``factor`` times larger and undo it in the linears that read it.

    Args:
        norm: an RMSNorm with ``weight`` [hidden].
        linears: all linears that read the norm's output, ``weight`` [out, hidden].
        channels: int64 indices into hidden.
        factor: a power of two.
    """
    norm.weight[channels] *= factor
    for linear in linears:
        linear.weight[:, channels] /= factor


@torch.no_grad()
def scale_queries(query: torch.nn.Linear, key: torch.nn.Linear, factor: float) -> None:
    """Make all queries ``factor`` times larger and all keys smaller: their products, and so attention, stay.

    Whole projections are scaled, so rotary embedding, which mixes pairs of rows, commutes with it.
    """
    query.weight *= factor
    key.weight /= factor


@torch.no_grad()
def sparse_channels(model: LlamaForCausalLM, ids: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """For every norm before linears, the ``count`` channels that are large for few tokens and small for most.

    The largest magnitude over the tokens, over the mean magnitude, ranks the channels of a norm's output.

    Args:
        ids: int64 [sequences, tokens], text the model knows.

    Returns:
        name of the norm -> int64 [count].
    """
    norms = {
        name: module
        for name, module in model.named_modules()
        if name.endswith(("input_layernorm", "post_attention_layernorm"))
    }
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: outputs.__setitem__(name, output))
        for name, module in norms.items()
    ]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    chosen = {}
    for name, output in outputs.items():
        magnitude = output.flatten(0, 1).abs().float()
        chosen[name] = (magnitude.amax(0) / magnitude.mean(0)).topk(count).indices
    return chosen


def add_outliers(
    model: LlamaForCausalLM, ids: torch.Tensor, *, channels: int, channel_factor: float, query_factor: float
) -> None:
    """Give every layer ``channels`` outlier channels behind both norms, and queries far larger than keys.

    Args:
        ids: int64 [sequences, tokens], text that decides which channels are scaled (see ``sparse_channels``).
        channel_factor, query_factor: powers of two.
    """
    chosen = sparse_channels(model, ids, channels)
    for index, layer in enumerate(model.model.layers):
        attention, mlp, prefix = layer.self_attn, layer.mlp, f"model.layers.{index}"
        scale_channels(
            layer.input_layernorm,
            (attention.q_proj, attention.k_proj, attention.v_proj),
            chosen[f"{prefix}.input_layernorm"],
            channel_factor,
        )
        scale_channels(
            layer.post_attention_layernorm,
            (mlp.gate_proj, mlp.up_proj),
            chosen[f"{prefix}.post_attention_layernorm"],
            channel_factor,
        )
        scale_queries(attention.q_proj, attention.k_proj, query_factor)
