# SPDX-License-Identifier: Apache-2.0
"""What the methods for linear layers share."""

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from llm_quant_rocm.checkpoint.warm_layers import warm_linear
from llm_quant_rocm_vllm.engine_layers import Loader, PreparedOnce, is_dummy


class LinearMethod(PreparedOnce, LinearMethodBase):
    """Serves one linear layer, or an output head, by one of our operators.

    Attributes:
        prefix: vLLM's name of the layer.
        is_dummy: whether weights are random instead of a checkpoint's.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.vllm_config = get_current_vllm_config()
        self.is_dummy = is_dummy(self.vllm_config)

    @abstractmethod
    def declare(self, layer: LinearBase, shape: tuple[int, int], loader: Loader) -> None:
        """Registers the parameters that the checkpoint's tensors are loaded into.

        Args:
            layer: says its own sizes, this rank's share.
            shape: [N, K] of the whole weight.
            loader: copies a tensor of the checkpoint, or this rank's share of it, into a parameter.
        """

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        # Attributes that vLLM's other parts (LoRA, MLA) read from a quantized layer.
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype
        self.declare(layer, (output_size, input_size), extra_weight_attrs["weight_loader"])

    def tie_weights(self, layer: LinearBase, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """The output head of tied embeddings is the embedding, and no tensor of the checkpoint."""
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        layer.quant_method = UnquantizedEmbeddingMethod()
        layer.weight = embed_tokens.weight
        return layer

    def warm_up(self, layer: LinearBase) -> None:
        warm_linear(
            layer,
            partial(self.apply, layer),
            layer.orig_dtype,
            layer.input_size_per_partition,
            self.vllm_config.scheduler_config.max_num_batched_tokens,
            self.prefix,
        )
