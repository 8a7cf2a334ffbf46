# SPDX-License-Identifier: Apache-2.0
"""How the routed experts in FP8 are tuned: on Hopper a configuration for each of their two products, elsewhere one for
both."""

import itertools
from typing import Any

import torch

from llm_quant_rocm import hardware
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.ptpc_moe import MoeConfig
from llm_quant_rocm.ops.ptpc_moe import kernels_of
from llm_quant_rocm.tune.ptpc_gemm import random_codes
from llm_quant_rocm.tune.routed import Weights, heights_for, tuner

# Of the kernel for all GPUs, by rows of a tile: rows of the weight, depth, stages and warps.
_CUTS = {
    16: ((64, 256, 5, 4), (128, 128, 3, 4), (128, 128, 3, 8), (128, 128, 5, 8), (128, 256, 3, 8), (128, 256, 5, 8)),
    32: ((64, 128, 4, 4), (128, 128, 3, 4), (128, 128, 5, 4), (128, 256, 5, 8)),
    64: ((128, 128, 3, 4), (128, 128, 4, 4), (128, 256, 4, 4)),
}


def candidates(device: hardware.Hardware, m: int, experts: int, topk: int, hidden: int, inner: int) -> list[PairConfig]:
    """Configurations worth trying for m tokens, the default among them."""
    slots = m * topk
    found = _hopper(slots, experts) if device.arch == "sm_90" else _everywhere(device, slots, experts)
    default = kernels_of(device.arch).default_config(device, slots, experts, hidden, inner)
    return list(dict.fromkeys([default, *found]))


def _hopper(slots: int, experts: int) -> list[PairConfig]:
    """What may be the fastest for either product: on an H200 one of these was within 2% of the best for every product
    of seven models with 1 to 1024 tokens, within 1% in the mean (by hand)."""
    from llm_quant_rocm.kernels.ptpc_wgmma_grouped import Config

    found = []
    for height in heights_for(slots, experts):
        alike: list[list[Any]] = [[MoeConfig(height, *cut) for cut in _CUTS.get(height, ())]]
        if height >= 64:
            alike.append([Config(height, 128), Config(height, 256)])
        found += [PairConfig(*pair) for kernel in alike for pair in itertools.product(kernel, repeat=2)]
    return found


def _everywhere(device: hardware.Hardware, slots: int, experts: int) -> list[PairConfig]:
    """Of the kernel for all GPUs. On CDNA, without bulk copies, two buffers in 64 KiB of local memory: by reasoning,
    never measured on an AMD GPU."""
    most, widths, depths, stages = 64, [32, 64, 128, 256], [64, 128, 256, 512], [2]
    if device.tma:
        most, widths, depths, stages = 200, [64, 128], [128, 256], [3, 4, 5]
    found = []
    for block_m, block_n, block_k, count in itertools.product(heights_for(slots, experts), widths, depths, stages):
        if (block_m + block_n) * block_k * count <= most * 1024 and block_m * block_n < 128 * 256:
            # A wave has 16 rows of the weight at least.
            found += [MoeConfig(block_m, block_n, block_k, count, min(warps, block_n // 16)) for warps in (4, 8)]
    return [PairConfig(config, config) for config in found]


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
    config: PairConfig,
) -> torch.Tensor:
    """The experts' output [T, H]."""
    device, fmt = hardware.detect(x.device), fp8.for_device(x.device)
    w13, w13_scale, w2, w2_scale = weights
    tokens = RoutedTokens(x, topk_weights, topk_ids)
    return kernels_of(device.arch).ptpc_moe(tokens, w13, w13_scale, w2, w2_scale, "silu", fmt, device, config)


TUNER = tuner("ptpc_moe", candidates, weights, run)
