# SPDX-License-Identifier: Apache-2.0
"""Matrix product of per-token FP8 activations and per-channel FP8 weights."""

import torch

from llm_quant_rocm.reference.by_rows import product_by_rows


def ptpc_gemm(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """(xq . wq^T) * xscale * wscale^T + bias, in fp32, rounded once to `out_dtype`.

    xq [M, K] and wq [N, K] are E4M3 codes, xscale [M, 1] and wscale [N, 1] fp32, bias [N]. Returns [M, N].
    `batch_invariant` multiplies row by row of x, so that a row's bits do not depend on the rows beside it.
    """
    x, w = xq.float(), wq.float()
    out = (product_by_rows(x, w) if batch_invariant else x @ w.t()) * xscale * wscale.t()
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)
