# SPDX-License-Identifier: Apache-2.0
"""What the methods for mixture-of-experts layers share."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase, RoutedExperts

from llm_quant_rocm.checkpoint.expert_tensors import ExpertNames
from llm_quant_rocm.checkpoint.warm_layers import warm_experts
from llm_quant_rocm.reference.act_and_mul_quant import ACTIVATIONS
from llm_quant_rocm_vllm import padding
from llm_quant_rocm_vllm.engine_layers import PreparedOnce, is_dummy


def lacking(moe: FusedMoEConfig, prefix: str) -> str | None:
    """What our operators lack to serve the experts `prefix` of this configuration, or None."""
    if moe.activation.value not in ACTIVATIONS:
        return f"the activation {moe.activation.value}"
    if moe.swiglu_limit is not None:
        return "a clamped SwiGLU (swiglu_limit)"
    if moe.has_bias:
        return "biases"
    if moe.is_lora_enabled and _have_adapters(prefix):
        return "LoRA adapters (unless --lora-target-modules names other layers alone)"
    if moe.moe_parallel_config.use_all2all_kernels:
        return "expert parallelism over data-parallel ranks (--enable-expert-parallel with --data-parallel-size)"
    if moe.moe_parallel_config.enable_eplb:
        return "load balancing of experts (--enable-eplb)"
    return None


def _have_adapters(prefix: str) -> bool:
    """Whether vLLM gives the experts `prefix` adapters, in a model of which some layers have them."""
    from vllm.lora.utils import is_in_target_modules  # which imports every layer that may have one

    lora = get_current_vllm_config().lora_config
    return lora is not None and is_in_target_modules(prefix, lora.target_modules)


def expert_names(layer: RoutedExperts, prefix: str) -> ExpertNames:
    """Which experts `layer` has on this rank, and the checkpoint's names of them."""
    projections = {
        "w1": layer.ckpt_gate_proj_name,
        "w2": layer.ckpt_down_proj_name,
        "w3": layer.ckpt_up_proj_name,
    }

    def local(expert: int) -> int:
        return expert if layer._expert_map is None else int(layer._expert_map[expert])

    def whole(expert: int) -> int:
        return expert if layer._expert_map is None else int((layer._expert_map == expert).nonzero()[0])

    return ExpertNames(lambda expert, shard: f"{prefix}.{expert}.{projections[shard]}", local, whole)


class ExpertsMethod(PreparedOnce, FusedMoEMethodBase):
    """Serves the routed experts of one layer by one of our operators.

    Attributes:
        name: what users call the method.
        otherwise: how else they may serve what it lacks; "{prefix}" stands for the layer.
        is_dummy: whether weights are random instead of a checkpoint's.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
    """

    name: ClassVar[str]
    otherwise: ClassVar[str]

    def __init__(self, layer: RoutedExperts, prefix: str) -> None:
        super().__init__(layer.moe_config)
        self.prefix = prefix
        if lack := lacking(layer.moe_config, prefix):
            raise NotImplementedError(
                f"{prefix}: {self.name} does not serve experts with {lack}: {self.otherwise.format(prefix=prefix)}"
            )
        self.vllm_config = get_current_vllm_config()
        self.is_dummy = is_dummy(self.vllm_config)
        self.batch_invariant = envs.VLLM_BATCH_INVARIANT
        self._padding_is_to_find = padding.is_to_find(self.vllm_config)

    @abstractmethod
    def compute(
        self, layer: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """The output [T, H] of the routed experts; `options` are those of the operators."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """The sizes as they are: the operators take any, and padding would enter scales."""
        return hidden_size, intermediate_size_per_partition

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
        places = padding.places(len(x)) if self._padding_is_to_find else None
        return self._output(layer, x, topk_weights, topk_ids, places)

    def _output(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        places: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.compute(
            layer,
            x,
            topk_weights,
            topk_ids,
            activation=self.moe.activation.value,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            expert_map=layer._expert_map,  # its property is a mask of 0 and 1 where aiter's kernels are switched on
            padding=places,
        )

    def warm_up(self, layer: RoutedExperts) -> None:
        def product(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
            self._output(layer, x, topk_weights, topk_ids, None)
            if self._padding_is_to_find:
                places = torch.zeros(len(x), dtype=torch.int64, device=x.device)
                self._output(layer, x, topk_weights, topk_ids, places)

        moe = self.moe
        # Of all ranks whose tokens these experts compute.
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens * moe.dp_size
        warm_experts(layer, product, moe.in_dtype, moe.hidden_dim, moe.experts_per_token, tokens, self.prefix)
