# SPDX-License-Identifier: Apache-2.0
"""NVFP4 GEMM of many tokens on Hopper."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm_quant_rocm.formats.nvfp4_wgmma import COLUMNS
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.decode_hopper import UNSCALE
from llm_quant_rocm.kernels.nvfp4_wgmma import _decode, _load, _store_tile, load_tile
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch


@dataclass(frozen=True)
class Config:
    """How the product is cut.

    Attributes:
        block_m: rows of x in a tile, at most 256. A tile has 128 rows of the weight.
        block_k: columns of a step, 64 or 128.
        stages: steps of x in shared memory.
        unroll: steps between two points where a consumer's queue of products runs dry.
        stream: cut the tiles left over from whole waves evenly among all programs.
        registers: of a thread of a consumer.
    """

    block_m: int = 256
    block_k: int = 64
    stages: int = 5
    unroll: int = 4
    stream: bool = True
    registers: int = 240


@gluon.jit
def _share(program, groups, tiles, whole, programs):
    """The program's range of the groups of steps of all tiles from `whole` on."""
    total = (tiles - whole) * groups
    each = total // programs
    extra = total % programs
    begin = program * each + gl.minimum(program, extra)
    return begin, begin + each + gl.where(program < extra, 1, 0)


@gluon.jit
def _pieces(groups, tiles, whole):
    """How many pieces of work the program has: whole tiles, and ranges of the tiles that are cut."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    begin, end = _share(program, groups, tiles, whole, programs)
    waves = (whole - program + programs - 1) // programs
    return waves, begin, end, waves + gl.where(end > begin, (end - 1) // groups - begin // groups + 1, 0)


@gluon.jit
def _piece(index, waves, begin, end, groups, whole):
    """Tile, first group and end of groups of the program's piece of work `index`."""
    cut = begin // groups + index - waves
    is_whole = index < waves
    tile = gl.where(is_whole, gl.program_id(0) + index * gl.num_programs(0), whole + cut)
    first = gl.where(is_whole, 0, gl.maximum(begin - cut * groups, 0))
    last = gl.where(is_whole, groups, gl.minimum(end - cut * groups, groups))
    return tile, first, last


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _producer(
    x, ring, ready, empty, M, N, K, whole,
    BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Fills the ring with tiles of x in the order in which the consumers take them."""
    BLOCK_K: gl.constexpr = DEPTH * 64
    tiles_m = gl.cdiv(M, BLOCK_M)
    groups = gl.cdiv(gl.cdiv(K, BLOCK_K), UNROLL)
    waves, begin, end, pieces = _pieces(groups, tiles_m * gl.cdiv(N, 128), whole)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    stage = 0
    phase = 1
    for index in range(0, pieces):
        tile, first, last = _piece(index, waves, begin, end, groups, whole)
        row = tile % tiles_m * BLOCK_M
        for step in range(first * UNROLL, last * UNROLL):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready.index(stage), BLOCK_M * BLOCK_K * 2)
            load_tile(x, [row, step * BLOCK_K], ready.index(stage), ring.index(stage))
            stage, phase = _advance(stage, phase, STAGES)


@gluon.jit
def _consumer(
    half, words, scale_bytes, global_scale, bias, out, partial, ring, ready, empty, M, N, K, whole,
    BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, FP16: gl.constexpr,
    UNSCALE: gl.constexpr, STREAM: gl.constexpr
):  # fmt: skip
    """Multiplies 64 of a tile's 128 rows of the weight: the lower (half = 0) or the upper ones."""
    NT: gl.constexpr = 4
    BLOCK_K: gl.constexpr = DEPTH * 64
    dtype: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    word_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])

    tiles_m = gl.cdiv(M, BLOCK_M)
    end_step = gl.cdiv(K, BLOCK_K) - 1
    groups = gl.cdiv(end_step + 1, UNROLL)
    row_tiles = (N + 127) // 128 * 8
    waves, begin, end, pieces = _pieces(groups, tiles_m * gl.cdiv(N, 128), whole)

    piece = gl.arange(0, DEPTH * NT, layout=gl.SliceLayout(1, word_layout))
    piece = (piece // NT) * row_tiles + half * NT + piece % NT
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, word_layout))
    word_offset = piece[:, None] * 128 + word[None, :]
    pair = gl.max_contiguous(gl.multiple_of((word >> 4) * 4 + (word & 3), 4), 4)
    scale_offset = piece[:, None] * 32 + pair[None, :]

    stage = 0
    phase = 0
    for index in range(0, pieces):
        tile, first, last = _piece(index, waves, begin, end, groups, whole)
        tile_m = tile % tiles_m
        tile_n = tile // tiles_m
        tile_words = words + tile_n.to(gl.int64) * (8 * 128)
        tile_scales = scale_bytes + tile_n.to(gl.int64) * (8 * 32)
        step = first * UNROLL
        codes, pairs = _load(tile_words, tile_scales, gl.minimum(step, end_step), word_offset, scale_offset, row_tiles, DEPTH)
        next_codes, next_pairs = _load(
            tile_words, tile_scales, gl.minimum(step + 1, end_step), word_offset, scale_offset, row_tiles, DEPTH
        )
        operand = _decode(codes, pairs, FP16, DEPTH, operand_layout)
        codes = next_codes
        pairs = next_pairs
        acc = gl.zeros((64, BLOCK_M), gl.float32, layout=acc_layout)
        previous = operand
        for _ in range(first, last):
            for i in gl.static_range(UNROLL):
                mbarrier.wait(ready.index(stage), phase)
                acc = warpgroup_mma(operand, ring.index(stage).permute((1, 0)), acc, is_async=True)
                if i > 0:
                    acc, previous = warpgroup_mma_wait(1, deps=[acc, previous])
                    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
                next_codes, next_pairs = _load(
                    tile_words, tile_scales, gl.minimum(step + 2, end_step), word_offset, scale_offset, row_tiles, DEPTH
                )
                previous = operand
                operand = _decode(codes, pairs, FP16, DEPTH, operand_layout)
                codes = next_codes
                pairs = next_pairs
                step += 1
                if i < UNROLL - 1:
                    stage, phase = _advance(stage, phase, STAGES)
            acc, previous = warpgroup_mma_wait(0, deps=[acc, previous])
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = _advance(stage, phase, STAGES)

        if STREAM:
            if last - first == groups:
                _store_tile(
                    acc, tile_m, tile_n * 2 + half, global_scale, bias, out, None, None, M, N,
                    BLOCK_M, 64, dtype, UNSCALE, None, acc_layout, 4,
                )  # fmt: skip
            else:
                slot = gl.program_id(0) * 2 + gl.where(first == 0, 1, 0)
                n = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
                m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, acc_layout))
                place = partial + slot.to(gl.int64) * (128 * BLOCK_M)
                gl.store(place + n[:, None] * BLOCK_M + m[None, :], acc)
        else:
            _store_tile(
                acc, tile_m, tile_n * 2 + half, global_scale, bias, out, None, None, M, N,
                BLOCK_M, 64, dtype, UNSCALE, None, acc_layout, 4,
            )  # fmt: skip


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M", "whole"])
def nvfp4_wgmma_large_kernel(
    x, words, scale_bytes, global_scale, bias, out, partial, M, N, K, whole,
    BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, REGISTERS: gl.constexpr,
    FP16: gl.constexpr, UNSCALE: gl.constexpr, STREAM: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Every program's share of the tiles of out."""
    dtype: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, DEPTH * 64], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                0, words, scale_bytes, global_scale, bias, out, partial, ring, ready, empty, M, N, K, whole,
                BLOCK_M, DEPTH, STAGES, UNROLL, FP16, UNSCALE, STREAM,
            )),
            (_consumer, (
                1, words, scale_bytes, global_scale, bias, out, partial, ring, ready, empty, M, N, K, whole,
                BLOCK_M, DEPTH, STAGES, UNROLL, FP16, UNSCALE, STREAM,
            )),
            (_producer, (x, ring, ready, empty, M, N, K, whole, BLOCK_M, DEPTH, STAGES, UNROLL, PDL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "whole", "programs"])
