# SPDX-License-Identifier: Apache-2.0
"""vLLM's routed experts, where it is installed, as `measure.experts` times them."""

from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from llm_quant_rocm import ops

if TYPE_CHECKING:
    from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
    from llm_quant_rocm.measure.experts import Bind


def vllm_bf16(w13: torch.Tensor, w2: torch.Tensor) -> "Bind":
    """vLLM's Triton experts."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    return lambda x, *routing: partial(fused_experts, x, w13, w2, *routing)


def vllm_fp8(w13: torch.Tensor, w2: torch.Tensor) -> "Bind":
    """vLLM's Triton experts in FP8, with one scale a token and one a channel."""
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    (codes13, scale13), (codes2, scale2) = ops.per_token_quant_fp8(w13), ops.per_token_quant_fp8(w2)
    config = fp8_w8a8_moe_quant_config(scale13, scale2, per_act_token_quant=True, per_out_ch_quant=True)
    return lambda x, *routing: partial(fused_experts, x, codes13, codes2, *routing, quant_config=config)


def vllm_cutlass(w13: torch.Tensor, w2: torch.Tensor) -> "Bind":
    """vLLM's CUTLASS experts in FP8, with one scale a token and one a channel: what serves `fp8_per_channel` on Hopper,
    with the quantization and the copy that vLLM puts around them."""
    from vllm.model_executor.layers.fused_moe import MoEActivation, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        fp8_w8a8_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    if not is_workspace_manager_initialized():
        init_workspace_manager(w13.device)
    (codes13, scale13), (codes2, scale2) = ops.per_token_quant_fp8(w13), ops.per_token_quant_fp8(w2)
    scales = fp8_w8a8_moe_quant_config(scale13, scale2, per_act_token_quant=True, per_out_ch_quant=True)
    experts, hidden, inner = codes2.shape

    @cache  # a layer has one, whose buffers all its calls share
    def kernel(tokens: int, topk: int) -> FusedMoEKernel:
        config = FusedMoEConfig(
            num_experts=experts, num_local_experts=experts, num_logical_experts=experts, experts_per_token=topk,
            hidden_dim=hidden, intermediate_size=inner, activation=MoEActivation.SILU, in_dtype=w13.dtype,
            routing_method=RoutingMethodType.Renormalize, max_num_tokens=tokens, device=w13.device,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        )  # fmt: skip
        return FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), CutlassExpertsFp8(config, scales))

    return lambda x, weights, ids: partial(
        kernel(*ids.shape).apply, x, codes13, codes2, weights, ids, activation=MoEActivation.SILU,
        global_num_experts=experts, expert_map=None, apply_router_weight_on_input=False,
    )  # fmt: skip


def vllm_marlin(w13: "NvFp4Weight", w2: "NvFp4Weight") -> "Bind":
    """vLLM's fused Marlin experts, which serve NVFP4 on Hopper, given the workspace that vLLM makes at every call."""
    import vllm._custom_ops as vllm_ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin
    from vllm.scalar_type import scalar_types

    layer = SimpleNamespace(
        num_experts=w2.codes.shape[0],
        hidden_size=w2.n,
        intermediate_size_per_partition=w2.k,
        params_dtype=torch.bfloat16,
    )
    arranged = [(w.codes, w.scales, w.global_scale[:, 0].contiguous()) for w in (w13, w2)]
    words13, scales13, global13, words2, scales2, global2 = prepare_nvfp4_moe_layer_for_marlin(
        layer, *arranged[0], *arranged[1], is_act_and_mul=True
    )

    def experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        fused_marlin_moe(
            x, words13, words2, None, None, scales13, scales2, weights, ids, scalar_types.float4_e2m1f.id,
            global_scale1=global13, global_scale2=global2, workspace=layer.workspace, output=out,
            moe_sum=lambda parts, into, *_: vllm_ops.moe_sum(parts, into),
        )  # fmt: skip
        return out

    return lambda x, *routing: partial(experts, x, *routing)
