# SPDX-License-Identifier: Apache-2.0
"""FP8 products with an NVFP4 weight that is expanded to FP8 in memory, some rows at a time."""

from collections.abc import Callable

import torch

# So much of a weight is expanded at a time.
EXPANDED_BYTES = 64 * 2**20


def multiply_slices(
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    expand: Callable[[int, int], torch.Tensor],
) -> torch.Tensor:
    """x . weight^T + bias in `out` [M, n] (bf16), by the vendor's FP8 product.

    codes [M, K] and x_scale fp32 [M, 1] are x, row_scale fp32 [n] the weight's scales, and `expand(first, rows)` gives
    its rows first (a multiple of 128) to first + rows as E4M3 [rows, K]. The slices are all of about the same size.
    """
    n, k = out.shape[1], codes.shape[1]
    slices = -(-n * k // EXPANDED_BYTES)
    step = -(-n // (128 * slices)) * 128
    scales = row_scale.unsqueeze(0)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        weight = expand(first, rows.stop - first)
        torch._scaled_mm(
            codes, weight.t(), x_scale, scales[:, rows], bias=None if bias is None else bias[rows],
            out_dtype=out.dtype, use_fast_accum=True, out=out[:, rows],
        )  # fmt: skip
    return out
