# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers of NVFP4 checkpoints."""

from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts

from llm_quant_rocm.checkpoint.nvfp4_layers import NvFp4Experts
from llm_quant_rocm_vllm.experts import expert_map, expert_names, lacking

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.nvfp4 import NvFp4Config


class NvFp4MoEMethod(FusedMoEMethodBase):
    """Serves the routed experts of one layer by `NvFp4Experts`.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
        ValueError: activations="nvfp4" in a model that is to be compiled.
    """

    def __init__(self, config: "NvFp4Config", layer: RoutedExperts, prefix: str) -> None:
        super().__init__(layer.moe_config)
        self.config = config
        self.prefix = prefix
        is_dummy = get_current_vllm_config().load_config.load_format == "dummy"
        self.experts = NvFp4Experts(config.tensors, prefix, config.options, is_dummy=is_dummy)
        lack = lacking(layer.moe_config) or ("VLLM_BATCH_INVARIANT=1" if envs.VLLM_BATCH_INVARIANT else None)
        if lack:
            raise NotImplementedError(
                f"{prefix}: nvfp4_triton does not serve experts with {lack}: leave the checkpoint to vLLM with "
                "LLM_QUANT_ROCM_NVFP4=0"
            )
        w4a4 = config.options.activations == "nvfp4"
        if w4a4 and not get_current_vllm_config().model_config.enforce_eager:
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

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """The sizes as they are: the operator takes any."""
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        # vLLM sets this mark back when it reloads weights.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        self.config.report()
        self.experts.finish(layer)
        layer._already_called_process_weights_after_loading = True

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: it would describe the layer to vLLM's kernels, and ours serves it."""
        return

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """This rank's share of the routed experts' output. vLLM runs the shared experts itself."""
        return self.experts.product(
            layer,
            x,
            topk_weights,
            topk_ids,
            self.moe.activation.value,
            layer.apply_router_weight_on_input,
            expert_map(layer),
        )
