# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 GEMM on Hopper: which of its three kernels multiplies, and how."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, inf
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from llm_quant_rocm.formats import fp8
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import nvfp4_estimate, nvfp4_wgmma, nvfp4_wgmma_large, nvfp4_wgmma_split
from llm_quant_rocm.kernels.decode_hopper import UNSCALE_FP8
from llm_quant_rocm.kernels.hopper import SMS
from llm_quant_rocm.kernels.nvfp4_expand import expand_fp8
from llm_quant_rocm.kernels.nvfp4_moe import Weight, rows_of
from llm_quant_rocm.kernels.nvfp4_slices import Expanded, multiply_slices
from llm_quant_rocm.kernels.nvfp4_wgmma import Config as Few
from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config as Large
from llm_quant_rocm.kernels.nvfp4_wgmma_split_tiles import Config as Split
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.per_token_quant import per_token_quant_fp8
from llm_quant_rocm.kernels.routing import Schedule, scatter_rows
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2

Config = Few | Split | Large
Fp8Config = nvfp4_estimate.Fp8Config


def config_of(fields: Mapping[str, Any]) -> Config:
    """The configuration with these fields, as configs/nvfp4_gemm holds it."""
    if "split_k" in fields:
        return Split(**fields)
    return Large(**fields) if "cut" in fields else Few(**fields)


def default_config(m: int, n: int, k: int, hardware: Hardware) -> Config:
    """What should be fastest where nobody has measured."""
    m = _planned(m)
    return nvfp4_estimate.fastest(m, n, k) or nvfp4_wgmma.default_config(m, n, k)


def _planned(m: int) -> int:
    """The number of rows for which a configuration is chosen: each is compiled at its first call, so there should be
    few."""
    if m <= 64:
        return max(8, next_power_of_2(m))
    step = 32 if m <= 320 else 64
    return cdiv(m, step) * step


def batch_invariant(config: Config) -> Config:
    """The same without sums of parts: each sum is then added in one order, however many rows there are."""
    if isinstance(config, Split):
        return Few(next_power_of_2(config.block_m), 64, 128, stages=2)
    if isinstance(config, Few):
        return replace(config, programs=0)
    return replace(config, block_n=max(config.block_n, 128), cut=0, shares=0)


def _kernel_of(config: Config) -> Callable[..., torch.Tensor]:
    """What multiplies as `config` has it."""
    if isinstance(config, Split):
        return nvfp4_wgmma_split.gemm_split
    return nvfp4_wgmma.gemm if isinstance(config, Few) else nvfp4_wgmma_large.gemm_large


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
    return _kernel_of(config)(x, words, scale_bytes, global_scale, bias, n, hardware, config)


def grouped_gemm(
    x: torch.Tensor,
    weight: Weight,
    n: int,
    hardware: Hardware,
    config: Config,
    routing: Schedule,
    *,
    out: torch.Tensor | None = None,
    **epilogue: Any,
) -> torch.Tensor:
    """The product of each tile of rows with its expert's weight (codes, scales, global scales); `epilogue` are more
    fields of `nvfp4_wgmma.Routed`."""
    routed = nvfp4_wgmma.Routed(routing.tile_expert, routing.tile_rows, routing.tile_count, **epilogue)
    return _kernel_of(config)(x, *weight, None, n, hardware, config, routed, out)


def expert_products(
    x: torch.Tensor, w13: Weight, w2: Weight, activation: str, routing: Schedule, hardware: Hardware, config: PairConfig
) -> tuple[torch.Tensor, bool]:
    """Each slot's result times its router weight, of x [T, H], and whether they are in the schedule's tiles; see
    `nvfp4_moe`. The accelerator reads whole tiles, so rows are copied to them first. For many rows it stores whole
    tiles as well, and the results stay there; kernels for few rows store each at its slot's number."""
    rows = scatter_rows(x, routing.slot_row, routing.row_map.numel(), hardware)
    h = grouped_gemm(rows, w13, rows_of(w13), hardware, config.w13, routing, activation=activation)
    in_tiles = isinstance(config.w2, Large)
    # Tiles take the place of x's rows, which nobody needs any more.
    out = rows if in_tiles else x.new_empty((routing.slot_row.numel(), rows_of(w2)))
    epilogue = {"row_map": None if in_tiles else routing.row_map, "row_weight": routing.row_weight}
    return grouped_gemm(h, w2, rows_of(w2), hardware, config.w2, routing, out=out, **epilogue), in_tiles


def serves_fp8(dtype: torch.dtype, bias: torch.dtype | None, n: int) -> bool:
    """Whether `gemm_fp8` serves x and a bias of these dtypes: always."""
    return True


def fp8_config_of(fields: Mapping[str, Any]) -> Fp8Config:
    """The configuration with these fields, as configs/nvfp4_gemm_fp8 holds it."""
    return Expanded(**fields) if "values" in fields else Large(**fields)


# Of an expanded weight with fewer columns the estimate is too low, 15% with 512: cuBLAS stores more than it multiplies.
_EXPANDED_COLUMNS = 1024


