# SPDX-License-Identifier: Apache-2.0
"""Routed experts with weights and activations in NVFP4, as hardware with NVFP4 units computes them: to evaluate."""

import torch

from llm_quant_rocm import reference
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from llm_quant_rocm.ops._register import isolated
from llm_quant_rocm.ops._routing import check_device, check_routing, routed
from llm_quant_rocm.ops.nvfp4_gemm import HALF

NAME = "nvfp4_moe_w4a4"


def nvfp4_moe_w4a4(
    x: torch.Tensor,
    w13: NvFp4Weight,
    w2: NvFp4Weight,
    input_scales: tuple[torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """`nvfp4_moe` with the inputs of both products rounded to NVFP4: [T, H] in x's dtype.

    `input_scales` are fp32 [E] each, the encoding scales (2688 / amax) of every expert's input and of its activation.
    The reference runs it: slow, without a gradient, and not for CUDA graphs, as the host reads which experts have
    tokens.

    Raises:
        TypeError: x is neither bf16 nor fp16, input_scales are not fp32, or a dtype of the router's results,
            `expert_map` or `padding`.
        ValueError: shapes, devices, the activation, or a router weight on the input with k > 1.
    """
    if x.dtype not in HALF:
        raise TypeError(f"{NAME}: x must be bf16 or fp16, not {x.dtype}")
    experts = w13.codes.shape[0]
    if not (x.dim() == 2 and w13.k == w2.n == x.shape[1] and w13.n == 2 * w2.k and w2.codes.shape[0] == experts):
        raise ValueError(
            f"{NAME}: x {tuple(x.shape)}, w13 {(experts, w13.n, w13.k)} and w2 {(w2.codes.shape[0], w2.n, w2.k)} "
            "do not fit: [T, H], [E, 2I, H] and [E, H, I] are needed"
        )
    for scale in input_scales:
        if scale.dtype != torch.float32:
            raise TypeError(f"{NAME}: input_scales must be fp32, not {scale.dtype}")
        if scale.shape != (experts,):
            raise ValueError(f"{NAME}: input_scales must be [{experts}] each, not {list(scale.shape)}")
        check_device(NAME, "input_scales", scale, x)
    for label, weight in (("w13", w13), ("w2", w2)):
        check_device(NAME, label, weight.codes, x)
    check_routing(NAME, x, topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, padding)
    with isolated(x):
        tokens = routed(x, topk_weights, topk_ids, apply_router_weight_on_input, expert_map, padding)
        ids = tokens.local_ids(experts)
        return reference.nvfp4_moe(tokens.x, w13, w2, tokens.weights, ids, activation, input_scales, batch_invariant)
