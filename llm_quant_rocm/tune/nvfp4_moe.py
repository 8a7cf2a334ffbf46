# SPDX-License-Identifier: Apache-2.0
"""How the routed experts in NVFP4 are tuned: a configuration for each of their two products."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.kernels.nvfp4_moe import nvfp4_moe
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.ops.nvfp4_gemm import kernels_of
from llm_quant_rocm.tune.nvfp4_gemm import SMS, random_weight
from llm_quant_rocm.tune.routed import Weights, heights_for, tuner

# What a multiprocessor of Hopper has for all its programs, of which each takes 1 KiB more.
_SHARED_BYTES = 228 * 1024


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
    # Rows of padding are read, too: with up to eight, tiles are no higher.
    heights = [*[8] * (slots <= 8 * experts), *heights]
    found = [PairConfig(*pair) for height in heights for pair in product(_hopper(height), repeat=2)]
    return list(dict.fromkeys([default, *found]))


def _hopper(block_m: int) -> list[Any]:
    """What may be the fastest for either product: on an H200 each of these was within 5% of the best for some product
    of six models, of 56 configurations in all (by hand)."""
    from llm_quant_rocm.kernels.nvfp4_wgmma import Config
    from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config as Large
    from llm_quant_rocm.kernels.nvfp4_wgmma_split_tiles import Config as Split

    # A program for each tile; or as many as run together, which share all steps evenly: that is at full speed to the
    # end, as long as the weights are what takes the time.
    whole: dict[int, list[tuple[int, ...]]] = {
        8: [(64, 64, 0, 4, 2), (64, 64, 0, 4, 3), (64, 128, 0, 2, 2), (64, 128, 0, 2, 3)],
        16: [(64, 64, 0, 4, 2), (64, 64, 0, 4, 3), (64, 128, 0, 2, 2), (64, 128, 0, 2, 3)],
        32: [(64, 64, 0, 4, 2), (64, 128, 0, 2, 2), (128, 64, 0, 4, 2, 8)],
        64: [(128, 64, 0, 4, 2, 8)],
    }
    found: list[Any] = [Config(block_m, *fields) for fields in whole.get(block_m, [])]
    if block_m <= 16:
        found += [_shared(block_m, *kind) for kind in ((64, 128, 2, 4), (128, 64, 2, 4), (128, 64, 4, 3))]
    if block_m == 8:
        found += [Split(8, 4, SMS), Split(8, 4, 2 * SMS), Split(8, 2, 2 * SMS)]
    if block_m >= 32:
        found.append(Split(block_m, 2, SMS))
    if block_m >= 64:
        found += [Large(block_m, block_n, 0) for block_n in (128, 256)]
    return found


def _shared(block_m: int, block_n: int, block_k: int, unroll: int, together: int) -> Any:
    """So many programs together on a multiprocessor. The ring takes all the memory that is left to each, up to six
    groups; none spills registers, compiled with Triton 3.6."""
    from llm_quant_rocm.kernels.nvfp4_wgmma import Config

    group_bytes = unroll * block_k * (block_m * 2 + block_n * 9 // 16)
    # The sums change their layout by way of shared memory; barriers take less than 64 bytes.
    sums_bytes = block_m * block_n * 4 + 64
    stages = (_SHARED_BYTES // together - 1024 - sums_bytes) // group_bytes
    return Config(block_m, block_n, block_k, together * SMS, unroll, min(stages, 6))


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
    return nvfp4_moe(RoutedTokens(x, topk_weights, topk_ids), w13, w2, "silu", device, products, config)


TUNER = tuner("nvfp4_moe", candidates, weights, run)
