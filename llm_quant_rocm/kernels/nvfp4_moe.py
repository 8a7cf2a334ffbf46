# SPDX-License-Identifier: Apache-2.0
"""Routed experts with 16-bit activations and NVFP4 weights on Hopper: the GEMM's kernel, a tile an expert.

Five launches: the schedule of tiles, the gathered rows of x, the product with w13 whose epilogue applies the
activation, the product with w2 whose epilogue applies the router's weight and puts each row at its slot, and the sum of
each token's slots.
"""

import torch

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.nvfp4_wgmma import Config, gemm
from llm_quant_rocm.kernels.routing import gather_rows, schedule, sum_rows


def default_config(slots: int, experts: int, hidden: int, inner: int) -> Config:
    """What was best on an H100 for the number of rows that an expert has on average (benchmarks/nvfp4_moe.py).

    Small experts are read in small steps: more programs then fit into a multiprocessor, and they do not last long.
    """
    rows = slots / experts
    if rows > 64:
        return Config(128, 128, 64, stages=3, unroll=4, warps=8)
    block_m = 16 if rows <= 12 else 32 if rows <= 40 else 64
    if min(hidden, inner) >= 4096:
        return Config(block_m, 64, 128, stages=5 if block_m < 64 else 3, unroll=2)
    return Config(block_m, 64, 64, stages=5 if block_m == 16 else 3, unroll=4)


def nvfp4_moe(
    x: torch.Tensor,
    w13: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    w2: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inner: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    hardware: Hardware,
    config: Config,
) -> torch.Tensor:
    """Sum over the experts of every token, [T, H], as reference.nvfp4_moe; all tensors contiguous, T > 0.

    w13 and w2 are words, scale bytes and global scales of `formats.nvfp4_wgmma`, w13 with gate and up in turns.
    topk_ids and expert_map are those of `routing.schedule`.
    """
    (experts, hidden), topk = w2[2].shape, topk_ids.shape[1]
    routing = schedule(topk_ids, expert_map, experts, config.block_m, hardware, topk_weights)
    rows = gather_rows(x, routing.row_map, topk, hardware)
    rows = gemm(rows, *w13, None, 2 * inner, hardware, config, tile_expert=routing.tile_expert, activation=activation)
    y = torch.empty((topk_ids.numel(), hidden), dtype=x.dtype, device=x.device)
    gemm(
        rows, *w2, None, hidden, hardware, config,
        tile_expert=routing.tile_expert, row_map=routing.row_map, row_weight=routing.row_weight, out=y,
    )  # fmt: skip
    return sum_rows(y, topk_ids, expert_map, experts, hardware)
