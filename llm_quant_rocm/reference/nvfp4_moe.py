# SPDX-License-Identifier: Apache-2.0
"""Routed experts with 16-bit activations and NVFP4 weights."""

import torch

from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.reference.act_and_mul_quant import act_and_mul
from llm_quant_rocm.reference.nvfp4_gemm import nvfp4_gemm


def nvfp4_moe(
    x: torch.Tensor,
    w13: nvfp4.NvFp4Weight,
    w2: nvfp4.NvFp4Weight,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    activation: str,
    input_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Sum over a token's experts, [T, H] in x's dtype T, of

        h = T(x . w13[e]^T)                    gate, then up
        a = T(activation(gate) * up)
        y = T((a . w2[e]^T) * router weight)

    x [T, H]; w13 [E, 2I, H] and w2 [E, H, I] with a global scale a row; topk_weights [T, k] fp32; local_ids [T, k],
    where -1 is an expert that is not here and adds nothing. The sum is in fp32. With `input_scales`, fp32 [E] for x and
    [E] for a, both become NVFP4 and back first (`formats.nvfp4.fake_quantize_activation`). `batch_invariant` as of
    `nvfp4_gemm`.
    """
    slots = x.new_zeros((*local_ids.shape, x.shape[1]))
    for index in local_ids.unique().tolist():
        if index < 0:
            continue
        token, slot = (local_ids == index).nonzero(as_tuple=True)
        outer = x[token]
        if input_scales is not None:
            outer = nvfp4.fake_quantize_activation(outer, input_scales[0][index])
        inner = act_and_mul(nvfp4_gemm(outer, _expert(w13, index), None, x.dtype, batch_invariant), activation)
        if input_scales is not None:
            inner = nvfp4.fake_quantize_activation(inner, input_scales[1][index])
        y = nvfp4_gemm(inner, _expert(w2, index), None, torch.float32, batch_invariant)
        slots[token, slot] = (y * topk_weights[token, slot, None]).to(x.dtype)
    return slots.float().sum(dim=1).to(x.dtype)


def _expert(weight: nvfp4.NvFp4Weight, index: int) -> nvfp4.NvFp4Weight:
    return nvfp4.NvFp4Weight(weight.codes[index], weight.scales[index], weight.global_scale[index])
