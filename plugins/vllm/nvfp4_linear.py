# SPDX-License-Identifier: Apache-2.0
"""Linear layers of NVFP4 checkpoints."""

from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from llm_quant_rocm.checkpoint.nvfp4_kinds import Options
from llm_quant_rocm.checkpoint.nvfp4_layers import NvFp4Linear
from llm_quant_rocm_vllm import compile_key, fusion
from llm_quant_rocm_vllm.engine_layers import ENGINE
from llm_quant_rocm_vllm.nvfp4 import NvFp4Config


class NvFp4LinearMethod(LinearMethodBase):
    """Serves one linear layer, or an output head that the checkpoint quantizes, by `NvFp4Linear`."""

    def __init__(self, config: NvFp4Config, prefix: str) -> None:
        super().__init__()
        self.config = config
        # MLA attention reads this layer's weight by serving it an identity matrix.
        self.options = Options() if prefix.rpartition(".")[2] == "kv_b_proj" else config.options
        self.vllm_config = vllm_config = get_current_vllm_config()
        self.linear = NvFp4Linear(
            config.tensors,
            prefix,
            self.options,
            is_dummy=vllm_config.load_config.load_format == "dummy",
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        # 16-bit activations: on one rank there is nothing to fuse.
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            fusion.enable(vllm_config)

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

        self.linear.declare(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            (output_size, input_size),
            extra_weight_attrs["weight_loader"],
            self.config.packed_modules_mapping,
            ENGINE,
        )

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        # vLLM sets this mark back when it reloads weights.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        self.config.report()
        self.linear.finish(layer)
        compile_key.extend(self.vllm_config, f"{self.options} {layer.nvfp4}")
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear.product(layer, x, bias)

    def tie_weights(self, layer: LinearBase, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """The output head of tied embeddings is the embedding, and no tensor of the checkpoint."""
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        layer.quant_method = UnquantizedEmbeddingMethod()
        layer.weight = embed_tokens.weight
        return layer
