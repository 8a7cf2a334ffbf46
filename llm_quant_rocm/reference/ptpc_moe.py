# SPDX-License-Identifier: Apache-2.0
"""Routed experts with per-token FP8 activations and per-channel FP8 weights."""

import torch

from llm_quant_rocm.formats import fp8
from llm_quant_rocm.reference.act_and_mul_quant import act_and_mul_quant_fp8
from llm_quant_rocm.reference.per_token_quant import per_token_quant_fp8
from llm_quant_rocm.reference.ptpc_gemm import ptpc_gemm


def ptpc_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    activation: str,
    fmt: fp8.Fp8Format,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Sum over a token's experts, [T, H] in x's dtype T, of

        h = T(quantized x . w13[e]^T)                    gate, then up
        a = T(activation(gate) * up), quantized per token
        y = T((a . w2[e]^T) * router weight)

    x [T, H]; w13 [E, 2I, H] and w2 [E, H, I] E4M3 with scales [E, 2I, 1] and [E, H, 1]; topk_weights [T, k] fp32;
    local_ids [T, k], where -1 is an expert that is not here and adds nothing. The sum is in fp32. `batch_invariant` as
    of `ptpc_gemm`.
    """
    xq, xscale = per_token_quant_fp8(x, fmt)
    slots = x.new_zeros((*local_ids.shape, x.shape[1]))
    for expert in local_ids.unique().tolist():
        if expert < 0:
            continue
        token, slot = (local_ids == expert).nonzero(as_tuple=True)
        h = ptpc_gemm(xq[token], xscale[token], w13[expert], w13_scale[expert], None, x.dtype, batch_invariant)
        aq, ascale = act_and_mul_quant_fp8(h, activation, fmt)
        y = ptpc_gemm(aq, ascale, w2[expert], w2_scale[expert], None, torch.float32, batch_invariant)
        slots[token, slot] = (y * topk_weights[token, slot, None]).to(x.dtype)
    return slots.float().sum(dim=1).to(x.dtype)
