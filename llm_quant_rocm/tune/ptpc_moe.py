# SPDX-License-Identifier: Apache-2.0
"""How the routed experts in FP8 are tuned: on Hopper a configuration for each of their two products, elsewhere one for
both."""

import itertools
from typing import Any

import torch

from llm_quant_rocm import hardware
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.kernels.ptpc_moe import MoeConfig
from llm_quant_rocm.ops.ptpc_moe import kernels_of
from llm_quant_rocm.tune.ptpc_gemm import random_codes
from llm_quant_rocm.tune.routed import Weights, heights_for, tuner


def candidates(device: hardware.Hardware, m: int, experts: int, topk: int, hidden: int, inner: int) -> list[Any]:
    """Configurations worth trying for m tokens, the default among them."""
    slots = m * topk
    found = _everywhere(device, slots, experts)
    if device.arch == "sm_90":
        found += _hopper(slots, experts)
    return list(dict.fromkeys([kernels_of(device.arch).default_config(device, slots, experts), *found]))


def _hopper(slots: int, experts: int) -> list[Any]:
    from llm_quant_rocm.kernels.pair_config import PairConfig
    from llm_quant_rocm.kernels.ptpc_wgmma_grouped import Config

    found: list[Any] = []
    # Rows of padding are read, too: with up to eight, tiles are no higher.
    for height in [8] * (slots <= 8 * experts) + heights_for(slots, experts):
        found += [PairConfig(*pair) for pair in itertools.product((Config(height, 128), Config(height, 256)), repeat=2)]
    return found


def _everywhere(device: hardware.Hardware, slots: int, experts: int) -> list[Any]:
    """Of the kernel for all GPUs. On CDNA, without bulk copies, two buffers in 64 KiB of local memory: by reasoning,
    never measured on an AMD GPU."""
    most, widths, depths, stages = 64, [64, 128, 256], [64, 128], [2]
    if device.tma:
        most, widths, depths, stages = 200, [64, 128], [128, 256], [3, 4, 5]
    found = []
    for block_m, block_n, block_k, count in itertools.product(heights_for(slots, experts), widths, depths, stages):
        if (block_m + block_n) * block_k * count <= most * 1024 and block_m * block_n < 128 * 256:
            found += [MoeConfig(block_m, block_n, block_k, count, warps) for warps in (4, 8)]
    return found


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
    config: Any,
) -> torch.Tensor:
    """The experts' output [T, H]."""
    device, fmt = hardware.detect(x.device), fp8.for_device(x.device)
    w13, w13_scale, w2, w2_scale = weights
    tokens = RoutedTokens(x, topk_weights, topk_ids)
    return kernels_of(device.arch).ptpc_moe(tokens, w13, w13_scale, w2, w2_scale, "silu", fmt, device, config)


TUNER = tuner("ptpc_moe", candidates, weights, run)
