# SPDX-License-Identifier: Apache-2.0
"""Output heads (`lm_head`) that a draft model of speculative decoding shares with its target.

SGLang gives the draft's head the target's `weight` and no method. Of a quantized head that is codes, so they know whose
they are, and the logits are asked of that layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from llm_quant_rocm_sglang.engine_layers import server_arguments

_HEAD = "llm_quant_rocm_head"


def share(layer: torch.nn.Module) -> None:
    """Has `layer`, if it is an output head that is loaded, be found by its weight."""
    if isinstance(layer, ParallelLMHead):
        setattr(layer.weight, _HEAD, layer)


def logits(
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """`LogitsProcessor._compute_lm_head`, of the layer that `lm_head` has its weight from."""
    if isinstance(lm_head, ParallelLMHead):  # and no adapter's around one
        lm_head = getattr(getattr(lm_head, "weight", None), _HEAD, lm_head)
    return original(processor, hidden_states, lm_head, *args, **kwargs)


def refuse_token_map(layer: torch.nn.Module, prefix: str) -> None:
    """Refuse a quantized output head of which SGLang is to give a draft some rows alone.

    Raises:
        ValueError: `layer`, which the checkpoint calls `prefix`, is an output head, and there is a token map.
    """
    if isinstance(layer, ParallelLMHead) and server_arguments().speculative_token_map is not None:
        raise ValueError(
            f"--speculative-token-map takes rows of {prefix}, which is quantized in this checkpoint: serve it without "
            "the map"
        )
