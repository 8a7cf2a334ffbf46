# SPDX-License-Identifier: Apache-2.0
"""What a call of routed experts says of its tokens, whatever the experts are made of."""

import torch

from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.reference.act_and_mul_quant import ACTIVATIONS

_SIGNED = (torch.int32, torch.int64)
# What the kernels of `routing` read; some of the engines' dispatchers have unsigned ids.
_IDS = (*_SIGNED, torch.uint32)


def check_routing(
    operator: str,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    expert_map: torch.Tensor | None,
    padding: torch.Tensor | None,
) -> None:
    """Raises unless the router's results fit x [T, H].

    Raises:
        TypeError: a dtype.
        ValueError: shapes or devices, an unknown activation, or a router weight on the input of several experts.
    """
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.shape != topk_weights.shape:
        raise ValueError(
            f"{operator}: topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must both be "
            f"[{x.shape[0]}, k]"
        )
    if topk_ids.dtype not in _IDS or not topk_weights.is_floating_point():
        raise TypeError(
            f"{operator}: topk_ids are integers of 32 or 64 bits and topk_weights are floats; got {topk_ids.dtype}, "
            f"{topk_weights.dtype}"
        )
    if expert_map is not None and (expert_map.dtype not in _SIGNED or expert_map.dim() != 1):
        raise (ValueError if expert_map.dtype in _SIGNED else TypeError)(
            f"{operator}: expert_map has one int32 or int64 for each expert of the model; got {expert_map.dtype} "
            f"{tuple(expert_map.shape)}"
        )
    if padding is not None and (padding.dtype not in _SIGNED or padding.shape != x.shape[:1]):
        raise (ValueError if padding.dtype in _SIGNED else TypeError)(
            f"{operator}: padding has one int32 or int64 for each token, [{x.shape[0]}]; got {padding.dtype} "
            f"{tuple(padding.shape)}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"{operator}: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if apply_router_weight_on_input and topk_ids.shape[1] != 1:
        raise ValueError(
            f"{operator}: a router weight goes on the input for one expert a token, not for {topk_ids.shape[1]}"
        )
    tensors = {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map, "padding": padding}
    for label, tensor in tensors.items():
        if tensor is not None:
            check_device(operator, label, tensor, x)


def check_device(operator: str, label: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """Raises ValueError unless `tensor` is where x is."""
    if tensor.device != x.device:
        raise ValueError(f"{operator}: {label} is on {tensor.device}, x on {x.device}; move them to one device")


def routed(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
    expert_map: torch.Tensor | None,
    padding: torch.Tensor | None,
) -> RoutedTokens:
    """The tokens as the kernels take them: contiguous, weights in fp32, the router weight in x where it goes there."""
    weights = topk_weights.float()
    if apply_router_weight_on_input:
        x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
    expert_map = None if expert_map is None else expert_map.contiguous()
    padding = None if padding is None else padding.contiguous()
    return RoutedTokens(x.contiguous(), weights.contiguous(), topk_ids.contiguous(), expert_map, padding)
