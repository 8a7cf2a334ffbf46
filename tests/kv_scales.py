# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 KV cache in checkpoints, and what both engines' tests ask of an attention layer that gets them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

PREFIX = "model.layers.0.self_attn.attn"
FLAT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [], "group_size": 16}
_GROUP = {
    "targets": ["Linear"],
    "format": "nvfp4-pack-quantized",
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
}
_CACHE = {"type": "float", "num_bits": 8, "dynamic": False}
# Descriptions of NVFP4 checkpoints with such a cache.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "modelopt": {**FLAT, "kv_cache_quant_algo": "FP8"},
    "mixed": {
        **FLAT,
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"lm_head": {"quant_algo": "NVFP4", "group_size": 16}},
        "kv_cache_scheme": _CACHE,
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": _GROUP},
        "kv_cache_scheme": {**_CACHE, "strategy": "tensor", "symmetric": True},
    },
}
KINDS = ["ptpc_fp8", *CONFIGURATIONS]
BROKEN = [0.0, -0.5, float("nan"), float("inf")]

# Gives a layer's parameter of this name a checkpoint's value, as the engine's models do.
Load = Callable[[Any, str, Any], None]


def loading(default_loader: Callable[..., None]) -> Load:
    """`Load` of an engine with this loader for parameters that have none of their own."""

    def load(layer: Any, name: str, value: float | list[float]) -> None:
        parameter = getattr(layer, name)
        getattr(parameter, "weight_loader", default_loader)(parameter, torch.tensor(value))

    return load


def check_a_broken_scale_is_refused(layer: Any, load: Load, value: float) -> None:
    load(layer, "k_scale", 0.25)
    with pytest.raises(ValueError, match=rf"^{PREFIX}\.v_scale is {value:g} in the checkpoint; a scale of a KV cache"):
        load(layer, "v_scale", value)


def check_a_scale_of_values_alone_is_refused(layer: Any, load: Load) -> None:
    load(layer, "v_scale", 0.25)
    with pytest.raises(ValueError, match=rf"^{PREFIX}\.k_scale is missing from the checkpoint"):
        layer.quant_method.process_weights_after_loading(layer)
