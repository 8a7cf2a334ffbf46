# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers of NVFP4 checkpoints."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

from llm_quant_rocm.checkpoint.nvfp4_kinds import MODELOPT_ALGORITHMS
from llm_quant_rocm.checkpoint.nvfp4_layers import NvFp4Experts
from llm_quant_rocm_sglang.engine_layers import batch_invariant, is_dummy, once
from llm_quant_rocm_sglang.experts import ExpertsMethod, combined, expert_names, lacking, routing, warm_up

if TYPE_CHECKING:
    from llm_quant_rocm_sglang.nvfp4 import NvFp4Config


class NvFp4MoEMethod(ExpertsMethod):
    """Serves the routed experts of one layer by `NvFp4Experts`.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
    """

    def __init__(self, config: "NvFp4Config", layer: FusedMoE, prefix: str) -> None:
        self.config = config
        self.prefix = prefix
        self.experts = NvFp4Experts(
            config.tensors, prefix, config.options, is_dummy=is_dummy(), batch_invariant=batch_invariant()
        )
        if lack := lacking(layer):
            raise NotImplementedError(
                f"{prefix}: nvfp4_triton does not serve experts with {lack}: leave the checkpoint to SGLang with "
                "LLM_QUANT_ROCM_NVFP4=0"
            )

    def create_weights(
        self,
        layer: FusedMoE,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self._refuse_others_among_experts(layer)
        inner, self.dtype = intermediate_size_per_partition, params_dtype
        self.experts.declare(
            layer,
            expert_names(layer, self.prefix),
            num_experts,
            hidden_size,
            (inner, inner * layer.moe_tp_size),
            extra_weight_attrs["weight_loader"],
            {},
        )

    def _refuse_others_among_experts(self, layer: FusedMoE) -> None:
        """ValueError where SGLang makes experts of the shared ones, and those are not NVFP4."""
        shared = f"{self.prefix.removesuffix('experts')}shared_experts.gate_up_proj"
        algorithm = self.config.algorithm(
            object.__new__(MergedColumnParallelLinear), self.config.names.in_lists(shared)
        )
        if getattr(layer, "num_fused_shared_experts", 0) and algorithm not in MODELOPT_ALGORITHMS:
            raise ValueError(
                f"{shared} is not NVFP4, and SGLang makes it one of the routed experts, which are: serve with "
                "--disable-shared-experts-fusion"
            )

    @once
    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        self.config.report()
        self.experts.finish(layer)
        warm_up(layer, self.experts.product, self.dtype, self.prefix)

    def apply(self, layer: FusedMoE, dispatch_output: Any) -> Any:
        """This rank's share of the routed experts' output. The model runs shared experts itself."""
        x = dispatch_output.hidden_states
        return combined(layer, self.experts.product(layer, x, **routing(layer, dispatch_output)))
