# SPDX-License-Identifier: Apache-2.0
"""Routed experts with 16-bit activations and NVFP4 weights: an architecture's GEMM kernel, with an expert to each tile.

Five launches, six for many slots: the schedule of tiles, the gathered rows of x, the product with w13 whose epilogue
applies the activation, the product with w2 whose epilogue applies the router's weight, and the sum of each token's
slots. The product with w2 leaves its rows where they are in the tiles, if its kernel stores whole tiles; then the sum
finds them by the schedule. Else it puts each at its slot.
"""

from collections.abc import Callable

import torch

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.routing import gather_rows, schedule, sum_rows

# Codes, scales and global scales of the experts.
Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def nvfp4_moe(
    x: torch.Tensor,
    w13: Weight,
    w2: Weight,
    inner: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    padding: torch.Tensor | None,
    activation: str,
    hardware: Hardware,
    gemm: Callable[..., torch.Tensor],
    config: PairConfig,
) -> torch.Tensor:
    """Sum over the experts of every token, [T, H], as reference.nvfp4_moe; all tensors contiguous, T > 0.

    w13 and w2 are packed for `gemm`, the `grouped_gemm` of `nvfp4_hopper` or `nvfp4_cdna`, w13 with gate and up in
    turns; `config` has its configurations. topk_ids, expert_map and padding are those of `routing.schedule`.
    """
    (experts, hidden), topk = w2[2].shape, topk_ids.shape[1]
    routing = schedule(topk_ids, expert_map, experts, config.block_m, hardware, topk_weights, padding)
    rows = gather_rows(x, routing.row_map, topk, hardware)
    h = gemm(rows, w13, 2 * inner, hardware, config.w13, routing, activation=activation)
    if config.w2.stores_tiles:
        # In the place of x's rows, which nobody needs any more.
        y, row_map, slot_row = rows, None, routing.slot_row
    else:
        y, row_map, slot_row = x.new_empty((topk_ids.numel(), hidden)), routing.row_map, None
    gemm(h, w2, hidden, hardware, config.w2, routing, row_map=row_map, row_weight=routing.row_weight, out=y)
    return sum_rows(y, topk_ids, expert_map, experts, hardware, padding=padding, slot_row=slot_row)
