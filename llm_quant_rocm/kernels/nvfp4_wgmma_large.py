# SPDX-License-Identifier: Apache-2.0
"""NVFP4 GEMM of many tokens on Hopper."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
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
from llm_quant_rocm.kernels.nvfp4_wgmma import _decode, _store_tile, cta_barrier, load_tile
from llm_quant_rocm.kernels.pdl import pdl_option


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
    registers: int = 232
    ahead: int = 0


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
def _leave(value):
    """Ends a worker's warps. They would wait for their next work otherwise, in a loop around everything, and ptxas does
    not keep products in flight around a loop within a loop whose register limits change."""
    gl.inline_asm_elementwise("exit; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _prefetch(pointer, BYTES: gl.constexpr):
    """Has bytes brought to the L2 cache; called by one warp."""
    if BYTES == 4096:
        gl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .b32 lane;
            mov.u32 lane, %laneid;
            setp.eq.u32 p, lane, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], 4096;
            mov.b32 $0, 0;
            }
            """,
            "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .b32 lane;
            mov.u32 lane, %laneid;
            setp.eq.u32 p, lane, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], 512;
            mov.b32 $0, 0;
            }
            """,
            "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _producer(
    x, words, scale_bytes, ring, ready, empty, M, N, K, whole,
    BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr
):  # fmt: skip
    """Fills the ring with tiles of x in the order in which the consumers take them."""
    BLOCK_K: gl.constexpr = DEPTH * 64
    tiles_m = gl.cdiv(M, BLOCK_M)
    groups = gl.cdiv(gl.cdiv(K, BLOCK_K), UNROLL)
    row_tiles = (N + 127) // 128 * 8
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
            if AHEAD > 0:
                if step + AHEAD < last * UNROLL:
                    piece = ((step + AHEAD) * DEPTH * row_tiles + tile // tiles_m * 8).to(gl.int64)
                    for _ in gl.static_range(DEPTH):
                        _prefetch(words + piece * 128, 4096)
                        _prefetch(scale_bytes + piece * 32, 512)
                        piece += row_tiles
            stage, phase = _advance(stage, phase, STAGES)
    _leave(stage)


@gluon.jit
def _load_codes(
    words, scale_bytes, tile_n, step, end_step, word_offset, scale_offset, row_tiles, DEPTH: gl.constexpr
):
    """Words and scale pairs [DEPTH * 4, 128] of a step; steps beyond K have those of the last one."""
    piece = (gl.minimum(step, end_step) * DEPTH * row_tiles + tile_n * 8).to(gl.int64)
    return gl.load(words + piece * 128 + word_offset), gl.load(scale_bytes + piece * 32 + scale_offset)


@gluon.jit
def _owner(group, groups, tiles, whole, programs):
    """The program whose share has this group of the tiles that are cut."""
    total = (tiles - whole) * groups
    each = total // programs
    extra = total % programs
    border = extra * (each + 1)
    return gl.where(group < border, group // (each + 1), extra + (group - border) // gl.maximum(each, 1))


@gluon.jit
def _halves(values):
    """Columns of a tensor with a row for each thread, in two halves."""
    HALF: gl.constexpr = values.shape[1] // 2
    layout: gl.constexpr = gl.BlockedLayout([1, HALF], [32, 1], [4, 1], [1, 0])
    first, second = values.reshape(128, 2, HALF).permute(0, 2, 1).split()
    return gl.convert_layout(first, layout, assert_trivial=True), gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def _part_offsets(COLUMNS: gl.constexpr, FIRST: gl.constexpr):
    """Where columns from FIRST on of a thread's part stand: four values of each thread side by side."""
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return (column // 4 * 512 + column % 4)[None, :]


@gluon.jit
def _part_threads(part, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    return (part + gl.arange(0, 128, layout=gl.SliceLayout(1, layout)) * 4)[:, None]


@gluon.jit
def _by_thread(acc):
    """acc [64, M] with a row for each thread, [128, M / 2]."""
    M: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, M // 2], [32, 1], [4, 1], [1, 0])
    # warp, row half, row, column tile, lane % 4, column
    values = acc.reshape(4, 2, 8, M // 8, 4, 2).permute(0, 2, 4, 3, 1, 5).reshape(128, M // 2)
    return gl.convert_layout(values, layout, assert_trivial=True)


@gluon.jit
def _store_part(acc, part):
    values = _by_thread(acc)
    COLUMNS: gl.constexpr = values.shape[1]
    gl.store(_part_threads(part, COLUMNS) + _part_offsets(COLUMNS, 0), values)


@gluon.jit
def _add_piece(values, part, FIRST: gl.constexpr):
    """values plus the part's columns from FIRST on; not all at once, for want of registers."""
    COLUMNS: gl.constexpr = values.shape[1]
    if COLUMNS > 32:
        first, second = _halves(values)
        first = _add_piece(first, part, FIRST)
        second = _add_piece(second, part, FIRST + COLUMNS // 2)
        layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
        values = gl.join(first, second).permute(0, 2, 1).reshape(128, COLUMNS)
        return gl.convert_layout(values, layout, assert_trivial=True)
    else:
        return values + gl.load(
            _part_threads(part, COLUMNS) + _part_offsets(COLUMNS, FIRST), cache_modifier=".cg"
        )


@gluon.jit
def _add_part(acc, part, acc_layout: gl.constexpr):
    M: gl.constexpr = acc.shape[1]
    values = _add_piece(_by_thread(acc), part, 0)
    values = values.reshape(4, 8, 4, M // 8, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(64, M)
    return gl.convert_layout(values, acc_layout, assert_trivial=True)


@gluon.jit
def _consumer(
    half: gl.constexpr, words, scale_bytes, global_scale, bias, out, partial, flags, ring, ready, empty, M, N, K, whole,
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
    tiles = tiles_m * gl.cdiv(N, 128)
    end_step = gl.cdiv(K, BLOCK_K) - 1
    groups = gl.cdiv(end_step + 1, UNROLL)
    row_tiles = (N + 127) // 128 * 8
    waves, begin, end, pieces = _pieces(groups, tiles, whole)

    piece = gl.arange(0, DEPTH * NT, layout=gl.SliceLayout(1, word_layout))
    piece = (piece // NT) * row_tiles + half * NT + piece % NT
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, word_layout))
    word_offset = piece[:, None] * 128 + word[None, :]
    pair = gl.max_contiguous(gl.multiple_of((word >> 4) * 4 + (word & 3), 4), 4)
    scale_offset = piece[:, None] * 32 + pair[None, :]

    stage = 0
    phase = 0
    next_tile, next_first, _ = _piece(0, waves, begin, end, groups, whole)
    next_n = gl.minimum(next_tile, tiles - 1) // tiles_m
    codes, pairs = _load_codes(words, scale_bytes, next_n, next_first * UNROLL, end_step, word_offset, scale_offset, row_tiles, DEPTH)
    next_codes, next_pairs = _load_codes(
        words, scale_bytes, next_n, next_first * UNROLL + 1, end_step, word_offset, scale_offset, row_tiles, DEPTH
    )
    operand = _decode(codes, pairs, FP16, DEPTH, operand_layout)
    codes = next_codes
    pairs = next_pairs
    for index in range(0, pieces):
        tile, first, last = _piece(index, waves, begin, end, groups, whole)
        next_tile, next_first, _ = _piece(gl.minimum(index + 1, pieces - 1), waves, begin, end, groups, whole)
        tile_m = tile % tiles_m
        tile_n = tile // tiles_m
        next_n = next_tile // tiles_m
        acc = gl.zeros((64, BLOCK_M), gl.float32, layout=acc_layout)
        # At least once, which the compiler would not know.
        for count in range(0, gl.maximum(last - first, 1)):
            for i in gl.static_range(UNROLL):
                mbarrier.wait(ready.index(stage), phase)
                acc = warpgroup_mma(operand, ring.index(stage).permute((1, 0)), acc, is_async=True)
                if i == 0:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    release = count > 0
                else:
                    acc, previous = warpgroup_mma_wait(1, deps=[acc, previous])
                    release = True
                mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1, pred=release)
                load_n = tile_n
                step = (first + count) * UNROLL + i + 2
                if i >= UNROLL - 2:
                    wrap = first + count == last - 1
                    load_n = gl.where(wrap, next_n, tile_n)
                    step = gl.where(wrap, next_first * UNROLL + i + 2 - UNROLL, step)
                next_codes, next_pairs = _load_codes(
                    words, scale_bytes, load_n, step, end_step, word_offset, scale_offset, row_tiles, DEPTH
                )
                previous = operand
                operand = _decode(codes, pairs, FP16, DEPTH, operand_layout)
                codes = next_codes
                pairs = next_pairs
                stage, phase = _advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)

        if STREAM:
            program = gl.program_id(0)
            if first == 0:
                if last < groups:
                    other = _owner((tile - whole + 1) * groups - 1, groups, tiles, whole, gl.num_programs(0))
                    for source in range(program + 1, other + 1):
                        flag = flags + source * 2 + half
                        while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
                            pass
                        acc = _add_part(acc, partial + (source * 2 + half).to(gl.int64) * (64 * BLOCK_M), acc_layout)
                _store_tile(
                    acc, tile_m, tile_n * 2 + half, global_scale, bias, out, None, None, M, N,
                    BLOCK_M, 64, dtype, UNSCALE, None, acc_layout, 4,
                )  # fmt: skip
            else:
                _store_part(acc, partial + (program * 2 + half).to(gl.int64) * (64 * BLOCK_M))
                cta_barrier()
                gl.atomic_xchg(flags + program * 2 + half, 1, sem="release", scope="gpu")
        else:
            _store_tile(
                acc, tile_m, tile_n * 2 + half, global_scale, bias, out, None, None, M, N,
                BLOCK_M, 64, dtype, UNSCALE, None, acc_layout, 4,
            )  # fmt: skip
    _leave(stage)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M", "whole"])
def nvfp4_wgmma_large_kernel(
    x, words, scale_bytes, global_scale, bias, out, partial, flags, M, N, K, whole,
    BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, REGISTERS: gl.constexpr,
    AHEAD: gl.constexpr,     FP16: gl.constexpr, UNSCALE: gl.constexpr, STREAM: gl.constexpr, PDL: gl.constexpr
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
                0, words, scale_bytes, global_scale, bias, out, partial, flags, ring, ready, empty, M, N, K, whole,
                BLOCK_M, DEPTH, STAGES, UNROLL, FP16, UNSCALE, STREAM,
            )),
            (_consumer, (
                1, words, scale_bytes, global_scale, bias, out, partial, flags, ring, ready, empty, M, N, K, whole,
                BLOCK_M, DEPTH, STAGES, UNROLL, FP16, UNSCALE, STREAM,
            )),
            (_producer, (
                x, words, scale_bytes, ring, ready, empty, M, N, K, whole, BLOCK_M, DEPTH, STAGES, UNROLL, AHEAD, PDL,
            )),
            (_leave, (M,)),
            (_leave, (M,)),
        ],
        [4, 1, 1, 2],
        [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


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
    flags = None
    whole = tiles
    if stream:
        # One wave more than what is left over is cut: so a program's share is never a small part of a tile.
        whole = max(tiles // programs - 1, 0) * programs
        partial = torch.empty((programs, 128, config.block_m), dtype=torch.float32, device=x.device)
        flags = torch.zeros(2 * programs, dtype=torch.int32, device=x.device)
    layout = gl.NVMMASharedLayout.get_default_for([config.block_m, config.block_k], gl.bfloat16)
    fp16 = x.dtype == torch.float16
    rows_of_x = TensorDescriptor.from_tensor(x, [config.block_m, config.block_k], layout)
    nvfp4_wgmma_large_kernel[(programs,)](
        rows_of_x, words, scale_bytes.view(torch.uint16), global_scale, bias, out, partial, flags, m, n, k, whole,
        BLOCK_M=config.block_m, DEPTH=depth, STAGES=config.stages, UNROLL=config.unroll, REGISTERS=config.registers, AHEAD=config.ahead,
        FP16=fp16, UNSCALE=UNSCALE[fp16], STREAM=stream, PDL=hardware.pdl, num_warps=4, **pdl_option(hardware),
    )  # fmt: skip
    return out
