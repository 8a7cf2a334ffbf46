# SPDX-License-Identifier: Apache-2.0
"""Per-token FP8 quantization: one program a row, one read of x, one write of the codes."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.fp8 import Fp8Format
from llm_quant_rocm.hardware import Hardware, detect
from llm_quant_rocm.kernels.fp8_row import larger, load_block, load_half_groups, row_launch, store_quantized_row, widen
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch
from llm_quant_rocm.kernels.sizes import cdiv

# The row stays in registers between its maximum and its quotients: 128 values a lane of 16 warps of 32 lanes.
MAX_COLUMNS = 65536
# Bytes of x that stay in the L2 cache of an H100 beside the codes. x has just been written, and others may read it,
# too: an MoE model's router and its shared experts. Kept, 4 to 16 MB of it were quantized and multiplied in up to 8%
# less time. More takes the place of the codes, and is marked as the first to go: 32 MB took up to 3% less so (both by
# hand).
_KEPT_BYTES = 16 * 2**20


@triton.jit
def per_token_quant_kernel(
    x_ptr, q_ptr, scale_ptr, x_stride,
    FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVE: tl.constexpr, EVICTION: tl.constexpr, PDL: tl.constexpr, BESIDE: tl.constexpr
):  # fmt: skip
    if BESIDE:
        tl.extra.cuda.gdc_launch_dependents()
    elif PDL:
        programmatic_launch()
    TAKEN: tl.constexpr = 2 * BLOCK if INTERLEAVE else BLOCK
    BLOCKS: tl.constexpr = (COLUMNS + TAKEN - 1) // TAKEN
    row = tl.program_id(0).to(tl.int64)
    x = tl.tuple([])
    for i in tl.static_range(BLOCKS):
        if INTERLEAVE:
            for half in tl.static_range(2):
                x += (load_half_groups(x_ptr + row * x_stride, i, half, COLUMNS, BLOCK, EVICTION),)
        else:
            x += (load_block(x_ptr + row * x_stride, i, COLUMNS, BLOCK, EVICTION),)
    largest = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(x)):
        largest = larger(largest, tl.abs(widen(x[i])))
    PADDED: tl.constexpr = (COLUMNS + 63) // 64 * 64 if INTERLEAVE else COLUMNS
    store_quantized_row(
        q_ptr + row * PADDED, scale_ptr + row, x, largest, FP8_MAX, MIN_SCALE, PADDED, BLOCK, INTERLEAVE
    )
    if BESIDE:
        tl.extra.cuda.gdc_wait()


def per_token_quant_fp8(
    x: torch.Tensor, fmt: Fp8Format, interleave: bool = False, beside: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [M, K] and fp32 scales [M, 1] of x [M, K] whose last dimension is contiguous; K <= MAX_COLUMNS.

    With `interleave` K is a multiple of 16, and codes are [M, K padded with zeros to a multiple of 64]: of every 64
    columns first 0, 8, 1 and 9 of each sixteen, then 2, 10, 3 and 11, and so on to 6, 14, 7 and 15. It is the order in
    which `decode_hopper` makes E4M3 of NVFP4.

    With `beside` the kernel just before has nothing to do with x, and begins with `programmatic_launch`: what came
    before it is finished then, x among it, so that both may run at the same time, where the hardware can. This one
    ends after it, and a kernel that waits for this one waits for both.
    """
    rows, columns = x.shape
    padded = cdiv(columns, 64) * 64 if interleave else columns
    q = torch.empty((rows, padded), dtype=fmt.dtype, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        kept = x.numel() * x.element_size() <= _KEPT_BYTES
        constants = _constants(columns, fmt, interleave, kept, beside, detect(x.device))
        launch(per_token_quant_kernel, (rows,), x, q, scale, x.stride(0), **constants)
    return q, scale


@cache
def _constants(
    columns: int, fmt: Fp8Format, interleave: bool, kept: bool, beside: bool, hardware: Hardware
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "FP8_MAX": fmt.max,
        "MIN_SCALE": fmt.min_scale,
        "COLUMNS": columns,
        "INTERLEAVE": interleave,
        "EVICTION": "" if kept else "evict_first",
        "PDL": hardware.pdl,
        "BESIDE": beside and hardware.pdl,
        # Whole groups of 64 columns of two blocks.
        **row_launch(max(columns, 32) if interleave else columns, hardware),
        **pdl_option(hardware),
    }
