# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers of NVFP4 checkpoints."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts

from llm_quant_rocm.checkpoint.nvfp4_layers import NvFp4Experts
from llm_quant_rocm_vllm import compile_key
from llm_quant_rocm_vllm.experts import ExpertsMethod, expert_names

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.nvfp4 import NvFp4Config


class NvFp4MoEMethod(ExpertsMethod):
    """Serves the routed experts of one layer by `NvFp4Experts`.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
        ValueError: activations="nvfp4" in a model that is to be compiled.
    """

    name = "nvfp4_triton"
    otherwise = "leave the checkpoint to vLLM with LLM_QUANT_ROCM_NVFP4=0"

    def __init__(self, config: "NvFp4Config", layer: RoutedExperts, prefix: str) -> None:
        super().__init__(layer, prefix)
        self.config = config
        self.experts = NvFp4Experts(
            config.tensors,
            prefix,
            config.options,
            is_dummy=self.is_dummy,
            batch_invariant=self.batch_invariant,
        )
        w4a4 = config.options.activations == "nvfp4"
        if w4a4 and not self.vllm_config.model_config.enforce_eager:
            raise ValueError(f"{prefix}: experts with activations in NVFP4 cannot be compiled: add --enforce-eager")

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        inner = intermediate_size_per_partition
        loader = extra_weight_attrs.pop("weight_loader")
        names = expert_names(layer, self.prefix)
        whole_inner = inner * self.moe.tp_size
        self.experts.declare(layer, names, num_experts, hidden_size, (inner, whole_inner), loader, extra_weight_attrs)

    def prepare(self, layer: RoutedExperts) -> None:
        self.config.report()
        self.experts.finish(layer)
        compile_key.extend(self.vllm_config, f"{self.config.options} {layer.w13_nvfp4} {layer.w2_nvfp4}")

    def compute(
        self, layer: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return self.experts.product(layer, x, weights, ids, **options)
