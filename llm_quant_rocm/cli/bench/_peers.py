# SPDX-License-Identifier: Apache-2.0
"""vLLM's routed experts, where it is installed, as `measure.experts` times them."""

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
    from llm_quant_rocm.measure.experts import Bind


def vllm_bf16(w13: torch.Tensor, w2: torch.Tensor) -> "Bind":
    """vLLM's Triton experts."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    return lambda x, *routing: partial(fused_experts, x, w13, w2, *routing)


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