def default_fp8_config(m: int, n: int, k: int, hardware: Hardware) -> Fp8Config | None:
    """What should be fastest where nobody has measured, by an estimate of each; None for the 16-bit product, which FP8
    must be estimated to beat by 5%."""
    config = nvfp4_estimate.fastest(m, n, k)
    if m <= 128 or config is None:
        return None
    exact = nvfp4_estimate.microseconds(config, m, n, k)
    found: list[Fp8Config] = [nvfp4_estimate.fastest_fp8(m, n, k)]
    if k >= _EXPANDED_COLUMNS:
        found.append(Expanded())
    us, chosen = min(((nvfp4_estimate.microseconds_fp8(each, m, n, k), each) for each in found), key=itemgetter(0))
    return chosen if exact > 1.05 * us else None


def gemm_fp8(
    x: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    hardware: Hardware,
    config: Fp8Config,
) -> torch.Tensor:
    """The same product in FP8: a row of x becomes E4M3 with a scale of its own, and the weight what
    `formats.nvfp4.to_fp8` makes of it. K is at most `per_token_quant.MAX_COLUMNS`. What cuBLAS does not serve, fp16, a
    bias (`ops.ptpc_gemm` says why) and N that is not a multiple of 16 among it, our own kernel does."""
    m, k = x.shape
    codes, x_scale = per_token_quant_fp8(x, fp8.OCP, interleave=True)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if isinstance(config, Expanded):
        if x.dtype == torch.bfloat16 and bias is None and n % 16 == 0:
            return multiply_slices(
                codes, x_scale, global_scale * UNSCALE_FP8, None, out,
                lambda first, rows: expand_fp8(words, scale_bytes, first, rows, n, k, hardware), config.values,
            )  # fmt: skip
        config = nvfp4_estimate.fastest_fp8(m, n, k)
    operands = (words, scale_bytes, global_scale, bias)
    return nvfp4_wgmma_large.gemm_large_fp8(codes, x_scale, *operands, out, hardware, config)


class _Experts(NamedTuple):
    """What is fastest of experts with up to `rows` rows each on average: the product with w13, that with w2 where its
    sums are of up to _SHORT columns, and where they are of more."""

    rows: float
    w13: Config
    short: Config
    long: Config


# What an H200 took least with, in the mean over the experts of seven models, each with 1 to 1024 tokens: with what
# `moe_config` makes of it 1% slower than the best of what was tried for each, and 5% at most (by hand). Tiles are a
# little higher than the average, so that few experts have two.
_EXPERTS = (
    _Experts(5.5, Few(8, 64, 128, 0, 2, 3), Few(8, 128, 64, 528, 2, 4), Split(8, 2, 2 * SMS)),
    _Experts(14, Few(16, 64, 128, 0, 2, 3), Few(16, 128, 64, 528, 2, 3), Few(16, 64, 128, 0, 2, 3)),
    _Experts(27, Few(32, 64, 128, 0, 2, 2), Few(32, 128, 64, 0, 4, 2, 8), Few(32, 64, 128, 0, 2, 2)),
    _Experts(60, Large(64, 256, 0), Large(64, 256, 0), Few(64, 128, 64, 0, 4, 2, 8)),
    _Experts(inf, *3 * [Large(128, 256, 0)]),
)
# Columns: sums of up to 2048 were measured as short, of 4096 and more as long, and none between.
_SHORT = 2048


def moe_config(slots: int, experts: int, hidden: int, inner: int, hardware: Hardware) -> PairConfig:
    """What should be fastest for `slots` rows of `experts` that nobody has measured, of whatever size they are."""
    usual = _EXPERTS[bisect_left(_EXPERTS, slots / experts, key=itemgetter(0))]
    w13, w2 = usual.w13, usual.short if inner <= _SHORT else usual.long
    chosen = min(slots, experts)
    if w13.block_m == 8:
        w13_tiles, w2_tiles = (chosen * cdiv(n, 64) for n in (2 * inner, hidden))
        w13 = _of_few_tiles(w13_tiles, hidden) or w13
        w2 = _of_few_tiles(w2_tiles, inner) or w2
        if inner <= _SHORT and w2_tiles <= 16 * SMS:
            # A program for each tile divides nothing before its first request.
            w2 = Few(8, 64, 128, 0, 2, 2)
    # The last tile of an expert is half full on average.
    tiles_m = max(chosen, slots / w13.block_m + chosen / 2)
    return PairConfig(_of_full_waves(w13, tiles_m, 2 * inner), _of_full_waves(w2, tiles_m, hidden))


def _of_few_tiles(tiles: int, k: int) -> Split | None:
    """Programs that share the steps of all tiles, with consumers that share those of one, where there are few tiles of
    long sums: each alone would leave multiprocessors idle, or wait for its own chain of steps."""
    if k <= _SHORT or tiles > 3 * SMS:
        return None
    return Split(8, 4, SMS if tiles <= SMS else 2 * SMS)


def _of_full_waves(config: Config, tiles_m: float, n: int) -> Config:
    """With tiles of half as many rows of the weight, where those leave less of the multiprocessors' last wave idle. One
    of 256 takes 1.7 times as long as one of 128. Of 38 products that says which is faster, but for two in which it
    matters by 1% (by hand, on an H200)."""
    if not isinstance(config, Large):
        return config
    took = {block_n: ceil(tiles_m * n / block_n / SMS) * us for block_n, us in ((256, 1.7), (128, 1.0))}
    return replace(config, block_n=min(took, key=took.__getitem__))
