# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and NVFP4 weights on Hopper's warpgroup matrix units.

The product is computed transposed, out^T = W . x^T: a wgmma takes its first operand from registers, so a weight is
decoded in the registers from which the matrix unit reads it. The tensor memory accelerator fills a ring in shared
memory with codes, scales and x: codes that threads load themselves cost more instructions, and those are what a
multiprocessor runs short of. While one step multiplies, the next is decoded.

Written in Gluon, Triton's lower language, for one reason: Triton 3.6 pipelines a product with an operand in registers
wrongly (it lets the next step overwrite registers that a wgmma in flight still reads). Here every wait names the
registers that it frees.

The steps of all tiles can be shared out evenly to as many programs as run together, so that none waits for others at
the end, and a program's ring stays full from one tile to the next. Where a tile is several programs', the last of them
to finish adds their parts, in order. With routed experts only the GPU knows how many tiles there are: each program
finds its share there.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm_quant_rocm.formats.nvfp4_wgmma import COLUMNS, ROWS
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.activate import activate
from llm_quant_rocm.kernels.decode_hopper import UNSCALE, decode_words, split_pairs
from llm_quant_rocm.kernels.flags import FLAGS, parts_and_flags
from llm_quant_rocm.kernels.hopper import (
    cta_barrier,
    descriptor,
    grid_of_tiles,
    load_tile,
    packed_descriptors,
    place,
    place_after,
    rounded,
)
from llm_quant_rocm.kernels.launch import PLANS, Launch
from llm_quant_rocm.kernels.pdl import pdl_option
from llm_quant_rocm.kernels.sizes import cdiv
from llm_quant_rocm.kernels.stretches import begin_of


@dataclass(frozen=True)
class Config:
    """How the product is cut.

    Attributes:
        block_m, block_n, block_k: rows of x, rows of the weight and columns of both in one step. block_m is at least
            8, block_n 64 or 128, block_k 64 or 128.
        programs: programs that share the steps of all tiles evenly; 0: one for each tile.
        unroll: steps in a group, 2 or more: they come together, and after a group the matrix unit may run dry.
        stages: groups in shared memory.
        warps: 4 or 8.
    """

    block_m: int
    block_n: int
    block_k: int
    programs: int = 0
    unroll: int = 2
    stages: int = 3
    warps: int = 4


def default_config(m: int, n: int, k: int) -> Config:
    """A sound choice for up to 32 rows where nobody has measured."""
    # Four small programs on each multiprocessor of an H100, but no stretches of less than 512 columns.
    most = cdiv(n, 64) * max(1, k // 512)
    return Config(8 if m <= 8 else 16 if m <= 16 else 32, 64, 128, min(4 * 132, most))


@gluon.jit
def _program_at(group, groups):
    """The program to whose stretch a group belongs."""
    shortest = groups // gl.num_programs(0)
    longer = groups % gl.num_programs(0)
    rest = (group - longer) // gl.maximum(shortest, 1)
    return gl.where(group < longer * (shortest + 1), group // (shortest + 1), rest)


@gluon.jit
def decode_operand(words, scale_pairs, FP16: gl.constexpr, DEPTH: gl.constexpr, layout: gl.constexpr):
    """The weight [NT * 16, DEPTH * 64] in the registers where wgmma reads it, divided by `UNSCALE`."""
    return operand_of(decode_words(words, scale_pairs, FP16), FP16, DEPTH, layout)


@gluon.jit
def operand_of(pairs, FP16: gl.constexpr, DEPTH: gl.constexpr, layout: gl.constexpr):
    """wgmma's operand [NT * 16, DEPTH * 64] of what `decode_words` returned. Nothing moves between lanes, which
    `assert_trivial` checks when it compiles."""
    NT: gl.constexpr = pairs.shape[0] // DEPTH
    # piece, tile, row, lane % 4, step, row half, column half, column
    values = split_pairs(pairs, FP16).reshape(DEPTH, NT, 8, 4, 4, 2, 2, 2)
    values = values.permute(1, 5, 2, 0, 4, 6, 3, 7).reshape(NT * 16, DEPTH * 64)
    return gl.convert_layout(values, layout, assert_trivial=True)


@gluon.constexpr_function
def _scale_layout(depth, nt, num_warps):
    """Of scale pairs [depth, nt, 32] as lanes need them: four side by side, the same ones for four lanes."""
    registers = [[0, 0, 1], [0, 0, 2]] + [[0, 1 << i, 0] for i in range(8) if num_warps <= 1 << i < nt]
    registers += [[1 << i, 0, 0] for i in range(8) if 1 << i < depth]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]]
    warps = [[0, 1 << i, 0] for i in range(3) if 1 << i < num_warps]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [depth, nt, 32])


