# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 KV cache in a checkpoint, which vLLM reads: broken ones are refused.

vLLM takes a negative or missing one for another value, divides by an infinite one, and has an assertion without words
for some of the rest.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
# Caches whose scales are a checkpoint's.
_SCALED = ("fp8", "nvfp4")
_CURE = "fetch or export the checkpoint again, or serve it with --kv-cache-dtype bfloat16"


def refusing_broken_scales(method: BaseKVCacheMethod, prefix: str) -> BaseKVCacheMethod:
    """vLLM's `method` for the attention layer `prefix`, which from now on raises ValueError where the cache is
    quantized and the checkpoint's scale of it is not positive and finite, or that of keys alone is missing."""
    create_weights, process = method.create_weights, method.process_weights_after_loading
    arrived: set[str] = set()

    def create(layer: Any) -> None:
        arrived.clear()
        create_weights(layer)
        for name in _SCALES:
            parameter = getattr(layer, name, None)
            if parameter is not None and layer.kv_cache_dtype.startswith(_SCALED):
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                parameter.weight_loader = _checking(loader, name)

    def _checking(loader: Callable[..., None], name: str) -> Callable[..., None]:
        @wraps(loader)  # vLLM binds arguments by the loader's signature
        def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            values = loaded_weight.float().flatten()
            broken = values[~(values.isfinite() & (values > 0))].tolist()
            if broken:
                raise ValueError(
                    f"{prefix}.{name} is {broken[0]:g} in the checkpoint; a scale of a KV cache is positive and "
                    f"finite: {_CURE}"
                )
            arrived.add(name)
            loader(param, loaded_weight, *args, **kwargs)

        return load

    def process_weights_after_loading(layer: Any) -> None:
        if "v_scale" in arrived and "k_scale" not in arrived:
            raise ValueError(f"{prefix}.k_scale is missing from the checkpoint, which has {prefix}.v_scale: {_CURE}")
        process(layer)

    method.create_weights = create
    method.process_weights_after_loading = process_weights_after_loading
    return method
