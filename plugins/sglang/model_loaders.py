# SPDX-License-Identifier: Apache-2.0
"""Models of SGLang that do to a checkpoint's tensors, before our layers get them, what NVFP4's do not stand."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from llm_quant_rocm.checkpoint.nvfp4_kinds import NAME
from llm_quant_rocm_sglang.nvfp4 import JOINED


def checkpoint_tensors(
    original: Callable[..., Iterable[tuple[str, torch.Tensor]]], loader: Any, model_config: Any, model: torch.nn.Module
) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, tensor) of a checkpoint, as SGLang hands them to `model`. GLM-4.7-Flash's joins scalars too, which need a
    dimension for it: our layers take equal ones."""
    tensors = original(loader, model_config, model)
    if model_config.quantization != NAME or not type(model).__name__.startswith("Glm4MoeLite"):
        return tensors
    joined = tuple(f".{layer}." for layer in JOINED)
    return (
        (name, tensor.reshape(1) if tensor.dim() == 0 and any(layer in name for layer in joined) else tensor)
        for name, tensor in tensors
    )
