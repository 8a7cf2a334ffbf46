# SPDX-License-Identifier: Apache-2.0
"""Matrix product of per-token FP8 activations and per-channel FP8 weights, scales and bias in the epilogue.

One kernel serves decode and prefill, on NVIDIA and AMD; `GemmConfig` says how it is cut. A program walks over
output tiles; the scales factor out of the sum over K, so the loop multiplies bare codes and the epilogue applies them
in fp32. With `split_k` > 1 every program sums a part of K into an fp32 workspace and a second kernel adds the parts in
a fixed order: the result does not depend on which program finished first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.hardware import Hardware, multiprocessors, units_of
from llm_quant_rocm.kernels.decode import e4m3_to_fp16
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pdl import pdl_option, pdl_option_of_tiles, programmatic_launch
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2
from llm_quant_rocm.kernels.xcd import neighbours


@dataclass(frozen=True)
class GemmConfig:
    """How the product is cut.

    Attributes:
        block_m, block_n, block_k: one step of the loop multiplies [block_m, block_k] by [block_k, block_n].
        group_m: tiles of M that run together over the same columns, for the L2 cache.
        split_k: programs that share one output tile's sum over K.
        swap_ab: multiply W . X^T, so that N fills the matrix unit's long side when M is small.
        tma: load tiles by descriptor (hardware.tma); needs rows of a multiple of 16 bytes.
        programs: programs per multiprocessor that walk over the tiles; 0 starts one program a tile.
        stages, warps: Triton's num_stages and num_warps.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    group_m: int = 8
    split_k: int = 1
    swap_ab: bool = False
    tma: bool = False
    programs: int = 0


def config_of(fields: Mapping[str, Any]) -> GemmConfig:
    """The configuration with these fields, as configs/ptpc_gemm holds it."""
    return GemmConfig(**fields)


