# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with per-token FP8 quantization of many wide rows on Hopper: a program a multiprocessor walks over them.

A multiprocessor has no room for two programs that hold such a row, and so would not read while one computes. Here the
next rows come to shared memory meanwhile, and the norm's weight stays in registers.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.fp8 import Fp8Format
from llm_quant_rocm.hardware import Hardware, multiprocessors
from llm_quant_rocm.kernels.fp8_row import larger, narrow, store_quantized_row, widen
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.norm_row import load_row, mean_square
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch

# Widths at which it was faster on an H100; wider rows would spill.
COLUMNS = range(16385, 28673)
# As few threads as have the registers for a row and the weight; each takes 8 values of a block.
THREADS = 256


def serves(x: torch.Tensor, weight: torch.Tensor, hardware: Hardware) -> bool:
    """Whether it is the faster kernel for rows x [M, K] of 16-bit values and weight [K] of as many bits."""
    rows, columns = x.shape
    half = x.element_size() == weight.element_size() == 2
    return hardware.arch == "sm_90" and columns in COLUMNS and half and rows > 2 * multiprocessors(x.device)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["M"])
def rms_norm_walk_kernel(
    x_ptr, weight_ptr, q_ptr, scale_ptr, x_stride, eps, M,
    FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program's share of M rows; its loads are two rows ahead."""
    if PDL:
        programmatic_launch()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = load_row(weight_ptr, COLUMNS, BLOCK, "evict_last")
    for number in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=3):
        row = number.to(tl.int64)
        z = load_row(x_ptr + row * x_stride, COLUMNS, BLOCK, "evict_first")
        inverse = tl.math.div_rn(1.0, tl.sqrt_rn(mean_square(z, COLUMNS, BLOCK) + eps))
        largest = tl.zeros([BLOCK], tl.float32)
        normed = tl.tuple([])
        for i in tl.static_range(len(z)):
            value = widen(z[i]) * inverse * widen(weight[i])
            largest = larger(largest, tl.abs(value))
            normed += (narrow(value, dtype),)
        store_quantized_row(q_ptr + row * COLUMNS, scale_ptr + row, normed, largest, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK)


def rms_norm_walk(
    x: torch.Tensor, weight: torch.Tensor, eps: float, q: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format,
    hardware: Hardware
) -> None:  # fmt: skip
    """Codes q [M, K] and fp32 scales [M, 1] of the normalised rows of x [M, K], which it `serves`."""
    rows, columns = x.shape
    constants = _constants(columns, fmt, hardware)
    launch(rms_norm_walk_kernel, (multiprocessors(x.device),), x, weight, q, scale, x.stride(0), eps, rows, **constants)


@cache
def _constants(columns: int, fmt: Fp8Format, hardware: Hardware) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "FP8_MAX": fmt.max,
        "MIN_SCALE": fmt.min_scale,
        "COLUMNS": columns,
        "BLOCK": 8 * THREADS,
        "PDL": hardware.pdl,
        "enable_fp_fusion": False,
        "num_warps": THREADS // hardware.lanes,
        **pdl_option(hardware),
    }
