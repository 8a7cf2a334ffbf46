# SPDX-License-Identifier: Apache-2.0
"""Products of the vendor with an NVFP4 weight that is expanded in memory, some rows at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

# So many values of a weight are expanded at a time: 64 MiB in FP8, 128 MiB in 16 bits. Every layer takes its workspace
# from torch's caching allocator and leaves it there for the next.
EXPANDED_VALUES = 64 * 2**20


@dataclass(frozen=True)
class Expanded:
    """The weight is expanded to FP8 in memory, `values` of it at a time, and the vendor multiplies."""

    values: int = field(default_factory=lambda: EXPANDED_VALUES)


# Gives rows first (a multiple of 128) to first + rows of a weight, [rows, K].
Expand = Callable[[int, int], torch.Tensor]


def multiply_slices(
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    expand: Expand,
    values: int,
) -> torch.Tensor:
    """x . weight^T + bias in `out` [M, n] (bf16), by the vendor's FP8 product, about `values` of the weight at a time.

    codes [M, K] and x_scale fp32 [M, 1] are x, row_scale fp32 [n] the weight's scales; `expand` gives E4M3.
    """
    scales = row_scale.unsqueeze(0)
    bias = None if bias is None else _aligned(bias)
    for rows in _slices(out.shape[1], codes.shape[1], values):
        torch._scaled_mm(
            codes, expand(rows.start, rows.stop - rows.start).t(), x_scale, scales[:, rows],
            bias=None if bias is None else bias[rows], out_dtype=out.dtype, use_fast_accum=True, out=out[:, rows],
        )  # fmt: skip
    return out


def multiply_runs(
    x: torch.Tensor,
    runs: Sequence[tuple[int, float]],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    expand: Expand,
) -> torch.Tensor:
    """x . weight^T * scale + bias in `out` [M, n], by the vendor's 16-bit product, rounded once.

    x is bf16 or fp16 [M, K]; bias [n], `out` and what `expand` gives are of its dtype. `runs` are the numbers of
    neighbouring rows of the weight under one fp32 scale, and that scale; the numbers add up to n.

    The scale is the product's alpha, and the bias is its epilogue's, which torch asks for where the result is
    contiguous. Elsewhere torch makes it the C under a beta of 1, which cuBLAS 13 adds to a product that it has rounded
    already. Alpha and the epilogue's bias are applied in fp32, before the only rounding, on the path from `torch.addmm`
    to the matrix units, as far as it was read in PyTorch and in ROCm's manuals (tests/gpu/test_addmm.py sees it in the
    bits):

    - aten/src/ATen/native/cuda/Blas.cpp (960a6846) converts alpha and beta to `at::opmath_type`, fp32 for 16 bits;
    - aten/src/ATen/cuda/CUDABlas.cpp (bd53dc4f) hands them on with CUBLAS_COMPUTE_32F and a scale type of CUDA_R_32F
      (hipBLASLt), or with rocblas_datatype_f32_r or CUBLAS_COMPUTE_32F as the type to compute in (rocBLAS, hipBLAS);
    - hipBLASLt computes D = alpha A B + beta C + bias with fp32 as compute and scale type of bf16 and fp16 matrices,
      rocblas_gemm_ex takes alpha and beta in the type that it computes in.

    CK, which torch takes only where it is told to, does not (aten/src/ATen/native/hip/ck_gemm_template.h, 00abd95e): it
    applies alpha to values of the result's type, and has no use for beta.
    """
    for part in _slices(out.shape[1], x.shape[1], EXPANDED_VALUES):
        _multiply_part(x, runs, bias, out, part, expand(part.start, part.stop - part.start))
    return out


def _multiply_part(
    x: torch.Tensor,
    runs: Sequence[tuple[int, float]],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    part: slice,
    weight: torch.Tensor,
) -> None:
    """The products of the runs' rows that are in `part`, whose rows of the weight are `weight`."""
    start = 0
    for count, scale in runs:
        first, last = max(start, part.start), min(start + count, part.stop)
        start += count
        if first >= last:
            continue
        matrix, result = weight[first - part.start : last - part.start].t(), out[:, first:last]
        if bias is None:  # beta 0: what `result` holds is not read
            torch.addmm(result, x, matrix, beta=0, alpha=scale, out=result)
        elif result.is_contiguous():
            torch.addmm(_aligned(bias[first:last]), x, matrix, alpha=scale, out=result)
        else:
            result.copy_(torch.addmm(_aligned(bias[first:last]), x, matrix, alpha=scale))


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """A bias that the vendor's epilogues take: cuBLAS takes none from an odd address, hipBLASLt has not been tried."""
    return bias.clone() if bias.data_ptr() % 16 else bias


def _slices(n: int, k: int, values: int) -> Iterator[slice]:
    """n rows of k columns in slices of about the same size, up to `values`, each from a multiple of 128 on."""
    count = -(-n * k // values)
    step = -(-n // (128 * count)) * 128
    for first in range(0, n, step):
        yield slice(first, min(first + step, n))
