# SPDX-License-Identifier: Apache-2.0
"""Linear layers that an NVFP4 checkpoint of mixed precision keeps in FP8."""

from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.model_executor.layers.linear import LinearBase

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.fp8_layers import Fp8Linear
from llm_quant_rocm_vllm import compile_key, fusion
from llm_quant_rocm_vllm.engine_layers import ENGINE, Loader
from llm_quant_rocm_vllm.linear import LinearMethod

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.nvfp4 import NvFp4Config


class Fp8LinearMethod(LinearMethod):
    """Serves one linear layer by `Fp8Linear`. vLLM has no kernel for GPUs without FP8 units."""

    def __init__(self, config: "NvFp4Config", prefix: str) -> None:
        super().__init__(prefix)
        self.config = config
        self.batch_invariant = envs.VLLM_BATCH_INVARIANT
        self.linear = Fp8Linear(prefix, is_dummy=self.is_dummy, batch_invariant=self.batch_invariant)
        fusion.enable(self.vllm_config)

    def declare(self, layer: LinearBase, shape: tuple[int, int], loader: Loader) -> None:
        self.linear.declare(
            layer,
            layer.input_size_per_partition,
            layer.logical_widths,
            shape,
            loader,
            self.config.packed_modules_mapping,
            ENGINE,
        )

    def prepare(self, layer: LinearBase) -> None:
        self.config.report()
        self.linear.finish(layer)
        compile_key.extend(self.vllm_config, layer.ptpc_layout)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.ptpc_linear(
            x, layer.weight, layer.weight_scale, bias, layer.ptpc_layout, batch_invariant=self.batch_invariant
        )