@gluon.jit
def _with_pairs(words, scale_pairs, EACH: gl.constexpr, WARPS: gl.constexpr):
    """Words [pieces, NT, 8 rows, 4 of a row's lanes, 4 of a lane] and the scale pairs of each, [pieces * NT, 128], of
    scale pairs without dimension EACH."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 8, 4, 1], [1, WARPS, 1, 1, 1], [4, 3, 2, 1, 0])
    words = gl.convert_layout(words, layout, assert_trivial=True)
    scale_pairs = gl.convert_layout(scale_pairs, gl.SliceLayout(EACH, layout), assert_trivial=True).expand_dims(EACH)
    words, scale_pairs = gl.broadcast(words, scale_pairs)
    ALL: gl.constexpr = words.shape[0] * words.shape[1]
    return words.reshape(ALL, 128), scale_pairs.reshape(ALL, 128)


@gluon.jit
def load_words(codes, pairs, WARPS: gl.constexpr):
    """Words and the scale pairs of each, [pieces * NT, 128], of codes [pieces, NT, 128] and pairs [pieces, NT, 32] in
    shared memory."""
    PIECES: gl.constexpr = codes.shape[0]
    NT: gl.constexpr = codes.shape[1]
    word_layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    # piece, tile, row, lane % 4, step
    words = codes.load(word_layout).reshape(PIECES, NT, 8, 4, 4)
    scale_pairs = pairs.load(_scale_layout(PIECES, NT, WARPS)).reshape(PIECES, NT, 8, 4)
    return _with_pairs(words, scale_pairs, 3, WARPS)


@gluon.jit
def load_blocks(codes, pairs, WARPS: gl.constexpr):
    """The same, but a lane has the four words of block lane % 4, which `pack` means for that step of four lanes, and
    scale pairs are int32; of codes [pieces, NT * 8, 16]. x's columns must be in the order that this takes."""
    PIECES: gl.constexpr = codes.shape[0]
    NT: gl.constexpr = pairs.shape[1]
    word_layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [1, WARPS, 1], [2, 1, 0])
    pair_layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    # piece, tile, row, block, word
    words = codes.load(word_layout).reshape(PIECES, NT, 8, 4, 4).permute(0, 1, 2, 4, 3)
    scale_pairs = pairs.load(pair_layout).to(gl.int32).reshape(PIECES, NT, 8, 4)
    return _with_pairs(words, scale_pairs, 4, WARPS)


@gluon.jit
def load_operand(
    codes, pairs, STEP: gl.constexpr, FP16: gl.constexpr, DEPTH: gl.constexpr, operand_layout: gl.constexpr
):  # fmt: skip
    """Step STEP of a group of the weight, whose codes and scale pairs are in shared memory, for wgmma."""
    first: gl.constexpr = STEP * DEPTH
    WARPS: gl.constexpr = operand_layout.parent.warps_per_cta[0]
    words, scale_pairs = load_words(codes.slice(first, DEPTH), pairs.slice(first, DEPTH), WARPS)
    return decode_operand(words, scale_pairs, FP16, DEPTH, operand_layout)


