# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and NVFP4 weights."""

import torch

from llm_quant_rocm.formats import fp8, nvfp4
from llm_quant_rocm.reference.by_rows import product_by_rows
from llm_quant_rocm.reference.per_token_quant import per_token_quant_fp8
from llm_quant_rocm.reference.ptpc_gemm import ptpc_gemm


def nvfp4_gemm(
    x: torch.Tensor,
    weight: nvfp4.NvFp4Weight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """(x . (e2m1 * e4m3)^T) * global_scale + bias, in fp32, rounded once to `out_dtype`: [M, N] of x [M, K].

    The weight is decoded some rows at a time. `batch_invariant` multiplies row by row of x, so that a row's bits do
    not depend on the rows beside it.
    """
    out = torch.empty((x.shape[0], weight.n), dtype=torch.float32, device=x.device)
    wide = x.float()
    for chunk in nvfp4.row_slices(weight.n, weight.k):
        values = nvfp4.block_values(weight.codes[chunk], weight.scales[chunk])
        out[:, chunk] = product_by_rows(wide, values) if batch_invariant else wide @ values.t()
    out *= weight.global_scale
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)


def nvfp4_gemm_fp8(
    x: torch.Tensor,
    weight: nvfp4.NvFp4Weight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fmt: fp8.Fp8Format,
) -> torch.Tensor:
    """The same by FP8: the weight becomes E4M3 with a scale a row, x with a scale a token, then `ptpc_gemm`."""
    return ptpc_gemm(*per_token_quant_fp8(x, fmt), *nvfp4.to_fp8(weight, fmt), bias, out_dtype)
