# SPDX-License-Identifier: Apache-2.0
"""Linear layers that an NVFP4 checkpoint of mixed precision keeps in FP8."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.fp8_tensors import with_row_scales
from llm_quant_rocm.checkpoint.linear_tensors import LinearTensors
from llm_quant_rocm_vllm import fusion
from llm_quant_rocm_vllm.engine_layers import ENGINE

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.nvfp4 import NvFp4Config


class Fp8LinearMethod(LinearMethodBase):
    """Serves ModelOpt's FP8 (E4M3, one weight scale and one input scale a tensor) by the PTPC path.

    The weight's values stay as they are: each row gets the scale of its shard. vLLM rounds the shards of a fused layer
    again to give them one scale, and has no kernel for GPUs without FP8 units. Inputs get a scale a token instead of
    the checkpoint's one for all, which rounds no worse and needs no calibration.

    The served layer holds `weight` [N, K] E4M3, in the layout `ptpc_layout`, and `weight_scale` [N, 1] fp32.
    """

    def __init__(self, config: "NvFp4Config", prefix: str) -> None:
        super().__init__()
        self.config = config
        self.prefix = prefix
        vllm_config = get_current_vllm_config()
        self.is_dummy = vllm_config.load_config.load_format == "dummy"
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
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype
        self.checkpoint = LinearTensors(
            layer,
            self.prefix,
            self.config.packed_modules_mapping,
            output_partition_sizes,
            output_size,
            extra_weight_attrs["weight_loader"],
            ENGINE,
        )
        self.checkpoint.add_matrix("weight", torch.float8_e4m3fn, input_size_per_partition, input_size)
        self.checkpoint.add_scalars("weight_scale")
        self.checkpoint.add_optional_scalars("input_scale")

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        # vLLM sets this mark back when it reloads weights.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        self.config.report()
        codes, shard_scales = layer.weight.data, layer.weight_scale.data
        if self.is_dummy:
            shard_scales.fill_(1.0)
        else:
            self.checkpoint.refuse_missing()
        codes, scale = with_row_scales(codes, shard_scales, self.checkpoint.pieces())
        codes, layer.ptpc_layout = ops.prepare_ptpc_weight(codes)
        for name in ("weight", "weight_scale", "input_scale"):
            delattr(layer, name)
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.ptpc_linear(x, layer.weight, layer.weight_scale, bias, layer.ptpc_layout)
