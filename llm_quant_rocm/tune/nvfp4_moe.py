# SPDX-License-Identifier: Apache-2.0
"""How the routed experts in NVFP4 are tuned: a configuration for each of their two products."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.kernels.nvfp4_moe import nvfp4_moe
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.ops.nvfp4_gemm import kernels_of
from llm_quant_rocm.tune.nvfp4_gemm import random_weight
from llm_quant_rocm.tune.routed import Weights, heights_for, tuner

# What an H100's multiprocessor has for a program's groups of steps, and for all programs; each takes 1 KiB more.
_SHARED_BYTES, _SHARED_BYTES_OF_ALL = 227 * 1024, 228 * 1024
_MULTIPROCESSORS = 132


def candidates(device: hardware.Hardware, m: int, experts: int, topk: int, hidden: int, inner: int) -> list[PairConfig]:
    """Configurations worth trying for m tokens, the default among them."""
    slots = m * topk
    heights = heights_for(slots, experts)
    default = kernels_of(device.arch).moe_config(slots, experts, hidden, inner, device)
    if device.arch != "sm_90":
        # Of many slots there are tiles enough; and parts have four steps of 128 columns or more.
        of_w13, of_w2 = (
            {1, usual.split_k, *(parts for parts in (2, 4, 8) if slots <= 4 * experts and k >= parts * 512)}
            for usual, k in ((default.w13, hidden), (default.w2, inner))
        )
        found = [
            PairConfig(replace(config, split_k=first), replace(config, split_k=second))
            for config, first, second in product(_cdna(heights), of_w13, of_w2)
        ]
        return list(dict.fromkeys([default, *found]))
    found = [default, *(PairConfig(config, config) for config in _whole(heights))]
    found += [PairConfig(*pair) for height in heights for pair in product(_large(height), repeat=2)]
    # With few rows a product is as long as the weights are read, and programs that share it evenly read at full speed
    # to the end. Rows of padding are read, too: with up to eight, tiles are no higher.
    for block_m in [8, 16] if slots <= 8 * experts else [16] if heights[0] == 16 else []:
        tried = [*_shared(block_m), *_small(block_m)]
        found += [PairConfig(config, config) for config in tried]
        found += [PairConfig(*pair) for pair in product(tried, repeat=2)]
    return list(dict.fromkeys(found))


def _shared(block_m: int) -> list[Any]:
    """Programs that run together, up to four on a multiprocessor, and share all steps evenly. The ring takes all the
    memory that is left to each, up to six groups; none spills registers, compiled with Triton 3.6."""
    from llm_quant_rocm.kernels.nvfp4_wgmma import Config

    found = []
    kinds = ((64, 128, 2, 4), (64, 128, 2, 2), (128, 64, 2, 4), (128, 64, 4, 3), (128, 64, 4, 2))
    # With 16 rows none but the first has been the fastest.
    for block_n, block_k, unroll, together in kinds if block_m == 8 else kinds[:1]:
        group_bytes = unroll * block_k * (block_m * 2 + block_n * 9 // 16)
        # The sums change their layout by way of shared memory; barriers take less than 64 bytes.
        sums_bytes = block_m * block_n * 4 + 64
        stages = (_SHARED_BYTES_OF_ALL // together - 1024 - sums_bytes) // group_bytes
        if stages >= 2:
            programs = together * _MULTIPROCESSORS
            found.append(Config(block_m, block_n, block_k, programs, unroll, min(stages, 6)))
    return found


def _small(block_m: int) -> list[Any]:
    """A small program for each tile, 256 columns at a time, and one program on each multiprocessor whose consumers
    split K in four, or in two: with 8 rows two such programs."""
    from llm_quant_rocm.kernels.nvfp4_wgmma_split_tiles import Config as Split

    found = [config for config in _whole([block_m]) if config.block_n == 64 and config.unroll * config.block_k == 256]
    together = 2 if block_m == 8 else 1
    return [*found, Split(block_m, 4, _MULTIPROCESSORS), Split(block_m, 2, together * _MULTIPROCESSORS)]


def _whole(heights: list[int]) -> list[Any]:
    """A program for each tile, whose groups of steps fit into shared memory; none spills registers either."""
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


def _large(block_m: int) -> list[Any]:
    """Of the kernel with one program on a multiprocessor."""
    from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config

    return [Config(block_m, block_n, 0) for block_n in (128, 256)] if block_m in (64, 128) else []


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
    weights: tuple[Any, Any], x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, config: PairConfig
) -> torch.Tensor:
    """The experts' output [T, H]."""
    device = hardware.detect(x.device)
    w13, w2 = ((weight.codes, weight.scales, weight.global_scale) for weight in weights)
    products = kernels_of(device.arch).expert_products
    return nvfp4_moe(x, w13, w2, topk_weights, topk_ids, None, None, "silu", device, products, config)


TUNER = tuner("nvfp4_moe", candidates, weights, run)