@gluon.constexpr_function
def store_layout(width, num_warps):
    """In which a tile [width, columns] is stored as rows of `width` values: whole lines of them."""
    return gl.BlockedLayout([8, 1], [width // 8, 256 // width], [1, num_warps], [0, 1])


@gluon.jit
def load_scales(global_scale, first, N, layout: gl.constexpr, ROWS: gl.constexpr):
    """Global scales of ROWS rows of the weight from `first` on, as an accumulator in `layout` has rows."""
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    return gl.load(global_scale + rows, mask=rows < N, other=0.0)


@gluon.jit
def gated(acc, dtype: gl.constexpr, ACTIVATION: gl.constexpr):
    """The activation of the gate's rows of acc [rows of the weight, rows of x] times up's, both rounded: half of the
    rows. Eight of each alternate, so that both are in one lane."""
    HALF: gl.constexpr = acc.shape[0] // 2
    COLUMNS: gl.constexpr = acc.shape[1]
    gate, up = acc.reshape(HALF // 8, 2, 8, COLUMNS).permute(0, 2, 3, 1).split()
    gate = activate(rounded(gate, dtype), ACTIVATION)
    return (gate * rounded(up, dtype)).reshape(HALF, COLUMNS)


@gluon.jit
def epilogue(
    acc, scales, first, least, tile_n, bias, out, row_map, row_weight, M, N,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, dtype: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr,
    acc_layout: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """The epilogue of a finished tile acc [BLOCK_N, BLOCK_M]: router weight, scales, those of `load_scales`, bias,
    activation, rounding. Its columns are rows of the result from `first` on; those before `least` are another tile's.
    """
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    if row_weight is not None:  # first, as in `nvfp4_wgmma_large_epilogue`: the bits are the same in both
        m_acc = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, acc_layout))
        acc *= gl.load(row_weight + m_acc, mask=m_acc < M, other=0.0)[None, :]
    acc = acc * UNSCALE * gl.convert_layout(scales, row_layout, assert_trivial=True)[:, None]
    if bias is not None:
        rows = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=row_layout)
        acc += gl.load(bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    if ACTIVATION is not None:
        acc = gated(acc, dtype, ACTIVATION)
        N = N // 2
    WIDTH: gl.constexpr = acc.shape[0]
    layout: gl.constexpr = store_layout(WIDTH, num_warps)
    m = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    n = tile_n * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))
    inside = (m >= least) & (m < M)
    if row_map is not None:
        m = gl.load(row_map + m, mask=inside, other=-1)
        inside = m >= 0
    place = m.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(out + place, gl.convert_layout(acc.to(dtype), layout), mask=inside[None, :] & (n < N)[:, None])


@gluon.jit
def _add_parts(acc, parts, flags, program, first, last, rows):
    """The sum of a tile of which the programs from `first` to `last` each have a part; this one's is acc [BLOCK_N,
    BLOCK_M].

    Each stores its part, as far as the tile has rows, in `parts` fp32 [programs, 2, BLOCK_M, BLOCK_N]: one for the tile
    in which its stretch begins and one for that in which it ends. At most one tile that others end begins in a stretch,
    so the flag of the first program is this tile's. Returns whether this program was the last, and then the sum.
    """
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = BLOCK_M * BLOCK_N
    layout: gl.constexpr = acc.type.layout
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    inside = (m < rows)[None, :]
    parts += m[None, :] * BLOCK_N + n[:, None]
    slot = program * 2 + gl.where(program == first, 1, 0)
    gl.store(parts + slot.to(gl.int64) * SIZE, acc, mask=inside)
    cta_barrier()
    complete = gl.atomic_add(flags + first, 1, sem="acq_rel", scope="gpu") == last - first
    if complete:
        gl.store(flags + first, 0)
        acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=layout)
        # Four loads in flight.
        for source in range(first, last + 1, 4):
            for i in gl.static_range(4):
                slot = (source + i) * 2 + gl.where(source + i == first, 1, 0)
                there = inside & (source + i <= last)
                acc += gl.load(parts + slot.to(gl.int64) * SIZE, mask=there, other=0.0, cache_modifier=".cg")
    return complete, acc


