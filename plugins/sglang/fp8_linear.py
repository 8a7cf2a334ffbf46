# SPDX-License-Identifier: Apache-2.0
"""Linear layers that an NVFP4 checkpoint of mixed precision keeps in FP8."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from llm_quant_rocm.checkpoint.fp8_layers import Fp8Linear
from llm_quant_rocm_sglang import fusion, output_heads
from llm_quant_rocm_sglang.engine_layers import (
    ENGINE,
    batch_invariant,
    hide_codes,
    hide_codes_to_come,
    is_dummy,
    once,
    warm_up,
)

if TYPE_CHECKING:
    from llm_quant_rocm_sglang.nvfp4 import NvFp4Config


class Fp8LinearMethod(LinearMethodBase):
    """Serves one linear layer by `Fp8Linear`."""

    def __init__(self, config: "NvFp4Config", prefix: str) -> None:
        self.config = config
        self.batch_invariant = batch_invariant()
        self.prefix = prefix
        self.quant_config = config  # whose weight_block_size SGLang's models ask for
        self.linear = Fp8Linear(prefix, is_dummy=is_dummy(), batch_invariant=self.batch_invariant)

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
        output_heads.refuse_token_map(layer, self.prefix)
        self.dtype, self.columns = params_dtype, input_size_per_partition
        self.linear.declare(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            (output_size, input_size),
            extra_weight_attrs["weight_loader"],
            self.config.packed_modules_mapping,
            ENGINE,
        )
        hide_codes_to_come(layer, self.prefix)

    @once
    def process_weights_after_loading(self, layer: LinearBase) -> None:
        self.config.report()
        self.linear.finish(layer)
        self.codes = hide_codes(layer)
        output_heads.share(layer)
        warm_up(layer, self)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = (layer.weight.view(self.codes), layer.weight_scale, bias, layer.ptpc_layout)
        return fusion.ptpc_linear(x, *weight, self.batch_invariant)
