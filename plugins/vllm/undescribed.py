# SPDX-License-Identifier: Apache-2.0
"""Linear layers that an NVFP4 checkpoint's description leaves in 16 bits: codes are refused as they arrive.

vLLM copies FP8 codes into a 16-bit weight as if they were its values, and some of its models (Qwen3-MoE) skip scales
that no layer asks for, so that nonsense was served. Two codes in a byte failed an assertion without words.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from llm_quant_rocm.checkpoint.layer_names import ShardNames


def refusing_codes(
    method: UnquantizedLinearMethod, layer: torch.nn.Module, prefix: str, fused: Mapping[str, Sequence[str]]
) -> UnquantizedLinearMethod:
    """vLLM's `method` for `layer`, whose loader from now on raises TypeError where a weight has values of 8 bits.

    Args:
        layer: linear, or an output head.
        prefix: vLLM's name of the layer.
        fused: vLLM's packed_modules_mapping.
    """
    create_weights = method.create_weights

    def create(*args: Any, weight_loader: Callable[..., Any], **kwargs: Any) -> None:
        @wraps(weight_loader)  # vLLM binds arguments by the loader's signature
        def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *shard: Any, **named: Any) -> Any:
            if loaded_weight.dtype.itemsize == 1:
                sizes = getattr(layer, "output_partition_sizes", (1,))  # an output head has none
                names = ShardNames(prefix, fused, sizes)
                raise TypeError(
                    f"{names.of_shard(next(iter((*shard, *named.values())), None))} is {loaded_weight.dtype} in the "
                    "checkpoint, whose quantization_config does not call the layer quantized: fetch the checkpoint "
                    "again, or export it with a description of all that is quantized"
                )
            return weight_loader(param, loaded_weight, *shard, **named)

        create_weights(*args, weight_loader=load, **kwargs)

    method.create_weights = create
    return method