@gluon.jit
def prefetch(pointer, size):
    """Brings `size` bytes, up to 1024, to the L2 cache, a sector of 32 for each lane of a warp: of several
    warps each asks for all of them."""
    ASSEMBLY: gl.constexpr = (
        "{ .reg .pred inside; .reg .b32 at; .reg .b64 place; mov.u32 at, %laneid; shl.b32 at, at, 5; "
        "setp.lt.u32 inside, at, $2; cvt.u64.u32 place, at; add.u64 place, place, $1; "
        "@inside prefetch.global.L2 [place]; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(ASSEMBLY, "=r,l,r", [pointer, size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_piece_of(expert, K):
    """Where an expert's pieces of the weight begin: each has K padded to whole blocks of 128 columns, two pieces."""
    return expert * ((K + 127) // 128 * 2)


@gluon.jit
def tiles_of_rows(tile_count, M, BLOCK_M: gl.constexpr):
    """How many tiles of rows there are: of routed experts only the GPU knows."""
    if tile_count is None:
        return gl.cdiv(M, BLOCK_M)
    else:
        return gl.load(tile_count)


@gluon.jit
def _own_tile():
    """The place of the tile of a program that has one, in a `grid_of_tiles`."""
    return gl.program_id(2) * gl.num_programs(0) + gl.program_id(0), gl.program_id(1)


@gluon.jit
def _share(tiles_m, tiles_n, tile_groups):
    """Where a program's share of the groups of steps of all tiles begins and ends; and its first group, by its number
    in its tile and that tile's place."""
    # Every program begins with these divisions. They take fewer instructions of unsigned numbers.
    program, programs = gl.cast(gl.program_id(0), gl.uint32), gl.cast(gl.num_programs(0), gl.uint32)
    tiles_m, tiles_n = gl.cast(tiles_m, gl.uint32), gl.cast(tiles_n, gl.uint32)
    tile_groups = gl.cast(tile_groups, gl.uint32)
    groups = tiles_m * tiles_n * tile_groups
    begin, end = begin_of(program, groups, programs), begin_of(program + 1, groups, programs)
    tile = begin // tile_groups
    group = begin - tile * tile_groups
    tile_m, tile_n = place(tile, tiles_m, tiles_n)
    begin, end, group = gl.cast(begin, gl.int32), gl.cast(end, gl.int32), gl.cast(group, gl.int32)
    return begin, end, group, gl.cast(tile_m, gl.int32), gl.cast(tile_n, gl.int32)


@gluon.jit
def expert_of(tile_expert, tile_m, inside):
    """The expert of a tile, or 0 where there are no experts; -1 of a tile without work, or not `inside`."""
    if tile_expert is None:
        return gl.where(inside, 0, -1)
    else:
        return gl.load(tile_expert + tile_m, mask=inside, other=-1)


@gluon.jit
def ask_for_scales(global_scale, expert, tile_n, N, BLOCK_N: gl.constexpr, wanted):
    """Brings a tile's global scales to the L2 cache: those of an expert's rows nobody else reads, and the epilogue
    would wait for memory. Nothing where they are not wanted: all programs of short tiles would ask one line at once."""
    row = tile_n * BLOCK_N
    prefetch(global_scale + expert * N + row, gl.where(wanted, gl.minimum(N - row, BLOCK_N) * 4, 0))


@gluon.jit
def _next_group(
    group, tile_m, tile_n, expert, tiles_m, tiles_n, tile_groups, tile_expert, global_scale, N,
    BLOCK_N: gl.constexpr, SHARED: gl.constexpr, wanted
):  # fmt: skip
    """The group of steps after this one, by its number in its tile, and the place and the expert of that tile: the same
    one or, if programs share tiles, the next. Not `wanted` beyond the program's last."""
    group += 1
    if SHARED:  # noqa: SIM102  # constants decide what is compiled
        if group == tile_groups:
            group = 0
            tile_m, tile_n = place_after(tile_m, tile_n, tiles_m, tiles_n)
            if tile_expert is not None:
                expert = expert_of(tile_expert, tile_m, wanted)
                ask_for_scales(global_scale, expert, tile_n, N, BLOCK_N, wanted)
    return group, tile_m, tile_n, expert


@gluon.jit
def fetch_weight(words, scale_pairs, codes, pairs, ready, stage, tile_n, group, first_piece, wanted):
    """Has the accelerator fill a stage of the ring with a group of steps of the weight."""
    piece = first_piece + group * codes.shape[1]
    load_tile(words, [piece, tile_n * codes.shape[2], 0], ready.index(stage), codes.index(stage), pred=wanted)
    load_tile(scale_pairs, [piece, tile_n * pairs.shape[2], 0], ready.index(stage), pairs.index(stage), pred=wanted)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M"])
def nvfp4_wgmma_kernel(
    x, words, scale_pairs, global_scale, bias, out, parts, flags, tile_expert, tile_count, row_map, row_weight, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    UNROLL: gl.constexpr, FP16: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """One tile of out, in a `grid_of_tiles`, or, with `parts`, a program's share of the steps of all tiles.

    x, words and scale_pairs are descriptors of [M, K], [pieces of K, row tiles, 128] and [pieces of K, row tiles, 32].
    N is the number of rows of the weight that are stored, a multiple of nothing; the packed weight has them padded.
    `parts` fp32 [programs, 2, BLOCK_M, BLOCK_N] has room for the parts of tiles that are several programs', and
    `flags`, a zero for each program, counts them. With `tile_expert` each tile of M has an expert of its own (-1: no
    work; the first `tile_count[0]` tiles have some), whose pieces come after those of the experts before it, and
    `global_scale` has experts as its leading dimension. With `row_map` row m of the result is stored as row row_map[m],
    or not if that is negative. With ACTIVATION the weight's rows alternate, eight of the gate and eight of up, and out,
    [M, N / 2], is T(activation(T(gate)) * T(up)).
    """
    NT: gl.constexpr = BLOCK_N // 16
    BLOCK_K: gl.constexpr = DEPTH * 64
    GROUP_K: gl.constexpr = UNROLL * BLOCK_K
    STAGE_BYTES: gl.constexpr = BLOCK_M * GROUP_K * 2 + BLOCK_N * GROUP_K * 9 // 16
    dtype: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    # With an activation, a row of the gate and its row of up stay in one lane.
    whole_lines: gl.constexpr = parts is not None and ACTIVATION is None
    store: gl.constexpr = store_layout(BLOCK_N, num_warps) if whole_lines else acc_layout

    SHARED: gl.constexpr = parts is not None
    tiles_m = tiles_of_rows(tile_count if SHARED else None, M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    # Steps beyond K multiply zeros: the accelerator reads x as zero there.
    tile_groups = gl.cdiv(K, GROUP_K)
    if SHARED:
        idle = gl.program_id(0) >= tiles_m * tiles_n * tile_groups
    else:
        tile_m, tile_n = _own_tile()
        expert = expert_of(tile_expert, tile_m, tile_m < tiles_m)
        idle = expert < 0

    ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, UNROLL * BLOCK_K], x.layout)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, UNROLL * DEPTH, NT, 128], words.layout)
    pairs = gl.allocate_shared_memory(gl.uint16, [STAGES, UNROLL * DEPTH, NT, 32], scale_pairs.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # While memory answers: after each of these Triton has all warps wait for each other. Hence none depends on the
    # answer. Of a stage that is not filled something is expected, too, but nobody waits for it.
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        mbarrier.expect(ready.index(stage), STAGE_BYTES)
    # Each of the programs that share tiles without experts has something.
    if tile_expert is not None or not SHARED:  # noqa: SIM102
        if idle:
            if PDL:
                gdc_wait()  # else a rank without a slot would end, and let the next one end, before those before it
            return
    if SHARED:
        begin, end, group, tile_m, tile_n = _share(tiles_m, tiles_n, tile_groups)
        expert = expert_of(tile_expert, tile_m, True)
    else:
        begin, end, group = 0, tile_groups, 0

    # The weight does not depend on the kernels before this one, nor do the experts of tiles on the one just before it.
    weight = (words, scale_pairs, codes, pairs, ready)
    tiles = (tiles_m, tiles_n, tile_groups, tile_expert, global_scale, N, BLOCK_N, SHARED)
    fetched_group, fetched_m, fetched_n, fetched_expert = group, tile_m, tile_n, expert
    corners = ()
    for stage in gl.static_range(STAGES):
        corners += ((fetched_m * BLOCK_M, fetched_group * GROUP_K),)
        first_piece = first_piece_of(fetched_expert, K)
        fetch_weight(*weight, stage, fetched_n, fetched_group, first_piece, begin + stage < end)
        fetched_group, fetched_m, fetched_n, fetched_expert = _next_group(
            fetched_group, fetched_m, fetched_n, fetched_expert, *tiles, begin + stage + 1 < end
        )
    if tile_expert is not None:
        ask_for_scales(global_scale, expert, tile_n, N, BLOCK_N, True)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        load_tile(x, corners[stage], ready.index(stage), ring.index(stage), pred=begin + stage < end)

    result = (bias, out, row_map, row_weight, M, N)
    mbarrier.wait(ready.index(0), 0)
    operand = load_operand(codes.index(0), pairs.index(0), 0, FP16, DEPTH, operand_layout)
    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=acc_layout)
    previous = operand
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for index in range(begin, end):
        following = gl.where(stage == STAGES - 1, 0, stage + 1)
        following_phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        for i in gl.static_range(UNROLL):
            step_of_x = ring.index(stage).slice(i * BLOCK_K, BLOCK_K, dim=1).permute((1, 0))
            acc = warpgroup_mma(operand, step_of_x, acc, is_async=True)
            if i > 0:
                acc, previous = warpgroup_mma_wait(1, deps=[acc, previous])
            source = stage
            if i == UNROLL - 1:
                source = following
                mbarrier.wait(ready.index(following), following_phase, pred=index + 1 < end)
            previous = operand
            operand = load_operand(
                codes.index(source), pairs.index(source), (i + 1) % UNROLL, FP16, DEPTH, operand_layout
            )
        acc, previous = warpgroup_mma_wait(0, deps=[acc, previous])
        wanted = index + STAGES < end
        mbarrier.expect(ready.index(stage), STAGE_BYTES, pred=wanted)
        # Past this barrier every warp has finished the group, so its stage can be filled again.
        cta_barrier()
        fetch_weight(*weight, stage, fetched_n, fetched_group, first_piece_of(fetched_expert, K), wanted)
        corner = [fetched_m * BLOCK_M, fetched_group * GROUP_K]
        load_tile(x, corner, ready.index(stage), ring.index(stage), pred=wanted)
        stage = following
        phase = following_phase
        fetched_group, fetched_m, fetched_n, fetched_expert = _next_group(
            fetched_group, fetched_m, fetched_n, fetched_expert, *tiles, index + STAGES + 1 < end
        )
        if SHARED:
            group += 1
            if (group == tile_groups) | (index + 1 == end):
                total = gl.convert_layout(acc, store)
                begins = index + 1 - group
                complete = (group == tile_groups) & (begin <= begins)
                if not complete:
                    groups = tiles_m * tiles_n * tile_groups
                    complete, total = _add_parts(
                        total, parts, flags, gl.program_id(0), _program_at(begins, groups),
                        _program_at(begins + tile_groups - 1, groups), M - tile_m * BLOCK_M,
                    )  # fmt: skip
                if complete:
                    scales = load_scales(global_scale + expert * N, tile_n * BLOCK_N, N, store, BLOCK_N)
                    epilogue(
                        total, scales, tile_m * BLOCK_M, 0, tile_n, *result, BLOCK_M, BLOCK_N, dtype, UNSCALE,
                        ACTIVATION, store, num_warps,
                    )  # fmt: skip
                acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=acc_layout)
                group = 0
                tile_m, tile_n = place_after(tile_m, tile_n, tiles_m, tiles_n)
                if tile_expert is not None:
                    expert = expert_of(tile_expert, tile_m, index + 1 < end)
    if not SHARED:
        scales = load_scales(global_scale + expert * N, tile_n * BLOCK_N, N, store, BLOCK_N)
        # While memory answers: the epilogue may have the barriers' room.
        for stage in gl.static_range(STAGES):
            mbarrier.invalidate(ready.index(stage))
        epilogue(
            acc, scales, tile_m * BLOCK_M, 0, tile_n, *result, BLOCK_M, BLOCK_N, dtype, UNSCALE, ACTIVATION, store,
            num_warps,
        )  # fmt: skip


