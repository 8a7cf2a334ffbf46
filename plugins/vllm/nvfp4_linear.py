# SPDX-License-Identifier: Apache-2.0
"""Linear layers of NVFP4 checkpoints."""

import torch
from vllm import envs
from vllm.model_executor.layers.linear import LinearBase

from llm_quant_rocm.checkpoint.nvfp4_kinds import Options
from llm_quant_rocm.checkpoint.nvfp4_layers import NvFp4Linear
from llm_quant_rocm_vllm import compile_key, fusion
from llm_quant_rocm_vllm.engine_layers import ENGINE, Loader
from llm_quant_rocm_vllm.linear import LinearMethod
from llm_quant_rocm_vllm.nvfp4 import NvFp4Config


class NvFp4LinearMethod(LinearMethod):
    """Serves one linear layer, or an output head that the checkpoint quantizes, by `NvFp4Linear`."""

    def __init__(self, config: NvFp4Config, prefix: str) -> None:
        super().__init__(prefix)
        self.config = config
        # MLA attention reads this layer's weight by serving it an identity matrix.
        self.options = Options() if prefix.rpartition(".")[2] == "kv_b_proj" else config.options
        self.linear = NvFp4Linear(
            config.tensors,
            prefix,
            self.options,
            is_dummy=self.is_dummy,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        # 16-bit activations: on one rank there is nothing to fuse.
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
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
        compile_key.extend(self.vllm_config, f"{self.options} {layer.nvfp4}")

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear.product(layer, x, bias)
