# SPDX-License-Identifier: Apache-2.0
"""Linear layers that an NVFP4 checkpoint of mixed precision keeps in FP8."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.fp8_tensors import with_row_scales
from llm_quant_rocm.checkpoint.linear_tensors import LinearTensors
from llm_quant_rocm_sglang import fusion
from llm_quant_rocm_sglang.engine_layers import ENGINE, is_dummy

if TYPE_CHECKING:
    from llm_quant_rocm_sglang.nvfp4 import NvFp4Config


class Fp8LinearMethod(LinearMethodBase):
    """Serves ModelOpt's FP8 (E4M3, one weight scale and one input scale a tensor) by the PTPC path.

    The weight's values stay as they are: each row gets the scale of its shard. Inputs get a scale a token instead of
    the checkpoint's one for all, which rounds no worse and needs no calibration.

    The served layer holds `weight` [N, K] E4M3, in the layout `ptpc_layout`, and `weight_scale` [N, 1] fp32.
    """

    def __init__(self, config: "NvFp4Config", prefix: str) -> None:
        self.config = config
        self.prefix = prefix

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
        self.config.report()
        shard_scales = layer.weight_scale.data
        if is_dummy():
            shard_scales.fill_(1.0)
        else:
            self.checkpoint.refuse_missing()
        codes, scale = with_row_scales(layer.weight.data, shard_scales, self.checkpoint.pieces())
        codes, layer.ptpc_layout = ops.prepare_ptpc_weight(codes)
        for name in ("weight", "weight_scale", "input_scale"):
            delattr(layer, name)
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return fusion.ptpc_linear(x, layer.weight, layer.weight_scale, bias, layer.ptpc_layout)
