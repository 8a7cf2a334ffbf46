# SPDX-License-Identifier: Apache-2.0
"""Models of SGLang that do to a checkpoint's tensors, before our layers get them, what NVFP4's do not stand."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from llm_quant_rocm.checkpoint.nvfp4_kinds import NAME
from llm_quant_rocm_sglang.engine_layers import JOINED


def checkpoint_tensors(
    original: Callable[..., Iterable[tuple[str, torch.Tensor]]], loader: Any, model_config: Any, model: Any
) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, tensor) of a checkpoint, as SGLang hands them to `model`. GLM-4.7-Flash's joins scalars too, which need a
    dimension for it: our layers take equal ones. Llama-4's reorders rows, and gets a method that knows packed ones."""
    tensors = original(loader, model_config, model)
    if model_config.quantization != NAME:
        return tensors
    if reorder := getattr(model, "permute_qk_weight_for_rotary", None):
        model.permute_qk_weight_for_rotary = partial(reorder_rows, reorder, model.language_model.config.hidden_size)
    if not type(model).__name__.startswith("Glm4MoeLite"):
        return tensors
    joined = tuple(f".{layer}." for layer in JOINED)
    return (
        (name, tensor.reshape(1) if tensor.dim() == 0 and any(layer in name for layer in joined) else tensor)
        for name, tensor in tensors
    )


def reorder_rows(
    reorder: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]], hidden: int, name: str, tensor: torch.Tensor
) -> tuple[str, torch.Tensor]:
    """(name, tensor) with rows of q and k in SGLang's order. `reorder` knows it of weights [N, hidden] alone, and
    NVFP4's codes and scales have N rows of their own length."""
    parts = name.split(".")
    if tensor.dim() != 2 or tensor.shape[1] == hidden or not {"q_proj", "k_proj"}.intersection(parts):
        return reorder(name, tensor)
    rows = torch.arange(tensor.shape[0], device=tensor.device)[:, None].expand(-1, hidden)
    _, order = reorder(".".join((*parts[:-1], "weight")), rows)
    return name, tensor[order[:, 0]]
