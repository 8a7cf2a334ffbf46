# SPDX-License-Identifier: Apache-2.0
"""How the routed experts in FP8 are tuned. One configuration serves both of their products."""

import itertools

import torch

from llm_quant_rocm import hardware
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.kernels.ptpc_moe import MoeConfig, default_config, ptpc_moe
from llm_quant_rocm.tune.ptpc_gemm import random_codes
from llm_quant_rocm.tune.routed import Weights, heights_for, tuner


def candidates(device: hardware.Hardware, m: int, experts: int, topk: int, hidden: int, inner: int) -> list[MoeConfig]:
    """Configurations worth trying for m tokens, the default among them."""
    heights = heights_for(m * topk, experts)
    # Two buffers in 64 KiB of local memory where there is no bulk copy, on CDNA.
    most, depths, stages = (200, (128, 256), (3, 4, 5)) if device.tma else (64, (64, 128), (2,))
    found = []
    for block_m, block_n, block_k, count in itertools.product(heights, (64, 128, 256), depths, stages):
        if (block_m + block_n) * block_k * count <= most * 1024 and block_m * block_n < 128 * 256:
            found += [MoeConfig(block_m, block_n, block_k, count, warps) for warps in (4, 8)]
    return list(dict.fromkeys([default_config(device, m * topk, experts), *found]))


def weights(experts: int, topk: int, hidden: int, inner: int) -> Weights:
    """Two sets of experts: a layer's exceed the L2 cache."""
    sets = [
        [
            part
            for n, k in ((2 * inner, hidden), (hidden, inner))
            for part in (random_codes((experts, n, k)), torch.rand(experts, n, 1, device="cuda") * 1e-3 + 1e-4)
        ]
        for _ in range(2)
    ]
    return experts, topk, hidden, sets


def run(
    weights: list[torch.Tensor],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    config: MoeConfig,
) -> torch.Tensor:
    """The experts' output [T, H]."""
    device, fmt = hardware.detect(x.device), fp8.for_device(x.device)
    w13, w13_scale, w2, w2_scale = weights
    return ptpc_moe(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, None, None, "silu", fmt, device, config)


TUNER = tuner("ptpc_moe", candidates, weights, run)
