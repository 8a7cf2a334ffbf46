# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers of NVFP4 checkpoints."""

from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.expert_tensors import STEMS, ExpertTensors
from llm_quant_rocm.checkpoint.nvfp4_tensors import assemble, dummy, keep, kept, kept_rows, refuse_ragged
from llm_quant_rocm_vllm.experts import expert_map, expert_names, lacking

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.nvfp4 import NvFp4Config


class NvFp4MoEMethod(FusedMoEMethodBase):
    """Serves the routed experts of one layer.

    The served layer holds what `nvfp4_tensors.keep` gives it: prepared weights w13 [E, 2I, H] (gate rows, then up rows)
    and w2 [E, H, I] with a global scale a row. E and I are this rank's share. `w13_input_global_scale` and
    `w2_input_global_scale` [E] are there with activations="nvfp4" only.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
        ValueError: activations="nvfp4" in a model that is to be compiled.
    """

    def __init__(self, config: "NvFp4Config", layer: RoutedExperts, prefix: str) -> None:
        super().__init__(layer.moe_config)
        self.config = config
        self.prefix = prefix
        self.is_dummy = get_current_vllm_config().load_config.load_format == "dummy"
        self.w4a4 = config.options.activations == "nvfp4"
        lack = lacking(layer.moe_config) or ("VLLM_BATCH_INVARIANT=1" if envs.VLLM_BATCH_INVARIANT else None)
        if lack:
            raise NotImplementedError(
                f"{prefix}: nvfp4_triton does not serve experts with {lack}: leave the checkpoint to vLLM with "
                "LLM_QUANT_ROCM_NVFP4=0"
            )
        if self.w4a4 and not get_current_vllm_config().model_config.enforce_eager:
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
        hidden, inner = hidden_size, intermediate_size_per_partition
        whole_inner = inner * self.moe.tp_size
        refuse_ragged(f"{self.prefix}.*.{layer.ckpt_gate_proj_name}", hidden, hidden)
        refuse_ragged(f"{self.prefix}.*.{layer.ckpt_down_proj_name}", inner, whole_inner)
        self.checkpoint = ExpertTensors(
            layer,
            self.prefix,
            expert_names(layer, self.prefix),
            self.config.tensors,
            extra_weight_attrs.pop("weight_loader"),
            extra_weight_attrs,
        )
        self.checkpoint.add("w13_", num_experts, (2 * inner, hidden), (whole_inner, hidden))
        self.checkpoint.add("w2_", num_experts, (hidden, inner), (hidden, whole_inner))

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
        names = self.config.tensors
        for stem in STEMS:
            codes, scales = (getattr(layer, stem + tensor).data for tensor in (names.codes, names.scales))
            if self.is_dummy:
                weight = dummy(codes, scales)
            else:
                weight = assemble(names, codes, scales, self.checkpoint.pieces(stem))
            self.checkpoint.remove(stem)
            keep(layer, weight, stem, in_rows=self.w4a4)
            if self.w4a4:
                experts = codes.shape[0]
                ones = torch.ones(experts)
                scale = ones if self.is_dummy else self.checkpoint.input_global_scales(stem, experts)
                parameter = torch.nn.Parameter(scale.to(codes.device), requires_grad=False)
                setattr(layer, f"{stem}input_global_scale", parameter)
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
        options = {
            "activation": self.moe.activation.value,
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
            "expert_map": expert_map(layer),
        }
        if self.w4a4:
            scales = (layer.w13_input_global_scale, layer.w2_input_global_scale)
            weights = (kept_rows(layer, "w13_"), kept_rows(layer, "w2_"))
            return ops.nvfp4_moe_w4a4(x, *weights, scales, topk_weights, topk_ids, **options)
        return ops.nvfp4_moe(x, kept(layer, "w13_"), kept(layer, "w2_"), topk_weights, topk_ids, **options)
