# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and per-token FP8 quantization as one kernel: every value is read and written once.

One program a row, but for many rows so wide that a multiprocessor has no room for two: there a program for each
multiprocessor walks over rows, and the next ones come to shared memory while it computes.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.fp8 import Fp8Format
from llm_quant_rocm.hardware import Hardware, detect, multiprocessors
from llm_quant_rocm.kernels.fp8_row import (
    larger,
    load_block,
    narrow,
    row_launch,
    store_block,
    store_quantized_row,
    widen,
)
from llm_quant_rocm.kernels.norm_row import load_row, mean_square
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch

# Of rows of 16-bit values, widths at which walking over them was faster on an H100.
WALKED_COLUMNS = range(16385, 28673)
# Its threads: as few as have the registers for a row and the weight.
_WALK = {"BLOCK": 256 * 8, "num_warps": 256 // 32}


@triton.jit
def rms_norm_quant_kernel(
    x_ptr, residual_ptr, weight_ptr, q_ptr, scale_ptr, sum_ptr, x_stride, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    # Every row needs the weight again and no row needs x or the residual again: hence the eviction policies. Loads do
    # not pass a store, so as many blocks as there are registers for are asked for before the first is needed.
    EARLY: tl.constexpr = 2 if BLOCKS > 8 else BLOCKS
    z = tl.tuple([])
    for i in tl.static_range(BLOCKS):
        z += (load_block(x_ptr + row * x_stride, i, COLUMNS, BLOCK, "evict_first"),)
    added = tl.tuple([])
    if HAS_RESIDUAL:
        for i in tl.static_range(EARLY):
            added += (load_block(residual_ptr + row * residual_stride, i, COLUMNS, BLOCK, "evict_first"),)
    weight = tl.tuple([])
    for i in tl.static_range(EARLY):
        weight += (load_block(weight_ptr, i, COLUMNS, BLOCK, "evict_last"),)
    if HAS_RESIDUAL:
        sums = tl.tuple([])
        for i in tl.static_range(BLOCKS):
            if i + EARLY < BLOCKS:
                added += (load_block(residual_ptr + row * residual_stride, i + EARLY, COLUMNS, BLOCK, "evict_first"),)
            sums += (narrow(widen(z[i]) + widen(added[i]), dtype),)
            store_block(sum_ptr + row * COLUMNS, sums[i], i, COLUMNS, BLOCK)
        z = sums
    inverse = tl.math.div_rn(1.0, tl.sqrt_rn(mean_square(z, COLUMNS, BLOCK) + eps))
    largest = tl.zeros([BLOCK], tl.float32)
    normed = tl.tuple([])
    for i in tl.static_range(BLOCKS):
        if i + EARLY < BLOCKS:
            weight += (load_block(weight_ptr, i + EARLY, COLUMNS, BLOCK, "evict_last"),)
        value, largest = _normed(z[i], inverse, weight[i], largest)
        normed += (value,)
    store_quantized_row(q_ptr + row * COLUMNS, scale_ptr + row, normed, largest, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK)


@triton.jit
def _normed(z, inverse, weight, largest):
    """A block's normalised values, and the larger of their magnitudes and `largest`."""
    value = widen(z) * inverse * widen(weight)
    return narrow(value, z.dtype), larger(largest, tl.abs(value))


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["M"])
def rms_norm_quant_walk_kernel(
    x_ptr, weight_ptr, q_ptr, scale_ptr, x_stride, eps, M,
    FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program's share of M rows, without a residual; its loads are two rows ahead."""
    if PDL:
        programmatic_launch()
    weight = load_row(weight_ptr, COLUMNS, BLOCK, "evict_last")
    for number in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=3):
        row = number.to(tl.int64)
        z = load_row(x_ptr + row * x_stride, COLUMNS, BLOCK, "evict_first")
        inverse = tl.math.div_rn(1.0, tl.sqrt_rn(mean_square(z, COLUMNS, BLOCK) + eps))
        largest = tl.zeros([BLOCK], tl.float32)
        normed = tl.tuple([])
        for i in tl.static_range(len(z)):
            value, largest = _normed(z[i], inverse, weight[i], largest)
            normed += (value,)
        store_quantized_row(q_ptr + row * COLUMNS, scale_ptr + row, normed, largest, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK)


def rms_norm_quant_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, fmt: Fp8Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [M, K], fp32 scales [M, 1] and the sum [M, K] (x itself without a residual) of x [M, K].

    The last dimension of x and of the residual is contiguous; K <= per_token_quant.MAX_COLUMNS.
    """
    rows, columns = x.shape
    q = torch.empty((rows, columns), dtype=fmt.dtype, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    hardware = detect(x.device)
    half = x.element_size() == weight.element_size() == 2
    walked = columns in WALKED_COLUMNS and half and residual is None and hardware.arch == "sm_90"
    if walked and rows > 2 * multiprocessors(x.device):
        rms_norm_quant_walk_kernel[(multiprocessors(x.device),)](
            x, weight, q, scale, x.stride(0), eps, rows, **_constants(columns, True, fmt, hardware)
        )
    elif rows:
        added = x if residual is None else residual
        rms_norm_quant_kernel[(rows,)](
            x, added, weight, q, scale, total, x.stride(0), added.stride(0), eps, HAS_RESIDUAL=residual is not None,
            **_constants(columns, False, fmt, hardware),
        )  # fmt: skip
    return q, scale, total


@cache
def _constants(columns: int, walked: bool, fmt: Fp8Format, hardware: Hardware) -> dict[str, Any]:
    """What the kernels are compiled for."""
    return {
        "FP8_MAX": fmt.max,
        "MIN_SCALE": fmt.min_scale,
        "COLUMNS": columns,
        "PDL": hardware.pdl,
        "enable_fp_fusion": False,
        **(_WALK if walked else row_launch(columns, hardware, 2)),  # x, and the residual or the weight
        **pdl_option(hardware),
    }
