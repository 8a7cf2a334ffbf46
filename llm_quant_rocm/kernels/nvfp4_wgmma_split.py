# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and NVFP4 weights on Hopper: a program or two a multiprocessor, K split within.

As in `nvfp4_wgmma`, out^T = W . x^T, and a weight goes through registers, where its codes are decoded, into the matrix
units. Such a product holds its warps until it has read those registers, so four warps either decode or multiply, and
where a layer has no more than a tile for each multiprocessor, that is what it waits for. Here a program has four
consumers, four warps each, that take the steps along K of its tile in turns: while one multiplies, the others decode.
In the end each adds a share of the columns, its own from registers and the others' from shared memory. A producer, one
warp, has the tensor memory accelerator fill a ring of codes, scales and x. A short product takes as long as its first
steps take to come, so these are asked for before anything else is prepared, and a consumer decodes its first one while
x is on its way, which comes from the kernel before.

With two consumers, or with 8 rows of x, of which each warp multiplies alone, a program leaves room on its
multiprocessor for another: of its own kernel, or of the next one, which then has its first codes when the kernel before
it ends. Of a weight with few tiles the programs of a `cluster` share the steps of each.

What is a program's, `nvfp4_wgmma_split_tiles` says, and how consumers add up and store their sums,
`nvfp4_wgmma_split_epilogue`. Where programs share the steps of all tiles, the sums have room of their own beside the
ring, which stays full from one tile to the next; and where enough of the ring is left, so that a consumer does not wait
for the others before it leaves its sums there. Tiles of 96 rows have two accumulators, of 64 and of 32.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
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
from llm_quant_rocm.hardware import Hardware, multiprocessors
from llm_quant_rocm.kernels.cluster import arrive, inbox_of, init_inbox, wait_for_all
from llm_quant_rocm.kernels.decode_hopper import UNSCALE
from llm_quant_rocm.kernels.flags import parts_and_flags
from llm_quant_rocm.kernels.hopper import (
    acc_layout_of,
    advance,
    allocate_ring,
    first_row,
    init_ring,
    leave,
    load_rows,
    main_rows,
    multiply_by_warps,
    multiply_rest,
    packed_descriptors,
    reinterpret,
    row_descriptor,
    row_in_tile,
    tile_and_rest,
)
from llm_quant_rocm.kernels.launch import PLANS, Launch
from llm_quant_rocm.kernels.nvfp4_wgmma import (
    DENSE,
    Routed,
    ask_for_scales,
    fetch_weight,
    first_piece_of,
    lines_of_16_bytes,
    load_operand,
    load_scales,
    tiles_of_rows,
)
from llm_quant_rocm.kernels.nvfp4_wgmma_split_epilogue import add_and_store, share_sums, sums_shape
from llm_quant_rocm.kernels.nvfp4_wgmma_split_tiles import (
    Config,
    by_warps,
    first_expert,
    load_first_experts,
    next_step,
    program_stretch,
    quick_place,
    turns_in_tile,
)
from llm_quant_rocm.kernels.pdl import pdl_option
from llm_quant_rocm.kernels.sizes import cdiv

# Of the ring; more bring nothing.
MOST_STAGES = 16
# More than so many are worth less than room for consumers' sums, but in clusters: with six for ten, tiles of 128 rows
# took 1 to 2% less time, with four 4 to 20% more, compared by hand on an H200.
ENOUGH_STAGES = 6


class _Room(NamedTuple):
    """What a program with so many consumers takes of a multiprocessor.

    Attributes:
        ring_bytes: shared memory for the ring and what parts of sums need beside it.
        registers: of a consumer's threads, while they work.
        few_registers: of the others.
        options: Triton's, of the launch.
    """

    ring_bytes: int
    registers: int
    few_registers: int
    options: Mapping[str, int]


# By consumers and programs of a multiprocessor: all of it with 640 threads that start with 96 registers each, or half
# of it with 384 that start with 80, or with 640 that have 48 throughout.
ROOM = {
    (4, 1): _Room(216 * 1024, 112, 32, {}),
    (2, 2): _Room(110 * 1024, 104, 32, {"maxnreg": 80}),
    (4, 2): _Room(110 * 1024, 48, 48, {"maxnreg": 48}),
}


