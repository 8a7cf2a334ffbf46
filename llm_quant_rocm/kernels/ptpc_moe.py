# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8: two grouped matrix products, and activation with quantization between them.

A slot is one (token, expert) pair. Slots are sorted by expert and cut into tiles of one expert each (`routing`); a
program multiplies one of them by one tile of its expert's rows. Rows stay where they are and are found through the
map of rows to slots. Everything that depends on the routing stays on the device: the grid is an upper bound, and
programs beyond the last tile return at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.fp8 import Fp8Format
from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.act_and_mul_quant import act_and_mul_quant_fp8
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch
from llm_quant_rocm.kernels.per_token_quant import per_token_quant_fp8
from llm_quant_rocm.kernels.ptpc_gemm import load_step, multiply_step
from llm_quant_rocm.kernels.routing import schedule, sum_rows
from llm_quant_rocm.kernels.sizes import cdiv
from llm_quant_rocm.kernels.xcd import neighbours


@dataclass(frozen=True)
class MoeConfig:
    """Tiles of a product: slots, rows of the weight, depth; Triton's num_stages and num_warps."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


def config_of(fields: Mapping[str, Any]) -> PairConfig:
    """The configuration with these fields, as configs/ptpc_moe holds it."""
    return PairConfig.of(fields, lambda one: MoeConfig(**one))


def default_config(hardware: Hardware, slots: int, experts: int, hidden: int, inner: int) -> PairConfig:
    """Blocks about as tall as an expert has slots: a taller one multiplies rows that are not there, of a lower one two
    read the weight. With bulk copies, what an H100 took."""
    products = (2 * inner, hidden), (hidden, inner)
    return PairConfig(*(_default(hardware, slots / experts, min(slots, experts), n, k) for n, k in products))


def batch_invariant(config: PairConfig, hardware: Hardware, experts: int, hidden: int, inner: int) -> PairConfig:
    """`ptpc_gemm.batch_invariant` of both products."""
    return default_config(hardware, 64 * experts, experts, hidden, inner)


def _default(hardware: Hardware, per_expert: float, chosen: int, n: int, k: int) -> MoeConfig:
    """For a product [slots, n] of sums over k with at most `chosen` of the experts."""
    if hardware.tma:
        if per_expert <= 24:
            return MoeConfig(16 if per_expert <= 6 else 32, 64, 256, 3, 4)
        return MoeConfig(64 if per_expert <= 96 else 128, 128, 128, 3, 4)
    if per_expert <= 16:
        return _on_all_units(hardware, chosen, n, k)
    if per_expert <= 96 or not hardware.fp8_units:
        return MoeConfig(64, 128, 128 if hardware.fp8_units else 64, 2, 4)
    return MoeConfig(128, 128, 128, 2, 8)


def _on_all_units(hardware: Hardware, chosen: int, n: int, k: int) -> MoeConfig:
    """Tiles of 16 slots, of which each compute unit has one where they would be fewer: half as wide, and as deep again,
    a program has as many bytes on their way, and there are twice as many programs. Memory is busy with about what a
    program on each unit has there (`ptpc_gemm.default_config`). By counting, not measured on AMD."""
    width, depth = 128 if hardware.fp8_units else 64, 128
    while width > 32 and chosen * cdiv(n, width) < hardware.units:
        width //= 2
        depth *= 2 if k % (2 * depth) == 0 else 1
    return MoeConfig(16, width, depth, 2, 4 if width > 32 else 2)


@triton.jit
def grouped_gemm_kernel(
    x_ptr, xscale_ptr, w_ptr, wscale_ptr, out_ptr, row_map_ptr, tile_expert_ptr, row_weight_ptr, N, K,
    SLOTS_PER_ROW: tl.constexpr, DECODE: tl.constexpr, SWAP_AB: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    XCDS: tl.constexpr
):  # fmt: skip
    """out[slot] = (x[slot // SLOTS_PER_ROW] . w[expert]^T) * scales, times the router weight if there is one."""
    # As in `ptpc_gemm`.
    BY_COLUMN: tl.constexpr = tl.target_info.is_hip() and not (SWAP_AB or tl.target_info.is_hip_cdna4())
    if PDL:
        programmatic_launch()
    tile, tile_n = tl.program_id(0), tl.program_id(1)
    if XCDS > 1:
        tiles = tl.num_programs(0)
        work = neighbours(tile_n * tiles + tile, tiles * tl.num_programs(1), XCDS)
        tile, tile_n = work % tiles, work // tiles
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(row_map_ptr + place)
    there = slot >= 0
    # Rows and columns beyond the edge read the first one again, and are not stored: no mask in the loop.
    slot = tl.where(there, slot, tl.load(row_map_ptr + tile * BLOCK_M)).to(tl.int64)
    row = slot // SLOTS_PER_ROW
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = expert.to(tl.int64) * N + tl.where(column < N, column, 0)
    depth = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + row[:, None] * K
    w_rows = w_ptr + (w_row[None, :] if BY_COLUMN else w_row[:, None]) * K
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a, b = load_step(x_rows, w_rows, k + depth, K, EVEN_K, BY_COLUMN)
        acc = multiply_step(acc, a, b, DECODE, SWAP_AB, BY_COLUMN)
    out = acc.T if SWAP_AB else acc
    # In this order, as in `ptpc_wgmma_grouped`: a slot's bits are the same, whichever kernel its number calls for.
    scale_of_x = tl.load(xscale_ptr + row)
    if row_weight_ptr is not None:
        scale_of_x *= tl.load(row_weight_ptr + place)
    out *= scale_of_x[:, None]
    out *= tl.load(wscale_ptr + w_row)[None, :]
    out_place = slot[:, None] * N + column[None, :]
    tl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=there[:, None] & (column < N)[None, :])


def ptpc_moe(
    tokens: RoutedTokens,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    activation: str,
    fmt: Fp8Format,
    hardware: Hardware,
    config: PairConfig,
) -> torch.Tensor:
    """Sum over the experts of every token, [T, H], as reference.ptpc_moe; all tensors contiguous, T > 0."""
    x, weights, ids, expert_map, padding = tokens
    topk, slots = ids.shape[1], ids.numel()
    routing = schedule(ids, expert_map, w13.shape[0], config.block_m, hardware, weights, padding)
    decode = not hardware.fp8_units

    def multiply(
        a: torch.Tensor,
        ascale: torch.Tensor,
        w: torch.Tensor,
        wscale: torch.Tensor,
        per_row: int,
        row_weight: torch.Tensor | None,
        config: MoeConfig,
    ) -> torch.Tensor:
        n, k = w.shape[1:]
        out = torch.empty((slots, n), dtype=x.dtype, device=x.device)
        launch(
            grouped_gemm_kernel, (routing.tile_expert.numel(), cdiv(n, config.block_n)),
            a.view(torch.uint8) if decode else a, ascale, w.view(torch.uint8) if decode else w, wscale, out,
            routing.row_map, routing.tile_expert, row_weight, n, k,
            SLOTS_PER_ROW=per_row, DECODE=decode, SWAP_AB=hardware.tma and config.block_m < 64,
            EVEN_K=k % config.block_k == 0, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            STAGES=config.stages, PDL=hardware.pdl, XCDS=hardware.xcds, num_warps=config.warps,
            num_stages=config.stages, **pdl_option(hardware),
        )  # fmt: skip
        return out

    xq, xscale = per_token_quant_fp8(x, fmt, beside=True)  # the schedule, which reads ids
    h = multiply(xq, xscale, w13, w13_scale, topk, None, config.w13)
    aq, ascale = act_and_mul_quant_fp8(h, activation, fmt, hardware, routing.slot_row)
    y = multiply(aq, ascale, w2, w2_scale, 1, routing.row_weight, config.w2)
    return sum_rows(y, routing.slot_row, topk, hardware, in_tiles=False)
