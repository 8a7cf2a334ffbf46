# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and per-token FP8 quantization as one kernel: one program a row, every value read and written once."""

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.fp8 import Fp8Format
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels.fp8_row import quantize_row
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch
from llm_quant_rocm.kernels.per_token_quant import row_launch


@triton.jit
def rms_norm_quant_kernel(
    x_ptr, residual_ptr, weight_ptr, q_ptr, scale_ptr, sum_ptr, columns, width, x_stride, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    # Every row needs the weight again and no row needs x again.
    z = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if HAS_RESIDUAL:
        z += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = z.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * columns + column, rounded, mask=inside)
        z = rounded.to(tl.float32)
    variance = tl.math.div_rn(tl.sum(z * z, axis=0), width)
    inverse = tl.math.div_rn(1.0, tl.sqrt_rn(variance + eps))
    normed = (z * inverse * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    quotient, scale = quantize_row(normed, FP8_MAX, MIN_SCALE)
    tl.store(q_ptr + row * columns + column, quotient.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


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
    if rows:
        block, warps = row_launch(columns)
        device = detect(x.device)
        added = x if residual is None else residual
        rms_norm_quant_kernel[(rows,)](
            x, added, weight, q, scale, total, columns, float(columns), x.stride(0), added.stride(0), eps,
            HAS_RESIDUAL=residual is not None, FP8_MAX=fmt.max, MIN_SCALE=fmt.min_scale, BLOCK=block,
            PDL=device.pdl, num_warps=warps, **pdl_option(device),
        )  # fmt: skip
    return q, scale, total
