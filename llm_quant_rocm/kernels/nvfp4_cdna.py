# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 GEMM and experts on CDNA, as the operators call them.

One kernel decodes and multiplies, for any number of rows. With many rows the weight may instead be expanded in memory,
to 16 bits or to FP8, for the vendor's product.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.nvfp4 import RANGE
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import nvfp4_mfma
from llm_quant_rocm.kernels.nvfp4_mfma import batch_invariant, config_of, gemm
from llm_quant_rocm.kernels.nvfp4_mfma_expand import expand
from llm_quant_rocm.kernels.nvfp4_moe import Weight, rows_of
from llm_quant_rocm.kernels.nvfp4_slices import Expanded, multiply_runs, multiply_slices
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.per_token_quant import per_token_quant_fp8
from llm_quant_rocm.kernels.routing import Schedule

__all__ = [
    "batch_invariant",
    "config_of",
    "default_config",
    "default_fp8_config",
    "expert_products",
    "fp8_config_of",
    "gemm",
    "gemm_expanded",
    "gemm_fp8",
    "moe_config",
    "serves_fp8",
]


def default_config(m: int, n: int, k: int, hardware: Hardware) -> nvfp4_mfma.Config:
    """A sound choice, by reasoning: no AMD GPU was at hand to measure one."""
    return nvfp4_mfma.default_config(m, n, k, hardware.units)


def expert_products(
    x: torch.Tensor, w13: Weight, w2: Weight, activation: str, routing: Schedule, hardware: Hardware, config: PairConfig
) -> tuple[torch.Tensor, bool]:
    """Each slot's result times its router weight, at its number [T * k, H] and not in tiles, of x [T, H]; see
    `nvfp4_moe`. Rows are found and stored by the schedule's map, and nobody copies them."""
    h = gemm(x, *w13, None, rows_of(w13), hardware, config.w13, routing, activation=activation)
    return gemm(h, *w2, None, rows_of(w2), hardware, config.w2, routing, row_weight=routing.row_weight), False


def gemm_expanded(
    x: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    runs: Sequence[tuple[int, float]],
    bias: torch.Tensor | None,
    n: int,
    hardware: Hardware,
) -> torch.Tensor:
    """The product of `gemm` by the vendor: codes times block scales are expanded to x's dtype, exactly, and the global
    scales, `runs` of (rows, scale), are applied by the product itself (`multiply_runs`). bias is of x's dtype."""
    k = x.shape[1]

    def expanded(first: int, rows: int) -> torch.Tensor:
        weight = torch.empty((rows, k), dtype=x.dtype, device=x.device)
        expand(words, scale_bytes, None, weight, first, n, hardware)
        return weight

    return multiply_runs(x, runs, bias, torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device), expanded)


def serves_fp8(dtype: torch.dtype, bias: torch.dtype | None, n: int) -> bool:
    """Whether `gemm_fp8` serves x and a bias of these dtypes: those that the vendor's FP8 product has."""
    return dtype == torch.bfloat16 and bias in (None, torch.bfloat16) and n % 16 == 0


def fp8_config_of(fields: Mapping[str, Any]) -> Expanded:
    """The configuration of `gemm_fp8` with these fields, as a file of configurations holds it."""
    return Expanded(**fields)


def default_fp8_config(m: int, n: int, k: int, hardware: Hardware) -> Expanded:
    """How `gemm_fp8` computes where nobody has measured: the vendor multiplies, in FP8 at twice the rate of 16 bits."""
    return Expanded()


def gemm_fp8(
    x: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    hardware: Hardware,
    config: Expanded,
) -> torch.Tensor:
    """The same product in FP8: a row of x becomes E4M3 with a scale of its own, and the weight what
    `formats.nvfp4.to_fp8` makes of it. K is at most `per_token_quant.MAX_COLUMNS`; see `serves_fp8` for the rest."""
    fmt, k = fp8.of_dtype(hardware.fp8_dtype), x.shape[1]
    codes, x_scale = per_token_quant_fp8(x, fmt)
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)

    def expanded(first: int, rows: int) -> torch.Tensor:
        weight = torch.empty((rows, k), dtype=fmt.dtype, device=x.device)
        expand(words, scale_bytes, fmt.max / RANGE, weight, first, n, hardware)
        return weight

    return multiply_slices(codes, x_scale, global_scale * (RANGE / fmt.max), bias, out, expanded, config.values)


def moe_config(slots: int, experts: int, hidden: int, inner: int, hardware: Hardware) -> PairConfig:
    """What should be fastest for `slots` rows of `experts` [hidden, inner], by reasoning."""
    return PairConfig(
        nvfp4_mfma.default_moe_config(slots, experts, 2 * inner, hidden, hardware.units),
        nvfp4_mfma.default_moe_config(slots, experts, hidden, inner, hardware.units),
    )
