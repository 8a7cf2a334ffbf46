# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 KV cache in a checkpoint, which engines read: broken ones are refused.

Engines take a negative or missing one for another value, divide by an infinite one, and have an assertion without words
for some of the rest.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

_Method = TypeVar("_Method")

_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
_CURE = "fetch or export the checkpoint again, or serve it with --kv-cache-dtype bfloat16"


def refusing_broken_scales(
    method: _Method,
    prefix: str,
    default_loader: Callable[..., None],
    is_quantized: Callable[[Any], bool] = lambda layer: True,
) -> _Method:
    """An engine's `method` for the attention layer `prefix`, which from now on raises ValueError where the cache is
    quantized and the checkpoint's scale of it is not positive and finite, or that of keys alone is missing.

    `default_loader` is the engine's for parameters that have none of their own, and takes one value for one.
    `is_quantized` is asked with the layer."""
    engines: Any = method
    create_weights, process = engines.create_weights, engines.process_weights_after_loading
    arrived: set[str] = set()

    def create(layer: Any) -> None:
        arrived.clear()
        create_weights(layer)
        for name in _SCALES:
            parameter = getattr(layer, name, None)
            if parameter is not None and is_quantized(layer):
                parameter.weight_loader = _checking(getattr(parameter, "weight_loader", default_loader), name)

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
            if loader is default_loader and len(values) != param.numel():
                raise ValueError(
                    f"{prefix}.{name} is {len(values)} values in the checkpoint, and the engine knows "
                    f"{param.numel()} a layer: {_CURE}"
                )
            arrived.add(name)
            loader(param, loaded_weight, *args, **kwargs)

        return load

    def process_weights_after_loading(layer: Any) -> None:
        if "v_scale" in arrived and "k_scale" not in arrived:
            raise ValueError(f"{prefix}.k_scale is missing from the checkpoint, which has {prefix}.v_scale: {_CURE}")
        process(layer)

    engines.create_weights = create
    engines.process_weights_after_loading = process_weights_after_loading
    return method
