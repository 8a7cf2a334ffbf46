# SPDX-License-Identifier: Apache-2.0
"""The PTPC GEMM on Hopper: which of its three kernels multiplies, and how."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import ptpc_gemm as general
from llm_quant_rocm.kernels import ptpc_wgmma, ptpc_wgmma_few
from llm_quant_rocm.kernels.hopper import SMS
from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig
from llm_quant_rocm.kernels.sizes import cdiv

Config = ptpc_wgmma_few.Config | ptpc_wgmma.Config | GemmConfig


def config_of(fields: Mapping[str, Any]) -> Config:
    """The configuration with these fields, as configs/ptpc_gemm holds it."""
    if "stages" in fields:
        return GemmConfig(**fields)
    return ptpc_wgmma.Config(**fields) if "group_m" in fields else ptpc_wgmma_few.Config(**fields)


def default_config(hardware: Hardware, m: int, n: int, k: int) -> Config:
    """What was best, or nearly, on an H100 for weights of many sizes."""
    few = ptpc_wgmma_few.default_config(m, n)
    # Of more than 64 rows, which all programs read beside the weight, it was ahead in one wave of rows of this length.
    if m <= 64 or (m <= ptpc_wgmma_few.MAX_ROWS and 2560 <= k <= 20480 and cdiv(n, few.block_n) <= SMS):
        return few
    many = ptpc_wgmma.default_config(m, n)
    # Tiles of 64 rows, 0.65 of the time of `ptpc_wgmma.waves` each, unless the last one is nearly empty: what it has
    # beyond x takes the accelerator long (`hopper.row_descriptor`).
    waves = 0.65 * cdiv(cdiv(m, 64) * cdiv(n, 128), SMS)
    if k % 16 == 0 and -m % 64 <= 48 and waves < ptpc_wgmma.waves(many, m, n):
        return GemmConfig(64, 128, 256, 4, 4, tma=True, programs=1)
    return many


def batch_invariant(config: Config, hardware: Hardware, n: int, k: int) -> Config:
    """`kernels.ptpc_gemm.batch_invariant` on Hopper: the same without sums of parts. All tiles of all three kernels add
    in one order there; by what an H200 gave, not by a specification (tests/gpu/test_ptpc_gemm.py)."""
    return replace(config, split_k=1) if isinstance(config, GemmConfig) else config


def ptpc_gemm(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    hardware: Hardware,
    config: Config,
) -> torch.Tensor:
    """`kernels.ptpc_gemm.ptpc_gemm` under any kernel's configuration. What the two for Hopper do not serve, that one
    does, without sums of parts."""
    operands = (xq, xscale, wq, wscale, bias, out_dtype, hardware)
    if isinstance(config, ptpc_wgmma_few.Config):
        if ptpc_wgmma_few.serves(xq, wq):
            return ptpc_wgmma_few.ptpc_wgmma_few(*operands, config)
    elif isinstance(config, ptpc_wgmma.Config):
        if ptpc_wgmma.serves(xq, wq, out_dtype):
            return ptpc_wgmma.ptpc_wgmma(*operands, config)
    else:
        return general.ptpc_gemm(*operands, config)
    usual = general.default_config(hardware, xq.shape[0], *wq.shape)
    return general.ptpc_gemm(*operands, replace(usual, split_k=1))
