# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8 on Hopper: which kernel multiplies, and how.

Six launches, seven for many slots: the schedule of tiles, the quantized rows of x, the product with w13, whose epilogue
may apply the activation, the activations quantized, the product with w2 and the router's weight, and the sum of each
token's slots. Everything between the first and the last is in the order of the schedule's rows, so that bulk copies
read and write whole tiles: a token's codes go to the row of each of its slots, and the sum finds them there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.fp8 import Fp8Format
from llm_quant_rocm.formats.routed import RoutedTokens
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import ptpc_moe as everywhere
from llm_quant_rocm.kernels.act_and_mul_quant import act_and_mul_quant_fp8
from llm_quant_rocm.kernels.fp8_row import larger, load_block, row_launch, store_quantized_row, widen
from llm_quant_rocm.kernels.hopper import SMS
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch
from llm_quant_rocm.kernels.ptpc_wgmma_grouped import Config, grouped_gemm
from llm_quant_rocm.kernels.routing import schedule, sum_rows
from llm_quant_rocm.kernels.sizes import cdiv

# Up to how many rows an expert has on average, tiles of so many are the fastest: a little higher than the average, so
# that few experts have two.
_HEIGHTS = ((14, 16), (27, 32), (60, 64))
# Columns: sums of up to 768 were measured as short, of 2048 and more as long, and none between.
_SHORT = 1024


def config_of(fields: Mapping[str, Any]) -> PairConfig:
    """The configuration with these fields, as configs/ptpc_moe holds it: both of the kernel for Hopper, or of the one
    of all architectures."""
    return PairConfig.of(fields, lambda one: everywhere.MoeConfig(**one) if "block_k" in one else Config(**one))


def default_config(hardware: Hardware, slots: int, experts: int, hidden: int, inner: int) -> PairConfig:
    """What should be fastest for `slots` rows of `experts` that nobody has measured, of whatever size they are.

    What an H200 took least with, in the mean over the experts of seven models, each with 1 to 4096 tokens: with this
    1% slower than the best of what was tried for each, and 5% at most (by hand). With few rows the time is that of
    reading the weights, for which the kernel of all architectures needs no copies of x.
    """
    for most, block_m in _HEIGHTS:
        if slots <= most * experts:
            chosen = min(slots, experts)
            # The last tile of an expert is half full on average.
            tiles_m = max(chosen, slots / block_m + chosen / 2)
            return PairConfig(
                _of_tiles(block_m, tiles_m, 2 * inner, hidden), _of_tiles(block_m, tiles_m, hidden, inner)
            )
    return PairConfig(Config(128, 256), Config(128, 256))


def _of_tiles(block_m: int, tiles_m: float, n: int, k: int) -> everywhere.MoeConfig:
    """For a product [rows, n] of sums over k. Where tiles are few, a program has more of a multiprocessor's shared
    memory for what it has asked for."""
    tiles = tiles_m * cdiv(n, 128)
    if block_m == 16:
        return everywhere.MoeConfig(16, 128, *((128, 3) if k <= _SHORT else (256, 5 if tiles <= SMS else 3)), 8)
    if block_m == 64 and tiles <= 4 * SMS:
        return everywhere.MoeConfig(64, 128, 256, 4, 4)
    return everywhere.MoeConfig(block_m, 128, 128, 3, 4)


def batch_invariant(config: PairConfig, hardware: Hardware, experts: int, hidden: int, inner: int) -> PairConfig:
    """`ptpc_hopper.batch_invariant` of both products. No sum is in parts, but the activation in the epilogue has other
    bits than the kernel that quantizes behind it."""
    if isinstance(config.w13, Config) and config.w13.fuses:
        return replace(config, w13=replace(config.w13, block_n=128))
    return config


def serves(x: torch.Tensor, hidden: int, inner: int) -> bool:
    """Whether the kernel for Hopper can multiply: rows of the weights are lines of 16 bytes, and x has 16 bits."""
    return x.dtype.itemsize == 2 and hidden % 16 == 0 and inner % 16 == 0


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
    """`kernels.ptpc_moe.ptpc_moe` under either kernel's configuration. What the one for Hopper does not serve, the
    other does."""
    x, weights, ids, expert_map, padding = tokens
    experts, hidden, inner = w2.shape
    if isinstance(config.w13, Config) and not (serves(x, hidden, inner) and _aligned(w13, w2)):
        config = everywhere.default_config(hardware, ids.numel(), experts, hidden, inner)
    if isinstance(config.w13, everywhere.MoeConfig):
        return everywhere.ptpc_moe(tokens, w13, w13_scale, w2, w2_scale, activation, fmt, hardware, config)
    routing = schedule(ids, expert_map, experts, config.block_m, hardware, weights, padding)
    slot_row = routing.slot_row
    codes, scale = _token_rows(x, slot_row, routing.row_map.numel(), fmt, hardware)
    fused = activation if config.w13.fuses else None
    h = grouped_gemm(codes, scale, w13, w13_scale, routing, None, fused, x.dtype, hardware, config.w13)
    codes, scale = act_and_mul_quant_fp8(h, None if fused else activation, fmt, hardware, slot_row, in_tiles=True)
    y = grouped_gemm(codes, scale, w2, w2_scale, routing, routing.row_weight, None, x.dtype, hardware, config.w2)
    return sum_rows(y, slot_row, ids.shape[1], hardware, in_tiles=True)


@triton.jit
def token_rows_kernel(
    x_ptr, q_ptr, scale_ptr, slot_row_ptr,
    TOPK: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Codes and scale of a token's row, at the rows of those of its slots whose experts are here."""
    if PDL:
        programmatic_launch()
    token = tl.program_id(0).to(tl.int64)
    x = tl.tuple([])
    largest = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range((COLUMNS + BLOCK - 1) // BLOCK):
        block = load_block(x_ptr + token * COLUMNS, i, COLUMNS, BLOCK, "evict_last")
        largest = larger(largest, tl.abs(widen(block)))
        x += (block,)
    for j in range(TOPK):
        row = tl.load(slot_row_ptr + token * TOPK + j).to(tl.int64)
        if row >= 0:
            store_quantized_row(
                q_ptr + row * COLUMNS, scale_ptr + row, x, largest, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK
            )  # fmt: skip


def _token_rows(
    x: torch.Tensor, slot_row: torch.Tensor, rows: int, fmt: Fp8Format, hardware: Hardware
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, H] and scales [rows, 1] of x [T, H], each token's at the rows `slot_row` [T * k] of its slots;
    others are left as torch.empty makes them."""
    tokens, hidden = x.shape
    codes = torch.empty((rows, hidden), dtype=fmt.dtype, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    launch(
        token_rows_kernel, (tokens,),
        x, codes, scale, slot_row, TOPK=slot_row.numel() // tokens, FP8_MAX=fmt.max, MIN_SCALE=fmt.min_scale,
        COLUMNS=hidden, PDL=hardware.pdl, **row_launch(hidden, hardware), **pdl_option(hardware),
    )  # fmt: skip
    return codes, scale


def _aligned(*weights: torch.Tensor) -> bool:
    return all(weight.data_ptr() % 16 == 0 for weight in weights)
