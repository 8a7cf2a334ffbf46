# SPDX-License-Identifier: Apache-2.0
"""Linear layers that an NVFP4 checkpoint of mixed precision keeps in FP8."""

from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.fp8_layers import Fp8Linear
from llm_quant_rocm_vllm import compile_key, fusion
from llm_quant_rocm_vllm.engine_layers import ENGINE

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.nvfp4 import NvFp4Config


class Fp8LinearMethod(LinearMethodBase):
    """Serves one linear layer by `Fp8Linear`. vLLM has no kernel for GPUs without FP8 units.

    Raises:
        NotImplementedError: a row's bits may not depend on the rows beside it.
    """

    def __init__(self, config: "NvFp4Config", prefix: str) -> None:
        super().__init__()
        if envs.VLLM_BATCH_INVARIANT:
            raise NotImplementedError(
                f"{prefix}: nvfp4_triton does not serve FP8 layers with VLLM_BATCH_INVARIANT=1: leave the checkpoint "
                "to vLLM with LLM_QUANT_ROCM_NVFP4=0"
            )
        self.config = config
        self.vllm_config = get_current_vllm_config()
        self.linear = Fp8Linear(prefix, is_dummy=self.vllm_config.load_config.load_format == "dummy")
        fusion.enable(self.vllm_config)

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
        compile_key.extend(self.vllm_config, layer.ptpc_layout)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.ptpc_linear(x, layer.weight, layer.weight_scale, bias, layer.ptpc_layout)
