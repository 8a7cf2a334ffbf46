# SPDX-License-Identifier: Apache-2.0
"""Per-token FP8 quantization: one program a row, one read of x, one write of the codes."""

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.fp8 import Fp8Format
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels.fp8_row import quantize_row
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch

# The row stays in registers between its maximum and its quotients: 32 warps of 32 lanes hold this many fp32 values.
MAX_COLUMNS = 65536


@triton.jit
def per_token_quant_kernel(
    x_ptr, q_ptr, scale_ptr, columns, x_stride,
    FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    quotient, scale = quantize_row(x, FP8_MAX, MIN_SCALE)
    tl.store(q_ptr + row * columns + column, quotient.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


def row_launch(columns: int) -> tuple[int, int]:
    """Block size and warps for a row kernel: about 16 values a lane, 8 to 32 warps on the widest rows."""
    block = triton.next_power_of_2(max(columns, 16))
    return block, min(max(block // 1024, 1), 16 if block <= 32768 else 32)


def per_token_quant_fp8(x: torch.Tensor, fmt: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [M, K] and fp32 scales [M, 1] of x [M, K] whose last dimension is contiguous; K <= MAX_COLUMNS."""
    rows, columns = x.shape
    q = torch.empty((rows, columns), dtype=fmt.dtype, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block, warps = row_launch(columns)
        device = detect(x.device)
        per_token_quant_kernel[(rows,)](
            x, q, scale, columns, x.stride(0), FP8_MAX=fmt.max, MIN_SCALE=fmt.min_scale, BLOCK=block,
            PDL=device.pdl, num_warps=warps, **pdl_option(device),
        )  # fmt: skip
    return q, scale