def default_config(hardware: Hardware, m: int, n: int, k: int) -> GemmConfig:
    """A sound choice for shapes and devices that nobody has measured."""
    if hardware.units:
        return _on_all_units(hardware, m, n, k)
    if m <= 64:
        block_m = max(16, next_power_of_2(m))
        tiles = cdiv(n, 64)
        parts = 256 // tiles if hardware.tma else round(2 * units_of(hardware.arch) / tiles)
        split_k = max(1, min(8, parts, k // 1024))
        swap = hardware.tma
        return GemmConfig(block_m, 64, 128, 6 if hardware.tma else 2, 4, 1, split_k, swap, hardware.tma and k % 16 == 0)
    if hardware.arch.startswith("sm_12"):  # with 99 KiB of shared memory, less than half of what the others have
        return GemmConfig(128, 128, 128, 3, 4 if m <= 256 else 8, tma=k % 16 == 0)
    if hardware.tma:
        return GemmConfig(128, 128 if m <= 256 else 256, 128, 4, 4 if m <= 256 else 8, tma=k % 16 == 0)
    return GemmConfig(128, 128, 128, 2, 8) if hardware.fp8_units else GemmConfig(64, 128, 64, 2, 4)


def _on_all_units(hardware: Hardware, m: int, n: int, k: int) -> GemmConfig:
    """The largest tiles of which each compute unit of an AMD GPU has one, and where there are too few of the smallest,
    parts of K. By counting, not measured on AMD.

    Memory is busy with about as many bytes on their way as it reads in a microsecond: 5.3 MB on an MI300X, by its data
    sheet, 17 KiB a unit. A program of the smallest tiles has 10 to 32 KiB there, and two a unit hide what one waits
    for. A part has 512 columns at least, and the parts come to at most half of the weight's bytes: 8 an element of the
    result. Below 2048 columns a sum takes no longer than a second kernel.
    """
    if m > 64:
        large = ((128, 128, 8), (64, 128, 4)) if hardware.fp8_units else ((64, 64, 4),)
        for block_m, block_k, warps in large:
            if cdiv(m, block_m) * cdiv(n, 128) >= hardware.units:
                # Of 128 rows: with 4 warps Triton 3.6 spills on gfx950 where K is ragged.
                return GemmConfig(block_m, 128, block_k, 2, warps)
    # Of 32 rows four waves make two products of 32 x 32, each twice.
    block_m = 16 if m <= 16 else 64
    block_k = 256 if hardware.fp8_units and k % 256 == 0 else 128
    tiles, steps = cdiv(m, block_m) * cdiv(n, 64), cdiv(k, block_k)
    rows = max(16, next_power_of_2(m))  # for few numbers of parts: a kernel that adds them is compiled for each
    most = min(round(2 * hardware.units / tiles), 16, k // 512, k // (16 * rows)) if k >= 2048 else 1
    split_k = cdiv(steps, cdiv(steps, max(1, most)))  # of those with as long a longest part, the least
    return GemmConfig(block_m, 64, block_k, 2, 4, 1 if m <= 64 else 8, split_k)


def batch_invariant(config: Any, hardware: Hardware, n: int, k: int) -> GemmConfig:
    """What takes the place of `config` where a row's bits may not depend on the rows beside it: one configuration for
    any number of them, since a matrix unit may add in another order for other tiles."""
    return replace(default_config(hardware, 64, n, k), split_k=1)


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """tile_m and tile_n of the output tile number `tile`: GROUP_M tiles of M at a time with all tiles of N."""
    group = tile // (GROUP_M * tiles_n)
    rest = tile % (GROUP_M * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + rest % rows, rest // rows


@triton.jit
def load_step(x_rows, w_rows, column, K, EVEN_K: tl.constexpr, BY_COLUMN: tl.constexpr):
    """`column`s [BLOCK_K] of rows of x [BLOCK_M, 1] and of the weight [BLOCK_N, 1], or BY_COLUMN [1, BLOCK_N]; zeros
    from K on."""
    w_column = column[:, None] if BY_COLUMN else column[None, :]
    if EVEN_K:
        a = tl.load(x_rows + column[None, :])
        b = tl.load(w_rows + w_column)
    else:
        a = tl.load(x_rows + column[None, :], mask=(column < K)[None, :], other=0.0)
        b = tl.load(w_rows + w_column, mask=w_column < K, other=0.0)
    return a, b


@triton.jit
def multiply_step(acc, a, b, DECODE: tl.constexpr, SWAP_AB: tl.constexpr, BY_COLUMN: tl.constexpr):
    """acc and the product of what `load_step` loads; with SWAP_AB it is the weight's rows times x's."""
    if DECODE:
        a = e4m3_to_fp16(a)
        b = e4m3_to_fp16(b)
    return tl.dot(b, a.T, acc) if SWAP_AB else tl.dot(a, b if BY_COLUMN else b.T, acc)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["M"])
def ptpc_gemm_kernel(
    x, w, out, xscale_ptr, wscale_ptr, bias_ptr, M, N, K, x_stride, w_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, SWAP_AB: tl.constexpr, TMA: tl.constexpr, DECODE: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
    TMA_STORE: tl.constexpr, PDL: tl.constexpr, XCDS: tl.constexpr
):  # fmt: skip
    """x and w are tensor descriptors with TMA, out with TMA_STORE, pointers otherwise; out is the workspace with
    SPLIT_K > 1."""
    # On CDNA2 and 3 Triton swizzles the weight's tile in the LDS only where it is loaded as [K, N]: turned, its rows of
    # 128 bytes begin in one bank, and to read them takes up to 8 times as many clocks. CDNA4 has no conflicts.
    BY_COLUMN: tl.constexpr = tl.target_info.is_hip() and not (SWAP_AB or tl.target_info.is_hip_cdna4())
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = split * steps * BLOCK_K
    last = tl.minimum(first + steps * BLOCK_K, K)
    if PDL:
        programmatic_launch()
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=PERSISTENT):
        tile_m, tile_n = _place(neighbours(tile, tiles_m * tiles_n, XCDS), tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if not TMA:
            # Rows beyond the edge read row 0 again, and are not stored: no mask in the loop.
            depth = tl.arange(0, BLOCK_K)
            x_rows = x + tl.where(rows < M, rows, 0).to(tl.int64)[:, None] * x_stride
            w_row = tl.where(columns < N, columns, 0).to(tl.int64)
            w_rows = w + (w_row[None, :] if BY_COLUMN else w_row[:, None]) * w_stride
        if SWAP_AB:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            if TMA:
                a = x.load([tile_m * BLOCK_M, k])
                b = w.load([tile_n * BLOCK_N, k])
            else:
                a, b = load_step(x_rows, w_rows, k + depth, K, EVEN_K, BY_COLUMN)
            acc = multiply_step(acc, a, b, DECODE, SWAP_AB, BY_COLUMN)
        # Recomputed here: kept across the loop, they would cost registers.
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        if TMA_STORE:
            # In two halves, so that the way to memory takes half the shared memory and the loads keep their stages.
            xscale = tl.load(xscale_ptr + rows, mask=rows < M, other=0.0)[:, None]
            left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            for half in tl.static_range(2):
                start = tile_n * BLOCK_N + half * (BLOCK_N // 2)
                columns = start + tl.arange(0, BLOCK_N // 2)
                part = (left if half == 0 else right) * xscale
                part *= tl.load(wscale_ptr + columns, mask=columns < N, other=0.0)[None, :]
                if HAS_BIAS:
                    part += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
                out.store([tile_m * BLOCK_M, start], part.to(out.dtype))
        else:
            total = acc.T if SWAP_AB else acc
            columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            place = rows.to(tl.int64)[:, None] * N + columns[None, :]
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            if SPLIT_K > 1:
                place += split.to(tl.int64) * M * N
            else:
                total *= tl.load(xscale_ptr + rows, mask=rows < M, other=0.0)[:, None]
                total *= tl.load(wscale_ptr + columns, mask=columns < N, other=0.0)[None, :]
                if HAS_BIAS:
                    total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
            tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def split_k_kernel(
    partial_ptr, xscale_ptr, wscale_ptr, bias_ptr, out_ptr, M, N,
    SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Adds the parts [SPLIT_K, M, N] in order and applies the epilogue."""
    if PDL:
        programmatic_launch()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT_K):
        total += tl.load(partial_ptr + (part * M.to(tl.int64) + row) * N + columns, mask=inside, other=0.0)
    total *= tl.load(xscale_ptr + row)
    total *= tl.load(wscale_ptr + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def rows_of_16_bytes(*codes: torch.Tensor) -> bool:
    """Whether a descriptor can name these matrices: rows of whole lines of 16 bytes, none over another."""
    return not any(t.data_ptr() % 16 or t.stride(0) % 16 or t.stride(0) < t.shape[1] for t in codes)


def ptpc_gemm(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    hardware: Hardware,
    config: GemmConfig,
) -> torch.Tensor:
    """Product [M, N] of xq [M, K] and wq [N, K], both with contiguous rows; xscale [M, 1], wscale [N, 1], bias [N]."""
    (m, k), n = xq.shape, wq.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=xq.device)
    split_k = min(config.split_k, cdiv(k, config.block_k))
    destination = out if split_k == 1 else torch.empty((split_k, m, n), dtype=torch.float32, device=xq.device)
    decode = not hardware.fp8_units
    tma = config.tma and hardware.tma and not decode and rows_of_16_bytes(xq, wq)
    x, w = (xq.view(torch.uint8), wq.view(torch.uint8)) if decode else (xq, wq)
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        x = TensorDescriptor.from_tensor(xq, [config.block_m, config.block_k])
        w = TensorDescriptor.from_tensor(wq, [config.block_n, config.block_k])
    # An fp32 tile would take the shared memory that the loads were given.
    tma_store = tma and not config.swap_ab and split_k == 1 and out.element_size() == 2 and n % 8 == 0
    if tma_store:
        destination = TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // 2])
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    programs = tiles
    if config.programs:
        programs = min(tiles, config.programs * multiprocessors(xq.device))
    # Of a few rows, programs share no more than these.
    early = pdl_option(hardware) if m <= 64 else pdl_option_of_tiles(hardware, tiles, k)
    launch(
        ptpc_gemm_kernel, (programs, split_k),
        x, w, destination, xscale, wscale, bias, m, n, k, xq.stride(0), wq.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        SPLIT_K=split_k, SWAP_AB=config.swap_ab, TMA=tma, DECODE=decode, EVEN_K=k % config.block_k == 0,
        HAS_BIAS=bias is not None, PERSISTENT=programs < tiles, STAGES=config.stages,
        TMA_STORE=tma_store, PDL=hardware.pdl, XCDS=hardware.xcds,
        num_warps=config.warps, num_stages=config.stages, **early,
    )  # fmt: skip
    if split_k > 1:
        launch(
            split_k_kernel, (m, cdiv(n, 1024)),
            destination, xscale, wscale, bias, out, m, n, SPLIT_K=split_k, HAS_BIAS=bias is not None, BLOCK=1024,
            PDL=hardware.pdl, **pdl_option(hardware),
        )  # fmt: skip
    return out
