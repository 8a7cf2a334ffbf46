# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 GEMM on Hopper: which of its two kernels multiplies, and how."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import nvfp4_wgmma, nvfp4_wgmma_large

Config = nvfp4_wgmma.Config | nvfp4_wgmma_large.Config


def config_of(fields: Mapping[str, Any]) -> Config:
    """The configuration with these fields, as configs/nvfp4_gemm holds it."""
    return nvfp4_wgmma_large.Config(**fields) if "cut" in fields else nvfp4_wgmma.Config(**fields)


def default_config(m: int, n: int, k: int) -> Config:
    """A sound choice for shapes that nobody has measured."""
    return nvfp4_wgmma.default_config(m, n, k) if m <= 64 else nvfp4_wgmma_large.default_config(m)


def batch_invariant(config: Config) -> Config:
    """The same without sums of parts: each sum is then added in one order, however many rows there are."""
    return replace(config, split_k=1) if isinstance(config, nvfp4_wgmma.Config) else replace(config, cut=False)


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
