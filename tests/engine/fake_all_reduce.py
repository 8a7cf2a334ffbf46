# SPDX-License-Identifier: Apache-2.0
"""What a model served by two ranks should compute: the checkpoint in transformers, in fp32, with the quantized
all-reduce emulated by its reference."""

from pathlib import Path

import fake_quantized
import torch
from torch import nn

from llm_quant_rocm.formats.wire import Codec
from llm_quant_rocm.reference.quick_reduce import two_shot


def change(checkpoint: Path, prompts: list[list[int]], codec: Codec) -> torch.Tensor:
    """What `codec` should do to the logprobs of all prompts' tokens, in one row."""
    model = fake_quantized.load(checkpoint)
    exact = fake_quantized.logprobs(model, prompts)
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.forward = _RowParallel(module, codec)
        elif isinstance(module, nn.Embedding):
            module.forward = _Embedding(module, codec)
    return fake_quantized.logprobs(model, prompts) - exact


class _RowParallel:
    """A layer whose inputs are sharded over two ranks."""

    def __init__(self, module: nn.Linear, codec: Codec) -> None:
        self.shards, self.codec = module.weight.data.chunk(2, dim=1), codec

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = [part @ shard.t() for part, shard in zip(x.chunk(2, dim=-1), self.shards, strict=True)]
        return _sum(parts, self.codec)


class _Embedding:
    """An embedding whose tokens are sharded: the rank that lacks one adds zeros."""

    def __init__(self, module: nn.Embedding, codec: Codec) -> None:
        self.weight, self.codec = module.weight.data, codec

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.weight[ids]
        return _sum([rows, torch.zeros_like(rows)], self.codec)


def _sum(parts: list[torch.Tensor], codec: Codec) -> torch.Tensor:
    return two_shot([part.bfloat16() for part in parts], codec).float()
