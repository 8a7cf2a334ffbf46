# SPDX-License-Identifier: Apache-2.0
"""Linear layers of `ptpc_fp8`."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.parameter import ModelWeightParameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.layer_names import ShardNames
from llm_quant_rocm.checkpoint.online import quantize_weight, refusing_other_dtypes
from llm_quant_rocm_sglang import fusion
from llm_quant_rocm_sglang.engine_layers import device_type, group_of

if TYPE_CHECKING:
    from llm_quant_rocm_sglang.ptpc_fp8 import PtpcFp8Config


class PtpcFp8LinearMethod(LinearMethodBase):
    """Serves one linear layer, whose weight is loaded in the checkpoint's precision and then quantized.

    The served layer holds `weight` [N, K] E4M3, in the layout `ptpc_layout`, and `weight_scale` [N, 1] fp32, where
    N and K are this rank's share.
    """

    def __init__(self, config: "PtpcFp8Config", prefix: str) -> None:
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
        layer.logical_widths = output_partition_sizes
        self.ranks = input_size // input_size_per_partition
        self.names = ShardNames(self.prefix, self.config.packed_modules_mapping, output_partition_sizes)
        weight = ModelWeightParameter(
            data=torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=refusing_other_dtypes(extra_weight_attrs["weight_loader"], self.names.of_shard),
        )
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        self.config.report()
        group = group_of(layer, self.ranks) if self.ranks > 1 else None
        codes, scale = quantize_weight(
            layer.weight.data, f"{self.prefix}.weight", self.names.of_row, group, device_type()
        )
        codes, layer.ptpc_layout = ops.prepare_ptpc_weight(codes)
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return fusion.ptpc_linear(x, layer.weight, layer.weight_scale, bias, layer.ptpc_layout)
