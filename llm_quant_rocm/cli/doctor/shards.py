# SPDX-License-Identifier: Apache-2.0
"""How engines cut a model's layers for tensor parallelism, by the names that Hugging Face's models give them."""

import math
import re
from collections.abc import Iterator
from typing import Any

from llm_quant_rocm.checkpoint.online_layers import is_router
from llm_quant_rocm.checkpoint.survey import Module

# Layers whose inputs are cut: they follow one whose outputs are. All others have their outputs cut, but for those of
# latent attention that every rank has whole.
_INPUT_CUT = {"o_proj", "down_proj", "w2", "out_proj", "dense_4h_to_h", "c_proj", "fc2", "wo"}
_WHOLE = {"q_a_proj", "kv_a_proj_with_mqa"}
_KEYS = {"k_proj", "v_proj"}
_VOCABULARY = {"embed_tokens", "lm_head"}
_VOCABULARY_PADDING = 64


class Shards:
    """One rank's share of a model's layers.

    Args:
        config: the model's config.json.
        ranks: the tensor-parallel size.
    """

    def __init__(self, config: dict[str, Any], ranks: int) -> None:
        self._config = config.get("text_config") or config
        self.ranks = ranks

    def refusals(self) -> Iterator[str]:
        """Why engines cannot share the attention heads among so many ranks."""
        for what, beyond in (("num_attention_heads", False), ("num_key_value_heads", True)):
            heads = self._config.get(what)
            if not heads or heads % self.ranks == 0 or (beyond and self.ranks % heads == 0):
                continue
            kind = what.removeprefix("num_").replace("_", " ")
            yield (
                f"{heads} {kind} cannot be shared by {self.ranks} ranks: take a tensor-parallel size that divides them"
            )

    def refusal(self, module: Module) -> str | None:
        """Why engines cannot share a linear layer among so many ranks, or None."""
        whole, share = self._padded(module), self.shape(module)
        if math.prod(whole) in (math.prod(share), math.prod(share) * self.ranks):
            return None
        axis = next(axis for axis, size in enumerate(share) if size != whole[axis])
        features = "input" if axis == len(share) - 1 else "output"
        return (
            f"{pattern(module.name)} has {whole[axis]} {features} features, which {self.ranks} ranks cannot share: "
            "take a tensor-parallel size that divides them"
        )

    def shape(self, module: Module) -> tuple[int, ...]:
        """The shape of a rank's share of the weight; rounded up where it cannot be shared."""
        whole, leaf = self._padded(module), module.name.rpartition(".")[2]
        if len(whole) < 2 or leaf in _WHOLE or is_router(module.name):
            return module.shape
        *leading, n, k = whole
        return (*leading, n, -(-k // self.ranks)) if leaf in _INPUT_CUT else (*leading, -(-n // self.ranks), k)

    def _padded(self, module: Module) -> tuple[int, ...]:
        """The shape of the weight on all ranks together: vocabularies are padded, and ranks beyond the number of key
        heads share them."""
        heads, leaf = self._config.get("num_key_value_heads"), module.name.rpartition(".")[2]
        if len(module.shape) != 2:
            return module.shape
        n, k = module.shape
        if leaf in _VOCABULARY:
            return -(-n // _VOCABULARY_PADDING) * _VOCABULARY_PADDING, k
        return (n * self.ranks // heads, k) if leaf in _KEYS and heads and self.ranks > heads else (n, k)


def pattern(name: str) -> str:
    """A module's name with `*` for the numbers in it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
