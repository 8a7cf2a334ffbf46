# SPDX-License-Identifier: Apache-2.0
"""How the routed experts in NVFP4 are tuned. One configuration serves both of their products."""

from typing import Any

import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.kernels.nvfp4_moe import nvfp4_moe
from llm_quant_rocm.ops.nvfp4_gemm import kernels_of
from llm_quant_rocm.tune.nvfp4_gemm import random_weight
from llm_quant_rocm.tune.routed import Weights, heights_for, tuner

# What an H100's multiprocessor has for a program's groups of steps.
_SHARED_BYTES = 227 * 1024


def candidates(device: hardware.Hardware, m: int, experts: int, topk: int, hidden: int, inner: int) -> list[Any]:
    """Configurations worth trying for m tokens, the default among them."""
    heights = heights_for(m * topk, experts)
    found = _hopper(heights) if device.arch == "sm_90" else _cdna(heights)
    return list(dict.fromkeys([kernels_of(device.arch).moe_config(m * topk, experts, hidden, inner), *found]))


def _hopper(heights: list[int]) -> list[Any]:
    """Whose groups of steps fit into shared memory; none spills registers, compiled with Triton 3.6."""
    from llm_quant_rocm.kernels.nvfp4_wgmma import Config

    found = []
    for block_m in heights:
        for block_n, warps in ((64, 4), (128, 8)):
            for block_k, unroll, stages in ((64, 2, 3), (64, 2, 5), (64, 4, 2), (64, 4, 3), (128, 2, 2), (128, 2, 3)):
                group_bytes = unroll * block_k * (block_m * 2 + block_n * 9 // 16)
                # The registers of two programs on a multiprocessor do not hold the deepest steps.
                spills = (block_m, block_k, warps) == (64, 128, 8)
                if group_bytes * stages <= _SHARED_BYTES and not spills:
                    found.append(Config(block_m, block_n, block_k, 0, unroll, stages, warps))
    return found


def _cdna(heights: list[int]) -> list[Any]:
    """By reasoning; never measured on an AMD GPU."""
    from llm_quant_rocm.kernels.nvfp4_mfma import Config

    return [
        Config(block_m, block_n, 1, warps)
        for block_m in heights
        for block_n, warps in ((64, 2), (128, 2), (128, 4))
    ]  # fmt: skip


def weights(experts: int, topk: int, hidden: int, inner: int) -> Weights:
    """Two sets of experts: a layer's exceed the L2 cache."""
    sets = [
        (
            ops.prepare_nvfp4_weight(random_weight((experts, 2 * inner, hidden)), gate_up=True),
            ops.prepare_nvfp4_weight(random_weight((experts, hidden, inner))),
        )
        for _ in range(2)
    ]
    return experts, topk, hidden, sets


def run(
    weights: tuple[Any, Any], x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, config: Any
) -> torch.Tensor:
    """The experts' output [T, H]."""
    device = hardware.detect(x.device)
    w13, w2 = ((weight.codes, weight.scales, weight.global_scale) for weight in weights)
    inner, grouped = weights[1].k, kernels_of(device.arch).grouped_gemm
    return nvfp4_moe(x, w13, w2, inner, topk_weights, topk_ids, None, "silu", device, grouped, config)


TUNER = tuner("nvfp4_moe", candidates, weights, run)
