# SPDX-License-Identifier: Apache-2.0
"""A matrix product of which each row's bits are its own."""

import torch


def product_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x . weight^T, fp32 [M, N] of x [M, K] and weight [N, K], a row of x at a time."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    for row, result in zip(x, out, strict=True):
        result[:] = weight @ row.clone()  # a copy: BLAS may add in another order at another alignment
    return out