def lines_of_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] of 16-bit values as the tensor memory accelerator can read it, copied only where it must be."""
    if x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(0) < x.shape[1]:
        return x.clone(memory_format=torch.contiguous_format)
    return x


class Routed(NamedTuple):
    """What the product of routed experts has beside a dense one, the arguments of the kernel."""

    tile_expert: torch.Tensor | None = None
    tile_rows: torch.Tensor | None = None
    tile_count: torch.Tensor | None = None
    row_map: torch.Tensor | None = None
    row_weight: torch.Tensor | None = None
    activation: str | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """As the kernels for few rows take them, which store a row where `row_map` says. That for many stores whole
        tiles, and needs `tile_rows`."""
        return self.tile_expert, self.tile_count, self.row_map, self.row_weight

    def result(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """Room for the product of x [M, K] and a weight [n, K]."""
        return x.new_empty((x.shape[0], n if self.activation is None else n // 2))


DENSE = Routed()


def gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    hardware: Hardware,
    config: Config,
    routed: Routed = DENSE,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x . weight^T * global_scale + bias: [M, n] in x's dtype, of x [M, K] (bf16 or fp16, contiguous rows).

    words and scale_bytes are of `formats.nvfp4_wgmma.pack`, global_scale is fp32 [n]. `out` is needed where `row_map`
    scatters rows.
    """
    x = lines_of_16_bytes(x)
    m, k = x.shape
    if out is None:
        out = routed.result(x, n)
    plan = _plan(config, m, n, k, x.dtype == torch.float16, routed.activation, hardware)
    plan.launch(
        descriptor(x, plan.block, 128), *packed_descriptors(words, scale_bytes, plan.pieces, plan.tile_rows),
        global_scale, bias, out, *parts_and_flags(plan.parts, x.device), *routed.tensors,
    )  # fmt: skip
    return out