def add_shares_kernel(
    partial, global_scale, bias, out, M, N, K, whole, programs,
    BLOCK_M: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    UNSCALE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Adds the parts of the tiles that several programs share, in order, and applies the epilogue."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    groups = tl.cdiv(tl.cdiv(K, DEPTH * 64), UNROLL)
    cut = tl.program_id(0)
    total = (tiles_m * tl.cdiv(N, 128) - whole) * groups
    each = total // programs
    extra = total % programs
    border = extra * (each + 1)
    # The programs that hold the first and the last group of the tile.
    begin = cut * groups
    end = begin + groups - 1
    first = tl.where(begin < border, begin // (each + 1), extra + (begin - border) // tl.maximum(each, 1))
    last = tl.where(end < border, end // (each + 1), extra + (end - border) // tl.maximum(each, 1))
    if PDL:
        programmatic_launch()
    if first < last:
        m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        n = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        tile = whole + cut
        rows = (tile % tiles_m) * BLOCK_M + m
        columns = (tile // tiles_m) * 128 + n
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for program in range(first, last + 1):
            start = program * each + tl.minimum(program, extra)
            slot = program * 2 + tl.where(start <= begin, 1, 0)
            part = partial + slot.to(tl.int64) * (128 * BLOCK_M)
            sums += tl.load(part + n[None, :] * BLOCK_M + m[:, None], mask=inside, other=0.0)
        sums = sums * UNSCALE * tl.load(global_scale + columns, mask=columns < N, other=0.0)[None, :]
        if bias is not None:
            sums += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], sums.to(out.dtype.element_ty), mask=inside)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gemm_large(
    x: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    hardware: Hardware,
    config: Config,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x . weight^T * global_scale + bias: [M, n] in x's dtype, of x [M, K] (bf16 or fp16, contiguous rows)."""
    m, k = x.shape
    if x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(0) < k:
        x = x.clone(memory_format=torch.contiguous_format)  # the tensor memory accelerator reads lines of 16 bytes
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    depth = config.block_k // COLUMNS
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, 128)
    programs = _multiprocessors(x.device)
    stream = config.stream and tiles % programs != 0
    partial = None
    whole = tiles
    if stream:
        # One wave more than what is left over is cut: so a program's share is never a small part of a tile.
        whole = max(tiles // programs - 1, 0) * programs
        partial = torch.empty((2 * programs, 128, config.block_m), dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout.get_default_for([config.block_m, config.block_k], gl.bfloat16)
    fp16 = x.dtype == torch.float16
    rows_of_x = TensorDescriptor.from_tensor(x, [config.block_m, config.block_k], layout)
    nvfp4_wgmma_large_kernel[(programs,)](
        rows_of_x, words, scale_bytes.view(torch.uint16), global_scale, bias, out, partial, m, n, k, whole,
        BLOCK_M=config.block_m, DEPTH=depth, STAGES=config.stages, UNROLL=config.unroll, REGISTERS=config.registers,
        FP16=fp16, UNSCALE=UNSCALE[fp16], STREAM=stream, PDL=hardware.pdl, num_warps=4, **pdl_option(hardware),
    )  # fmt: skip
    if stream:
        rows, columns = 16, 128
        add_shares_kernel[(tiles - whole, triton.cdiv(min(m, config.block_m), rows), 128 // columns)](
            partial, global_scale, bias, out, m, n, k, whole, programs, BLOCK_M=config.block_m, DEPTH=depth,
            UNROLL=config.unroll, ROWS=rows, COLUMNS=columns, UNSCALE=UNSCALE[fp16], PDL=hardware.pdl, num_warps=4,
            **pdl_option(hardware),
        )  # fmt: skip
    return out
