# SPDX-License-Identifier: Apache-2.0
"""Linear layers that an NVFP4 checkpoint's description leaves in 16 bits: codes are refused as they arrive.

Engines copy FP8 codes into a 16-bit weight as if they were its values, and some of their models pass over scales that
no layer asks for (Qwen3-MoE of vLLM, Llama of SGLang), so that nonsense was served. Two codes in a byte failed an
assertion without words.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch

from llm_quant_rocm.checkpoint.layer_names import ShardNames

_Method = TypeVar("_Method")


def refusing_codes(method: _Method, prefix: str, fused: Mapping[str, Sequence[str]]) -> _Method:
    """An engine's `method` for a linear layer in 16 bits, whose loader from now on raises TypeError where a weight has
    values of 8 bits.

    Args:
        prefix: the engine's name of the layer.
        fused: the engine's packed_modules_mapping.
    """
    engines: Any = method
    create_weights = engines.create_weights

    def create(
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        weight_loader: Callable[..., Any],
        **kwargs: Any,
    ) -> None:
        names = ShardNames(prefix, fused, output_partition_sizes)

        @wraps(weight_loader)  # vLLM binds arguments by the loader's signature
        def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *shard: Any, **named: Any) -> Any:
            if loaded_weight.dtype.itemsize == 1:
                raise TypeError(
                    f"{names.of_shard(next(iter((*shard, *named.values())), None))} is {loaded_weight.dtype} in the "
                    "checkpoint, whose quantization_config does not call the layer quantized: fetch the checkpoint "
                    "again, or export it with a description of all that is quantized"
                )
            return weight_loader(param, loaded_weight, *shard, **named)

        create_weights(layer, input_size_per_partition, output_partition_sizes, *args, weight_loader=load, **kwargs)

    engines.create_weights = create
    return method