class _Plan(NamedTuple):
    """A launch, rows and columns of x in a group of steps, pieces of 64 columns and tiles of 16 rows of the weight in
    it, and the shape of tiles' parts, if there are any."""

    launch: Launch
    block: list[int]
    pieces: int
    tile_rows: int
    parts: tuple[int, ...] | None


@lru_cache(PLANS)
def _plan(config: Config, m: int, n: int, k: int, fp16: bool, activation: str | None, hardware: Hardware) -> _Plan:
    block_m, block_n = config.block_m, config.block_n
    tiles_m, tiles_n = cdiv(m, block_m), cdiv(n, block_n)
    programs = min(config.programs, tiles_m * tiles_n * cdiv(k, config.block_k * config.unroll), FLAGS)
    depth = config.block_k // COLUMNS
    # So that two programs of 8 warps, or four of 4, are on a multiprocessor together.
    registers = 128 if block_m <= 32 or (block_m == 64 and config.warps == 8) else None
    launch = Launch(
        nvfp4_wgmma_kernel, (programs, 1, 1) if programs else grid_of_tiles(tiles_m, tiles_n), m, n, k,
        BLOCK_M=block_m, BLOCK_N=block_n, DEPTH=depth, STAGES=config.stages, UNROLL=config.unroll, FP16=fp16,
        UNSCALE=UNSCALE, ACTIVATION=activation, PDL=hardware.pdl, num_warps=config.warps, maxnreg=registers,
        **pdl_option(hardware),
    )  # fmt: skip
    return _Plan(
        launch, [block_m, config.unroll * config.block_k], config.unroll * depth, block_n // ROWS,
        (programs, 2, block_m, block_n) if programs else None,
    )  # fmt: skip
