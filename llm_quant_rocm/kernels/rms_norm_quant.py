# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and per-token FP8 quantization as one kernel: one program a row, every value read and written once. Many wide
rows on Hopper are those of `rms_norm_walk`."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.fp8 import Fp8Format
from llm_quant_rocm.hardware import Hardware, detect
from llm_quant_rocm.kernels import rms_norm_walk
from llm_quant_rocm.kernels.fp8_row import (
    larger,
    load_block,
    narrow,
    row_launch,
    store_block,
    store_quantized_row,
    widen,
)
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.norm_row import mean_square
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch


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
        value = widen(z[i]) * inverse * widen(weight[i])
        largest = larger(largest, tl.abs(value))
        normed += (narrow(value, dtype),)
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
    if residual is None and rms_norm_walk.serves(x, weight, hardware):
        rms_norm_walk.rms_norm_walk(x, weight, eps, q, scale, fmt, hardware)
    elif rows:
        added = x if residual is None else residual
        launch(
            rms_norm_quant_kernel, (rows,),
            x, added, weight, q, scale, total, x.stride(0), added.stride(0), eps,
            **_constants(columns, residual is not None, fmt, hardware),
        )  # fmt: skip
    return q, scale, total


@cache
def _constants(columns: int, has_residual: bool, fmt: Fp8Format, hardware: Hardware) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "HAS_RESIDUAL": has_residual,
        "FP8_MAX": fmt.max,
        "MIN_SCALE": fmt.min_scale,
        "COLUMNS": columns,
        "PDL": hardware.pdl,
        "enable_fp_fusion": False,
        **row_launch(columns, hardware, 2),  # x, and the residual or the weight
        **pdl_option(hardware),
    }
