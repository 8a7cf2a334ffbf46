# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 GEMM on Hopper: which of its two kernels multiplies, and how."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from llm_quant_rocm.formats import fp8
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import nvfp4_wgmma, nvfp4_wgmma_large
from llm_quant_rocm.kernels.decode_hopper import UNSCALE_FP8
from llm_quant_rocm.kernels.nvfp4_expand import expand_fp8
from llm_quant_rocm.kernels.nvfp4_slices import multiply_slices
from llm_quant_rocm.kernels.per_token_quant import per_token_quant_fp8

# From so many rows of x on it is faster to expand a weight to FP8 in memory and to have cuBLAS multiply.
EXPANDING_ROWS = 1792

# The product that takes an expert for each tile of rows.
grouped_gemm = nvfp4_wgmma.gemm

Config = nvfp4_wgmma.Config | nvfp4_wgmma_large.Config


def config_of(fields: Mapping[str, Any]) -> Config:
    """The configuration with these fields, as configs/nvfp4_gemm holds it."""
    return nvfp4_wgmma_large.Config(**fields) if "cut" in fields else nvfp4_wgmma.Config(**fields)


def default_config(m: int, n: int, k: int, hardware: Hardware) -> Config:
    """A sound choice for shapes that nobody has measured."""
    return nvfp4_wgmma.default_config(m, n, k) if m <= 64 else nvfp4_wgmma_large.default_config(m)


def batch_invariant(config: Config) -> Config:
    """The same without sums of parts: each sum is then added in one order, however many rows there are."""
    return replace(config, programs=0) if isinstance(config, nvfp4_wgmma.Config) else replace(config, cut=False)


def gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    hardware: Hardware,
    config: Config,
) -> torch.Tensor:
    """x . weight^T * global_scale + bias: [M, n] in x's dtype, of x [M, K] (bf16 or fp16, contiguous rows).

    words and scale_bytes are of `formats.nvfp4_wgmma.pack`, global_scale is fp32 [n].
    """
    operands = (x, words, scale_bytes, global_scale, bias, n, hardware)
    if isinstance(config, nvfp4_wgmma.Config):
        return nvfp4_wgmma.gemm(*operands, config)
    return nvfp4_wgmma_large.gemm_large(*operands, config)


def serves_fp8(dtype: torch.dtype, bias: torch.dtype | None, n: int) -> bool:
    """Whether `gemm_fp8` serves x and a bias of these dtypes: always."""
    return True


def gemm_fp8(
    x: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    hardware: Hardware,
) -> torch.Tensor:
    """The same product in FP8: a row of x becomes E4M3 with a scale of its own, and the weight what
    `formats.nvfp4.to_fp8` makes of it. K is at most `per_token_quant.MAX_COLUMNS`."""
    m, k = x.shape
    codes, x_scale = per_token_quant_fp8(x, fp8.OCP, interleave=True)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    cublas = x.dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16) and n % 16 == 0
    if m >= EXPANDING_ROWS and cublas:
        return multiply_slices(
            codes, x_scale, global_scale * UNSCALE_FP8, bias, out,
            lambda first, rows: expand_fp8(words, scale_bytes, first, rows, n, k, hardware),
        )  # fmt: skip
    # Programs that share a tile's sum are at different columns of x, which FP8 reads too fast for that.
    config = replace(nvfp4_wgmma_large.default_config(m), cut=False)
    operands = (words, scale_bytes, global_scale, bias)
    return nvfp4_wgmma_large.gemm_large_fp8(codes, x_scale, *operands, out, hardware, config)


def moe_config(slots: int, experts: int, hidden: int, inner: int) -> nvfp4_wgmma.Config:
    """What was best on an H100 for the number of rows that an expert has on average."""
    rows = slots / experts
    small = min(hidden, inner) < 4096
    if rows > 24:
        return nvfp4_wgmma.Config(128 if rows > (192 if small else 96) else 64, 128, 64, unroll=4, stages=2, warps=8)
    block_m = 16 if rows <= 12 else 32
    if small:
        return nvfp4_wgmma.Config(block_m, 64, 64, unroll=4, stages=2)
    return nvfp4_wgmma.Config(block_m, 64, 128, stages=3 if block_m == 16 else 2)