def _eager(block_m: int) -> int:
    """Of how many stages the weight is asked for before x, the first of which waits for its turn meanwhile: fewer, the
    longer x takes to come. An H100 took least with 8 at 16 rows, 4 at 32, 2 at 64 and 1 at 128, compared by hand."""
    return min(8, 128 // block_m)


def _depth(block_m: int, turns: float) -> int:
    """Columns of a step of so many rows of x, in pieces of 64, where a consumer has so many turns with steps of 128.
    Warps that multiply alone need not have all of a step's values at once. Longer steps are then worth their later
    beginning where there are many: with 28 turns or more up to 4% less time, with 16 or less up to 13% more, compared
    by hand on an H200. Of many rows there is no room for enough steps of 128."""
    if by_warps(block_m) and turns >= 24:
        return 4
    return 2 if block_m <= 64 else 1


@gluon.constexpr_function
def _early_of(eager, split_k, shared, alone):
    """Of how many stages, each one consumer's of a group, the weight is decoded before x is there: of the `eager` ones,
    if at least half of the consumers have one (with one of four, tiles of 96 rows took 2% more, compared by hand on an
    H200). Not where a program may have several tiles: a loop that began in two ways took more than this saves. Nor
    where warps multiply alone: one code for all steps, half as much, took up to 9% less in programs of their own, and
    up to 8% more in some clusters."""
    early = min(eager, split_k)
    return 0 if shared or alone or 2 * early < split_k else early


@gluon.constexpr_function
def _takes_turns(consumers, rows):
    """Whether consumers multiply one after the other: two of them with 64 rows of x. The other program of their
    multiprocessor has the matrix units while one passes them on. That took 1.2% less time in the mean of ten
    configurations, 5% at most, and in two up to 0.7% more. With fewer rows passing on takes longer than a product, and
    with four consumers others would wait meanwhile: up to a fifth more (compared by hand on an H200)."""
    return consumers == 2 and rows == 64


@gluon.jit
def _end(value, CLUSTER: gl.constexpr):
    """`leave`, of warps that send nothing to the others of a cluster."""
    if CLUSTER > 1:
        arrive(value)
        wait_for_all(value)
    leave(value)


@gluon.jit
def _init(given, BLOCK_M: gl.constexpr, SPLIT_K: gl.constexpr, EAGER: gl.constexpr, CLUSTER: gl.constexpr):
    """Initializes all barriers but those of the first stages, which the producer does: in a warp of its own, because it
    takes about as long as memory does to answer. Of experts it then asks the L2 cache for the global scales of the
    program's tiles: nobody else reads them, and the epilogue would wait for memory."""
    operands, routing, shared, sizes = given
    global_scale, bias, out, parts, flags = operands
    tile_expert, tile_count, row_map, row_weight = routing
    ring, rest_ring, codes, pairs, sums, rest_sums, decodable, ready, empty, started, idle, added, taken, inbox = shared
    M, N, K = sizes
    BLOCK_N: gl.constexpr = codes.shape[2] * 16
    GROUPS: gl.constexpr = BLOCK_N // 64
    mbarrier.init(added, count=GROUPS * SPLIT_K)
    mbarrier.init(taken, count=GROUPS * SPLIT_K)
    if _takes_turns(GROUPS * SPLIT_K, BLOCK_M):
        for consumer in gl.static_range(GROUPS * SPLIT_K):
            mbarrier.init(idle.index(consumer), count=1)
    init_ring(ready, empty, started, GROUPS, EAGER)
    if CLUSTER > 1:
        init_inbox(inbox, GROUPS * SPLIT_K, sums.shape[1] * 8, CLUSTER)
    if tile_expert is not None:
        tiles_m = tiles_of_rows(tile_count, M, BLOCK_M)
        tiles_n, tile_steps, begin, end, first_tile = program_stretch(tiles_m, N, K, BLOCK_N, ring.shape[2], True)
        for tile in range(first_tile, gl.cdiv(end, tile_steps)):
            tile_m, tile_n = quick_place(tile, tiles_m, tiles_n)
            ask_for_scales(global_scale, gl.load(tile_expert + tile_m), tile_n, N, BLOCK_N, True)
    _end(EAGER, CLUSTER)


@gluon.jit
def _fetch_x(x, stage, tile_m, step, shared, M, BLOCK_M: gl.constexpr, wanted=True):
    """Has the accelerator fill a stage with a tile's rows of x."""
    ring, rest_ring, codes, pairs, sums, rest_sums, decodable, ready, empty, started, idle, added, taken, inbox = shared
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    BLOCK_K: gl.constexpr = ring.shape[2]
    load_rows(x, first_row(tile_m, M, BLOCK_M), step * BLOCK_K, ready.index(stage), ring.index(stage), wanted)
    if MAIN < BLOCK_M:
        row = row_in_tile(tile_m, MAIN, M, BLOCK_M)
        load_rows(x, row, step * BLOCK_K, ready.index(stage), rest_ring.index(stage), wanted)


@gluon.jit
def _fetch_first_weights(
    weight, there, place, tiles, begin, end, BYTES: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr
):  # fmt: skip
    """Has the accelerator fill stages from FIRST to LAST, all still empty, with the weight, the first of them with that
    at `place`, and count what comes on their barriers `there`. Returns the place behind."""
    for stage in range(FIRST, LAST):
        step, tile_m, tile_n, tile, piece = place
        mbarrier.expect(there.index(stage), BYTES, pred=begin + stage < end)
        fetch_weight(*weight, there, stage, tile_n, step, piece, begin + stage < end)
        place = next_step(*place, *tiles)
    return place


@gluon.jit
def _producer(
    x, words, scale_pairs, given, BLOCK_M: gl.constexpr, SHARED: gl.constexpr, EAGER: gl.constexpr,
    EARLY: gl.constexpr, CLUSTER: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Fills the ring, in the order in which the consumers take it."""
    operands, routing, shared, sizes = given
    tile_expert, tile_count, row_map, row_weight = routing
    ring, rest_ring, codes, pairs, sums, rest_sums, decodable, ready, empty, started, idle, added, taken, inbox = shared
    M, N, K = sizes
    STAGES: gl.constexpr = ready.shape[0]
    BLOCK_N: gl.constexpr = codes.shape[2] * 16
    BLOCK_K: gl.constexpr = ring.shape[2]
    X_BYTES: gl.constexpr = BLOCK_M * BLOCK_K * 2
    WEIGHT_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * 9 // 16
    # Asked for before it is needed.
    tiles_m = tiles_of_rows(tile_count, M, BLOCK_M)
    if tile_expert is not None:
        first_experts = load_first_experts(tile_expert, M, BLOCK_M)
    # No more than the first requests need: the weight, unlike x, does not depend on the kernels before this one.
    for stage in range(0, EARLY):
        mbarrier.init(decodable.index(stage), count=1)
    for stage in range(EARLY, EAGER):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    if not EARLY:
        mbarrier.arrive(started, count=1)
    tiles_n, tile_steps, begin, end, tile = program_stretch(tiles_m, N, K, BLOCK_N, BLOCK_K, SHARED, CLUSTER)
    tile_m, tile_n = quick_place(tile, tiles_m, tiles_n)
    piece = 0
    if tile_expert is not None:
        piece = first_piece_of(first_expert(tile_m, first_experts, tile_expert, begin < end), K)
    first = (begin - tile * tile_steps, tile_m, tile_n, tile, piece)
    weight = (words, scale_pairs, codes, pairs)
    tiles = (tile_steps, tiles_m, tiles_n, tile_expert, K, SHARED)
    place = _fetch_first_weights(weight, decodable, first, tiles, begin, end, WEIGHT_BYTES, 0, EARLY)
    _fetch_first_weights(weight, ready, place, tiles, begin, end, X_BYTES + WEIGHT_BYTES, EARLY, EAGER)
    if EARLY:
        for stage in range(0, EARLY):
            mbarrier.init(ready.index(stage), count=1)
        fence_async_shared()
        mbarrier.arrive(started, count=1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    step, tile_m, tile_n, tile, piece = first
    for stage in range(0, EAGER):
        if EARLY:
            mbarrier.expect(ready.index(stage), X_BYTES, pred=(stage < EARLY) & (begin + stage < end))
        _fetch_x(x, stage, tile_m, step, shared, M, BLOCK_M, begin + stage < end)
        step, tile_m, tile_n, tile, piece = next_step(step, tile_m, tile_n, tile, piece, *tiles)
    mbarrier.wait(started, 0)
    stage = EAGER % STAGES
    phase = 1 if EAGER < STAGES else 0
    for _ in range(begin + EAGER, end):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready.index(stage), X_BYTES + WEIGHT_BYTES)
        fetch_weight(*weight, ready, stage, tile_n, step, piece, True)
        _fetch_x(x, stage, tile_m, step, shared, M, BLOCK_M)
        step, tile_m, tile_n, tile, piece = next_step(step, tile_m, tile_n, tile, piece, *tiles)
        stage, phase = advance(stage, phase, STAGES)
    _end(stage, CLUSTER)


@gluon.jit
def _take_turn(
    stage, phase, acc, rest, turn, shared, GROUP: gl.constexpr, MINE: gl.constexpr, SPLIT_K: gl.constexpr,
    FP16: gl.constexpr, REST: gl.constexpr, FIRST: gl.constexpr
):  # fmt: skip
    """What `_multiply` returns, after one turn: a FIRST, whose weight has a barrier of its own, or another."""
    ring, rest_ring, codes, pairs, sums, rest_sums, decodable, ready, empty, started, idle, added, taken, inbox = shared
    STAGES: gl.constexpr = ready.shape[0]
    DEPTH: gl.constexpr = codes.shape[1]
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    if FIRST:
        mbarrier.wait(decodable.index(MINE), 0)
    else:
        mbarrier.wait(ready.index(stage), phase)
    my_codes = codes.index(stage).slice(GROUP * 4, 4, dim=1)
    my_pairs = pairs.index(stage).slice(GROUP * 4, 4, dim=1)
    operand = load_operand(my_codes, my_pairs, 0, FP16, DEPTH, operand_layout)
    if FIRST:
        mbarrier.wait(ready.index(stage), phase)
    if by_warps(acc.shape[1]):
        acc = multiply_by_warps(operand, ring.index(stage), acc)
    else:
        TURNS: gl.constexpr = _takes_turns(codes.shape[2] // 4 * SPLIT_K, acc.shape[1])
        if TURNS:
            # The first of all waits for nobody: its turns are a phase ahead.
            mbarrier.wait(idle.index(MINE), (turn + 1 if MINE == 0 else turn) % 2)
        acc = warpgroup_mma(operand, ring.index(stage).permute((1, 0)), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(idle.index((MINE + 1) % SPLIT_K), count=1)
        if REST:
            rest = multiply_rest(operand, rest_ring.index(stage), rest)
            acc, rest, operand = warpgroup_mma_wait(0, deps=[acc, rest, operand])
        else:
            acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    mbarrier.arrive(empty.index(stage), count=1)
    stage += SPLIT_K
    wrapped = stage >= STAGES
    stage = gl.where(wrapped, stage - STAGES, stage)
    phase = gl.where(wrapped, phase ^ 1, phase)
    return stage, phase, acc, rest


@gluon.jit
def _multiply(
    stage, phase, acc, rest, first_turn, last_turn, shared, GROUP: gl.constexpr, MINE: gl.constexpr,
    SPLIT_K: gl.constexpr, FP16: gl.constexpr, REST: gl.constexpr, EARLY: gl.constexpr
):  # fmt: skip
    """The stage and phase after a consumer's turns in a tile; acc [64, rows of x], and `rest` if it is another, plus
    the product of these turns."""
    if MINE < EARLY:  # noqa: SIM102  # constants decide what is compiled
        if last_turn > 0:
            stage, phase, acc, rest = _take_turn(
                stage, phase, acc, rest, gl.to_tensor(0), shared, GROUP, MINE, SPLIT_K, FP16, REST, True
            )  # fmt: skip
            first_turn += 1
    for turn in range(first_turn, last_turn):
        stage, phase, acc, rest = _take_turn(
            stage, phase, acc, rest, turn, shared, GROUP, MINE, SPLIT_K, FP16, REST, False
        )  # fmt: skip
    return stage, phase, acc, rest


@gluon.jit
def _consumer(
    NUMBER: gl.constexpr, given, BLOCK_M: gl.constexpr, SPLIT_K: gl.constexpr, SHARED: gl.constexpr,
    EARLY: gl.constexpr, BESIDE: gl.constexpr, CLUSTER: gl.constexpr, FP16: gl.constexpr, UNSCALE: gl.constexpr,
    ACTIVATION: gl.constexpr
):  # fmt: skip
    """Multiplies every SPLIT_K-th step of 64 rows of the weight, and adds and stores a share of their columns."""
    operands, routing, shared, sizes = given
    global_scale, bias, out, parts, flags = operands
    tile_expert, tile_count, row_map, row_weight = routing
    ring, rest_ring, codes, pairs, sums, rest_sums, decodable, ready, empty, started, idle, added, taken, inbox = shared
    M, N, K = sizes
    GROUP: gl.constexpr = NUMBER // SPLIT_K
    MINE: gl.constexpr = NUMBER % SPLIT_K
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    REST: gl.constexpr = BLOCK_M - MAIN
    BLOCK_N: gl.constexpr = codes.shape[2] * 16
    GROUPS: gl.constexpr = BLOCK_N // 64
    # Consumers of a group that have columns to add.
    SLICES: gl.constexpr = MAIN // (sums.shape[1] * 8)
    acc_layout: gl.constexpr = acc_layout_of(MAIN)
    tiles_m = tiles_of_rows(tile_count, M, BLOCK_M)
    tiles_n, tile_steps, begin, end, first_tile = program_stretch(
        tiles_m, N, K, BLOCK_N, ring.shape[2], SHARED, CLUSTER
    )  # fmt: skip
    if CLUSTER > 1:
        arrive(first_tile)
    # Columns beyond K, and rows beyond the stored ones, are zeros: the accelerator reads them so.
    stage = gl.to_tensor(MINE)
    phase = gl.to_tensor(0)
    end_tile = gl.cdiv(end, tile_steps) if SHARED else first_tile + 1
    for tile in range(first_tile, end_tile):
        tile_m, tile_n = quick_place(tile, tiles_m, tiles_n)
        scale = global_scale
        if tile_expert is not None:
            scale += gl.load(tile_expert + tile_m) * N
        elif NUMBER == 0:
            ask_for_scales(scale, 0, tile_n, N, BLOCK_N, True)
        acc = gl.zeros((64, MAIN), gl.float32, layout=acc_layout)
        rest = 0  # not used
        if REST:
            rest = gl.zeros((64, REST), gl.float32, layout=acc_layout_of(REST))
        first_turn, last_turn = turns_in_tile(tile, tile_steps, begin, end, MINE, SPLIT_K)
        mbarrier.wait(started, 0)
        stage, phase, acc, rest = _multiply(
            stage, phase, acc, rest, first_turn, last_turn, shared, GROUP, MINE, SPLIT_K, FP16, REST, EARLY
        )
        # Asked for before the sums are exchanged: the epilogue would wait for them.
        scales = load_scales(scale, (tile_n * GROUPS + GROUP) * 64, N, acc_layout, 64)
        parity = (tile - first_tile) & 1
        share_sums(acc, rest, shared, parity, GROUP, MINE, SPLIT_K, SHARED, BESIDE, REST)
        if MINE < SLICES:
            add_and_store(
                acc, rest, scales, given, (begin, tile_steps, tiles_m, tiles_n), tile, parity, tile_m, tile_n, NUMBER,
                BLOCK_M, SPLIT_K, SHARED, CLUSTER, UNSCALE, ACTIVATION,
            )  # fmt: skip
        elif SHARED:
            mbarrier.arrive(taken, count=1)
        elif CLUSTER > 1:
            wait_for_all(first_tile)
    leave(stage)


@gluon.jit
def _room_for_sums(ring, ROWS: gl.constexpr, SPLIT_K: gl.constexpr, CONSUMERS: gl.constexpr, BESIDE: gl.constexpr):
    """Shared memory for what consumers have of so many rows of x: beside their ring, or where that is."""
    shape: gl.constexpr = sums_shape(ROWS, SPLIT_K, CONSUMERS)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    if BESIDE:
        return gl.allocate_shared_memory(gl.float32, shape, layout)
    else:
        return reinterpret(ring, gl.float32, shape, layout)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M"])
def nvfp4_wgmma_split_kernel(
    x, words, scale_pairs, global_scale, bias, out, parts, flags, tile_expert, tile_count, row_map, row_weight, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    EAGER: gl.constexpr, BESIDE: gl.constexpr, CLUSTER: gl.constexpr, REGISTERS: gl.constexpr,
    FEW_REGISTERS: gl.constexpr, FP16: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr,
    PDL: gl.constexpr
):  # fmt: skip
    """One tile of out, of BLOCK_M rows and BLOCK_N columns, a program's share of one that CLUSTER have, or with
    `parts` its share of the steps of all tiles. There are BLOCK_N / 64 * SPLIT_K consumers, 2 or 4.

    x (`row_descriptor`), words and scale_pairs are descriptors of [M, K], [pieces of K, row tiles, 128] and [pieces of
    K, row tiles, 32]. N is the number of rows of the weight that are stored; the packed weight has them padded. `parts`
    fp32 [programs, 4, 64 * max(BLOCK_M / SPLIT_K, 8)] has room for a part of each consumer, and `flags`, a zero for
    each, say which are there. With BESIDE, and always with `parts`, consumers' sums have room beside the ring. The rest
    is that of `nvfp4_wgmma_kernel`; with `tile_expert` there are `parts`.
    """
    NT: gl.constexpr = BLOCK_N // 16
    SHARED: gl.constexpr = parts is not None
    ring_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    ring, rest_ring = allocate_ring(x.dtype, ring_layout, STAGES, BLOCK_M, DEPTH * 64)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, DEPTH, NT, 128], words.layout)
    pairs = gl.allocate_shared_memory(gl.uint16, [STAGES, DEPTH, NT, 32], scale_pairs.layout)
    CONSUMERS: gl.constexpr = BLOCK_N // 64 * SPLIT_K
    sums = _room_for_sums(ring, MAIN, SPLIT_K, CONSUMERS, BESIDE)
    rest_sums = sums  # not used
    if MAIN < BLOCK_M:
        rest_sums = _room_for_sums(rest_ring, BLOCK_M - MAIN, SPLIT_K, CONSUMERS, BESIDE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Whether the weight of the first step in a stage is there, where that is decoded before x is.
    EARLY: gl.constexpr = _early_of(EAGER, SPLIT_K, SHARED, by_warps(BLOCK_M))
    decodable = ready  # not used
    if EARLY:
        decodable = gl.allocate_shared_memory(gl.int64, [EARLY, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Whether the consumers' sums of a tile are there, and whether there is room for others.
    added = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # Whether all of these are initialized, by two warps.
    started = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(started, count=2)
    # Whether the matrix units are a consumer's, where they take turns.
    idle = ready  # not used
    if _takes_turns(CONSUMERS, BLOCK_M):
        idle = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    inbox = M
    if CLUSTER > 1:
        inbox = inbox_of(M, CONSUMERS, sums.shape[1] * 8, CLUSTER)
    operands = (global_scale, bias, out, parts, flags)
    shared = (
        ring, rest_ring, codes, pairs, sums, rest_sums, decodable, ready, empty, started, idle, added, taken, inbox
    )  # fmt: skip
    routing = (tile_expert, tile_count, row_map, row_weight)
    sizes = (M, N, K)
    given = (operands, routing, shared, sizes)
    # Of the partitions the last one is the rest of the producer's four warps. They are written out twice: Triton does
    # not concatenate tuples that have a None in them.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (
                    gl.constexpr(0), given, BLOCK_M, SPLIT_K, SHARED, EARLY, BESIDE, CLUSTER, FP16, UNSCALE,
                    ACTIVATION,
                )),
                (_consumer, (
                    gl.constexpr(1), given, BLOCK_M, SPLIT_K, SHARED, EARLY, BESIDE, CLUSTER, FP16, UNSCALE,
                    ACTIVATION,
                )),
                (_producer, (
                    x, words, scale_pairs, given, BLOCK_M, SHARED, EAGER, EARLY, CLUSTER, PDL,
                )),
                (_init, (given, BLOCK_M, SPLIT_K, EAGER, CLUSTER)),
                (_end, (M, CLUSTER)),
            ],
            [4, 1, 1, 2],
            [REGISTERS, FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    gl.constexpr(0), given, BLOCK_M, SPLIT_K, SHARED, EARLY, BESIDE, CLUSTER, FP16, UNSCALE,
                    ACTIVATION,
                )),
                (_consumer, (
                    gl.constexpr(1), given, BLOCK_M, SPLIT_K, SHARED, EARLY, BESIDE, CLUSTER, FP16, UNSCALE,
                    ACTIVATION,
                )),
                (_consumer, (
                    gl.constexpr(2), given, BLOCK_M, SPLIT_K, SHARED, EARLY, BESIDE, CLUSTER, FP16, UNSCALE,
                    ACTIVATION,
                )),
                (_consumer, (
                    gl.constexpr(3), given, BLOCK_M, SPLIT_K, SHARED, EARLY, BESIDE, CLUSTER, FP16, UNSCALE,
                    ACTIVATION,
                )),
                (_producer, (
                    x, words, scale_pairs, given, BLOCK_M, SHARED, EAGER, EARLY, CLUSTER, PDL,
                )),
                (_init, (given, BLOCK_M, SPLIT_K, EAGER, CLUSTER)),
                (_end, (M, CLUSTER)),
            ],
            [4, 4, 4, 1, 1, 2],
            [REGISTERS, REGISTERS, REGISTERS, FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
        )  # fmt: skip


def gemm_split(
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
    """`nvfp4_wgmma.gemm` by this kernel; for routed experts programs share the steps of all tiles."""
    x = lines_of_16_bytes(x)
    m, k = x.shape
    if out is None:
        out = routed.result(x, n)
    assert config.programs or routed.tile_expert is None, "only the GPU knows how many tiles experts have"
    plan = _plan(
        config, m, n, k, x.dtype == torch.float16, routed.tile_expert is not None, routed.activation, hardware,
        multiprocessors(x.device),
    )  # fmt: skip
    plan.launch(
        row_descriptor(x, plan.rows), *packed_descriptors(words, scale_bytes, plan.depth, plan.tile_rows),
        global_scale, bias, out, *parts_and_flags(plan.parts, x.device), *routed.tensors,
    )  # fmt: skip
    return out


class _Plan(NamedTuple):
    """A launch, rows of x in a box, pieces of 64 columns and tiles of 16 rows of the weight in a step, and the shape of
    tiles' parts, if there are any."""

    launch: Launch
    rows: int
    depth: int
    tile_rows: int
    parts: tuple[int, ...] | None


@lru_cache(PLANS)
def _plan(
    config: Config,
    m: int,
    n: int,
    k: int,
    fp16: bool,
    of_experts: bool,
    activation: str | None,
    hardware: Hardware,
    units: int,
) -> _Plan:
    """On a GPU of so many multiprocessors."""
    block_n = config.block_n
    block_m, rest = tile_and_rest(config.block_m, m)
    tiles = config.tiles(m, n)
    programs, parts = tiles, None
    # Of experts only the GPU knows.
    depth = _depth(block_m, 0 if of_experts else config.turns(m, n, k))
    room = ROOM[config.consumers, config.programs_together]
    ring_bytes = room.ring_bytes - config.inbox_bytes
    sum_bytes = 4 * prod(sums_shape(block_m, config.split_k, config.consumers))
    stage_bytes = (block_m * 2 + block_n * 9 // 16) * depth * COLUMNS
    # Each stage is one consumer's turn after turn. Were it another's, that one might come when the stage is still to be
    # filled for the one before, and a barrier tells a turn only from the next.
    most, roomy = (
        min(size // stage_bytes, MOST_STAGES) // config.split_k * config.split_k
        for size in (ring_bytes, ring_bytes - sum_bytes)
    )
    beside = config.programs > 0 or roomy == most or (config.cluster == 1 and roomy >= ENOUGH_STAGES)
    stages = roomy if beside else most
    if config.programs:
        # No more than run together: one waits for what another adds.
        together = units * config.programs_together
        programs = min(config.programs, together, tiles * cdiv(k, depth * COLUMNS))
        parts = programs, config.consumers, 64 * max(block_m // config.split_k, 8)
    launch = Launch(
        nvfp4_wgmma_split_kernel, (programs,), m, n, k,
        BLOCK_M=block_m, BLOCK_N=block_n, DEPTH=depth, STAGES=stages, SPLIT_K=config.split_k,
        EAGER=min(_eager(block_m), stages), BESIDE=beside, CLUSTER=config.cluster, REGISTERS=room.registers,
        FEW_REGISTERS=room.few_registers, FP16=fp16, UNSCALE=UNSCALE, ACTIVATION=activation,
        PDL=hardware.pdl, num_warps=4, cluster=config.cluster, **room.options, **pdl_option(hardware),
    )  # fmt: skip
    return _Plan(launch, rest or block_m, depth, block_n // ROWS, parts)
