# SPDX-License-Identifier: Apache-2.0
"""Routed experts with 16-bit activations and NVFP4 weights: a schedule of tiles, an architecture's products for each
tile with its expert, and the sum of each token's slots.

The epilogue of the product with w13 applies the activation, that of the product with w2 the router's weight.
"""

from collections.abc import Callable

import torch

from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.routing import schedule, sum_rows

# Codes, scales and global scales of the experts.
Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# The rows of all slots, of H or I columns in 16 bits, have fewer bytes: that bounds the memory for them, and some
# kernels have 31 bits for where a row is.
MOST_BYTES = 2**31


def rows_of(weight: Weight) -> int:
    """How many rows an expert's weight has: each has a global scale."""
    return weight[2].shape[1]


def nvfp4_moe(
    tokens: RoutedTokens,
    w13: Weight,
    w2: Weight,
    activation: str,
    hardware: Hardware,
    products: Callable[..., tuple[torch.Tensor, bool]],
    config: PairConfig,
) -> torch.Tensor:
    """Sum over the experts of every token, [T, H], as reference.nvfp4_moe; all tensors contiguous, T > 0.

    w13 and w2 are packed for `products`, the `expert_products` of `nvfp4_hopper` or `nvfp4_cdna`, w13 with gate and up
    in turns; `config` has its configurations. It gives the slots' results, and whether they are in the schedule's
    tiles. Of very many tokens some are computed after the others.
    """
    x, weights, ids, expert_map, padding = tokens
    experts, (count, topk) = w2[2].shape[0], ids.shape
    most = max((MOST_BYTES - 1) // (topk * max(rows_of(w2), rows_of(w13) // 2) * x.element_size()), 1)
    if count > most:
        parts = (tokens.part(first, most) for first in range(0, count, most))
        return torch.cat([nvfp4_moe(part, w13, w2, activation, hardware, products, config) for part in parts])
    routing = schedule(ids, expert_map, experts, config.block_m, hardware, weights, padding)
    y, in_tiles = products(x, w13, w2, activation, routing, hardware, config)
    return sum_rows(y, routing.slot_row, topk, hardware, in_tiles=in_tiles)
