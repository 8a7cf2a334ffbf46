# SPDX-License-Identifier: Apache-2.0
"""Linear layers of NVFP4 checkpoints."""

from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from llm_quant_rocm import ops
from llm_quant_rocm.formats.nvfp4 import BLOCK, fake_quantize_activation
from llm_quant_rocm_vllm import fusion
from llm_quant_rocm_vllm.linear_tensors import UNQUANTIZED, LinearTensors
from llm_quant_rocm_vllm.nvfp4 import NvFp4Config, Options
from llm_quant_rocm_vllm.nvfp4_tensors import Piece, assemble, dummy, input_global_scale, keep, kept, refuse_ragged


class NvFp4LinearMethod(LinearMethodBase):
    """Serves one linear layer, or an output head that the checkpoint quantizes.

    The served layer holds what `nvfp4_tensors.keep` gives it: a prepared weight [N, K] with a global scale a row, where
    N and K are this rank's share. `input_global_scale` is there with activations="nvfp4" only.
    """

    def __init__(self, config: NvFp4Config, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.prefix = prefix
        # MLA attention reads this layer's weight by serving it an identity matrix.
        self.options = Options() if prefix.rpartition(".")[2] == "kv_b_proj" else config.options
        self.batch_invariant = envs.VLLM_BATCH_INVARIANT
        vllm_config = get_current_vllm_config()
        self.is_dummy = vllm_config.load_config.load_format == "dummy"
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
        refuse_ragged(self.prefix, input_size_per_partition, input_size)
        # Attributes that vLLM's other parts (LoRA, MLA) read from a quantized layer.
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype

        names, k = self.config.tensors, input_size_per_partition
        self.checkpoint = LinearTensors(
            layer,
            self.prefix,
            self.config.packed_modules_mapping,
            output_partition_sizes,
            output_size,
            extra_weight_attrs["weight_loader"],
        )
        self.checkpoint.add_matrix(names.codes, torch.uint8, k // 2, input_size // 2)
        self.checkpoint.add_matrix(names.scales, torch.float8_e4m3fn, k // BLOCK, input_size // BLOCK)
        self.checkpoint.add_scalars(names.global_scale)
        self.input_scales = self.checkpoint.add_optional_scalars(names.input_scale)
        if names.codes != UNQUANTIZED:
            self.checkpoint.add_refused(UNQUANTIZED)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        # vLLM sets this mark back when it reloads weights.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        self.config.report()
        names = self.config.tensors
        codes, scales, global_scale = (
            getattr(layer, name).data for name in (names.codes, names.scales, names.global_scale)
        )
        if self.is_dummy:
            weight = dummy(codes, scales)
        else:
            self.checkpoint.refuse_missing()
            pieces = self.checkpoint.pieces()
            weight = assemble(
                names,
                codes,
                scales,
                (Piece(name, (rows,), scale) for (name, rows), scale in zip(pieces, global_scale, strict=True)),
            )
        for name in (names.codes, names.scales, names.global_scale, names.input_scale):
            delattr(layer, name)
        keep(layer, weight)
        if self.options.activations == "nvfp4":
            scales = [torch.ones(())] if self.is_dummy else list(self.input_scales.values())
            scale = input_global_scale(names, self.prefix, scales).to(codes.device)
            layer.input_global_scale = torch.nn.Parameter(scale, requires_grad=False)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.options.activations == "nvfp4":
            x = fake_quantize_activation(x, layer.input_global_scale)
        return ops.nvfp4_gemm(x, kept(layer), bias, prefill=self.options.prefill, batch_invariant=self.batch_invariant)

    def tie_weights(self, layer: LinearBase, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """The output head of tied embeddings is the embedding, and no tensor of the checkpoint."""
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        layer.quant_method = UnquantizedEmbeddingMethod()
        layer.weight = embed_tokens.weight
        return layer
