# SPDX-License-Identifier: Apache-2.0
"""Layers that are loaded, before their first call: their kernels are compiled."""

from collections.abc import Callable
from typing import Any

import torch

from llm_quant_rocm.ops.warm_up import warm_up


def warm_linear(
    layer: torch.nn.Module,
    product: Callable[[torch.Tensor, torch.Tensor | None], object],
    dtype: torch.dtype,
    columns: int,
    rows: int,
    name: str,
) -> None:
    """Compiles what `product(x, bias)` of a linear layer launches, for x [up to `rows`, `columns`] of `dtype`.

    Of layers whose parameters are alike the first is compiled for.
    """
    bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
    device = next(layer.parameters()).device

    def call(m: int) -> object:
        return product(torch.empty((m, columns), dtype=dtype, device=device), bias)

    warm_up(call, rows, device, (_kind(layer), dtype, bias is not None), name)


def warm_experts(
    layer: torch.nn.Module,
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
    dtype: torch.dtype,
    hidden: int,
    topk: int,
    tokens: int,
    name: str,
) -> None:
    """The same of routed experts' `product(x, topk_weights, topk_ids)`, for x [up to `tokens`, `hidden`]."""
    device = next(layer.parameters()).device

    def call(m: int) -> object:
        weights = torch.ones((m, topk), dtype=torch.float32, device=device)
        ids = torch.zeros((m, topk), dtype=torch.int32, device=device)
        return product(torch.empty((m, hidden), dtype=dtype, device=device), weights, ids)

    warm_up(call, tokens, device, (_kind(layer), dtype, topk), name)


def _kind(layer: torch.nn.Module) -> tuple[Any, ...]:
    return tuple((name, param.shape, param.dtype) for name, param in layer.named_parameters())
