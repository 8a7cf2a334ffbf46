# SPDX-License-Identifier: Apache-2.0
"""The PTPC GEMM on Hopper: which of its two kernels multiplies, and how."""

from collections.abc import Mapping
from typing import Any

import torch

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import ptpc_gemm as few_rows
from llm_quant_rocm.kernels import ptpc_wgmma
from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2

Config = GemmConfig | ptpc_wgmma.Config


def config_of(fields: Mapping[str, Any]) -> Config:
    """The configuration with these fields, as configs/ptpc_gemm holds it."""
    return GemmConfig(**fields) if "block_k" in fields else ptpc_wgmma.Config(**fields)


def default_config(hardware: Hardware, m: int, n: int, k: int) -> Config:
    """What was best, or nearly, on an H100 for weights of many sizes."""
    if m <= 64:
        if k % 16 or n <= 2048:
            return few_rows.default_config(hardware, m, n, k)
        # Reading the weight takes the time: rings as deep as one or several programs on a multiprocessor can have.
        if n > 132 * 64:
            block_k, stages = 128 if k <= 1024 or (m > 32 and n > 2 * 132 * 64) else 256, 3
        else:
            block_k, stages = 256, max(2, min(6 if n <= 66 * 64 else 5, k // 256))
        return GemmConfig(max(16, next_power_of_2(m)), 64, block_k, stages, 4, 1, swap_ab=True, tma=True)
    many = ptpc_wgmma.default_config(m, n)
    # Tiles of 64 rows, 0.65 of the time of `ptpc_wgmma.waves` each, unless the last one is nearly empty: what it has
    # beyond x takes the accelerator long (`hopper.row_descriptor`).
    waves = 0.65 * cdiv(cdiv(m, 64) * cdiv(n, 128), 132)
    if k % 16 == 0 and -m % 64 <= 48 and waves < ptpc_wgmma.waves(many, m, n):
        return GemmConfig(64, 128, 256, 4, 4, tma=True, programs=1)
    return many


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
    """`kernels.ptpc_gemm.ptpc_gemm` under either kernel's configuration. What the one for many rows does not serve, the
    other does."""
    operands = (xq, xscale, wq, wscale, bias, out_dtype, hardware)
    if isinstance(config, ptpc_wgmma.Config):
        if ptpc_wgmma.serves(xq, wq, out_dtype):
            return ptpc_wgmma.ptpc_wgmma(*operands, config)
        config = few_rows.default_config(hardware, xq.shape[0], *wq.shape)
    return few_rows.ptpc_gemm(*operands, config)
