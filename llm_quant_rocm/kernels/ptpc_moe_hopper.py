# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8 on Hopper: which kernel multiplies, and how.

Six launches, seven for many slots: the schedule of tiles, the quantized rows of x, the product with w13, whose epilogue
may apply the activation, the activations quantized, the product with w2 and the router's weight, and the sum of each
token's slots. Everything between the first and the last is in the order of the schedule's rows, so that bulk copies
read and write whole tiles: a token's codes go to the row of each of its slots, and the sum finds them there.
"""

from collections.abc import Mapping
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
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch
from llm_quant_rocm.kernels.ptpc_wgmma_grouped import Config, grouped_gemm
from llm_quant_rocm.kernels.routing import schedule, sum_rows

# MoeConfig is of the kernel of all architectures.
AnyConfig = PairConfig | everywhere.MoeConfig


def config_of(fields: Mapping[str, Any]) -> AnyConfig:
    """The configuration with these fields, as configs/ptpc_moe holds it."""
    if "block_k" in fields:
        return everywhere.MoeConfig(**fields)
    return PairConfig.of(fields, lambda one: Config(**one))


def default_config(hardware: Hardware, slots: int, experts: int) -> AnyConfig:
    """A sound choice for shapes that nobody has measured. With few rows the time is that of reading the weights, which
    both kernels do as fast, and the other needs no copies of x."""
    if slots <= 96 * experts:
        return everywhere.default_config(hardware, slots, experts)
    return PairConfig(Config(128, 256), Config(128, 256))


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
    config: AnyConfig,
) -> torch.Tensor:
    """`kernels.ptpc_moe.ptpc_moe` under either kernel's configuration. What the one for Hopper does not serve, the
    other does."""
    x, weights, ids, expert_map, padding = tokens
    experts, hidden, inner = w2.shape
    if isinstance(config, PairConfig) and not (serves(x, hidden, inner) and _aligned(w13, w2)):
        config = everywhere.default_config(hardware, ids.numel(), experts)
    if isinstance(config, everywhere.MoeConfig):
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
