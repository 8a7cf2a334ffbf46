# SPDX-License-Identifier: Apache-2.0
"""Linear layers of NVFP4 checkpoints."""

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from llm_quant_rocm.checkpoint.nvfp4_layers import NvFp4Linear
from llm_quant_rocm_sglang import output_heads
from llm_quant_rocm_sglang.engine_layers import (
    ENGINE,
    batch_invariant,
    hide_codes,
    hide_codes_to_come,
    is_dummy,
    once,
    warm_up,
)
from llm_quant_rocm_sglang.nvfp4 import NvFp4Config


class NvFp4LinearMethod(LinearMethodBase):
    """Serves one linear layer, or an output head that the checkpoint quantizes, by `NvFp4Linear`.

    MLA's `kv_b_proj` is decoded as soon as its tensors are there: SGLang's models take its weight apart, in 16 bits, at
    the end of `load_weights`, before weights are processed.
    """

    def __init__(self, config: NvFp4Config, prefix: str) -> None:
        self.config = config
        self.prefix = prefix
        self.is_absorbed = prefix.rpartition(".")[2] == "kv_b_proj"
        self.is_decoded = False
        self.linear = NvFp4Linear(
            config.tensors, prefix, config.options, is_dummy=is_dummy(), batch_invariant=batch_invariant()
        )

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
            *([partial(self.decode, layer)] if self.is_absorbed else []),
        )
        hide_codes_to_come(layer, self.prefix)

    def decode(self, layer: LinearBase) -> None:
        """Puts the weight in 16 bits in the place of what was loaded."""
        weight = self.linear.weight(layer).dequantize(self.dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.is_decoded = True

    @once
    def process_weights_after_loading(self, layer: LinearBase) -> None:
        self.config.report()
        if not self.is_absorbed:
            self.linear.finish(layer)
            hide_codes(layer)
            output_heads.share(layer)
            warm_up(layer, self)
        elif not self.is_decoded:
            self.decode(layer)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.is_absorbed:
            return torch.nn.functional.linear(x, layer.weight, bias)
        return self.linear.product(layer, x, bias)
