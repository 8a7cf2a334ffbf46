# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and NVFP4 weights on Hopper: a program or two a multiprocessor, K split within.

As in `nvfp4_wgmma`, out^T = W . x^T, and a weight goes through registers, where its codes are decoded, into the matrix
units. Such a product holds its warps until it has read those registers, so four warps either decode or multiply, and
where a layer has no more than a tile for each multiprocessor, that is what it waits for. Here a program has four
consumers, four warps each, that take the steps along K of its tile in turns: while one multiplies, the others decode.
In the end each adds a share of the columns, its own from registers and the others' from shared memory. A producer, one
warp, has the tensor memory accelerator fill a ring of codes, scales and x. A short product takes as long as its first
steps take to come, so these are asked for before anything else is prepared.

With two consumers a program leaves room on its multiprocessor for another: of its own kernel, or of the next one, which
then has its first codes when the kernel before it ends. Of a weight with few tiles the programs of a `cluster` share
the steps of each.

What is a program's, `nvfp4_wgmma_split_tiles` says. Where programs share the steps of all tiles, the consumers' sums
have room of their own beside the ring, which stays full from one tile to the next. Tiles of 96 rows have two
accumulators, of 64 and of 32.
"""

from collections.abc import Mapping
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
from llm_quant_rocm.kernels.cluster import (
    add_parts,
    arrive,
    inbox_of,
    init_inbox,
    piece_columns,
    send_parts,
    wait_for_all,
)
from llm_quant_rocm.kernels.decode_hopper import UNSCALE
from llm_quant_rocm.kernels.flags import flags_of
from llm_quant_rocm.kernels.hopper import (
    acc_layout_of,
    advance,
    allocate_ring,
    cta_barrier,
    first_row,
    init_ring,
    leave,
    load_rows,
    main_rows,
    multiply_rest,
    packed_descriptors,
    reinterpret,
    row_descriptor,
    row_in_tile,
    tile_and_rest,
)
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.nvfp4_wgmma import (
    DENSE,
    Routed,
    ask_for_scales,
    epilogue,
    fetch_weight,
    first_piece_of,
    lines_of_16_bytes,
    load_operand,
    load_scales,
    tiles_of_rows,
)
from llm_quant_rocm.kernels.nvfp4_wgmma_split_tiles import (
    Config,
    first_expert,
    load_first_experts,
    next_step,
    program_stretch,
    quick_place,
    turns_in_tile,
)
from llm_quant_rocm.kernels.pdl import pdl_option
from llm_quant_rocm.kernels.sizes import cdiv
from llm_quant_rocm.kernels.wgmma_parts import (
    columns_of,
    give_part,
    load_shared_part,
    share_part,
    take_parts,
)

# Of the ring; more bring nothing.
MOST_STAGES = 16


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


# All of it with 640 threads that start with 96 registers each, or half of it with 384 that start with 80.
ROOM = {4: _Room(216 * 1024, 112, 32, {}), 2: _Room(110 * 1024, 104, 32, {"maxnreg": 80})}


@gluon.constexpr_function
def _sums_shape(rows, split_k, consumers):
    """Of the sums of a tile with so many rows of x: for each slice of its columns, those of all consumers but the one
    that adds them."""
    columns = max(rows // split_k, 8)
    return [consumers // split_k * (rows // columns) * (split_k - 1), columns // 8, 128, 4]


def _eager(block_m: int) -> int:
    """Of how many stages the weight is asked for before x, the first of which waits for its turn meanwhile: fewer, the
    longer x takes to come. An H100 took least with 8 at 16 rows, 4 at 32, 2 at 64 and 1 at 128, compared by hand."""
    return min(8, 128 // block_m)


@gluon.jit
def _end(value, CLUSTER: gl.constexpr):
    """`leave`, of warps that send nothing to the others of a cluster."""
    if CLUSTER > 1:
        arrive(value)
        wait_for_all(value)
    leave(value)


@gluon.jit
def _init(
    given, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, GROUPS: gl.constexpr, SPLIT_K: gl.constexpr,
    EAGER: gl.constexpr, CLUSTER: gl.constexpr
):  # fmt: skip
    """Initializes all barriers but those of the first stages, which the producer does: in a warp of its own, because it
    takes about as long as memory does to answer. Of experts it then asks the L2 cache for the global scales of the
    program's tiles: nobody else reads them, and the epilogue would wait for memory."""
    operands, routing, shared, sizes = given
    global_scale, bias, out, parts, flags = operands
    tile_expert, tile_count, row_map, row_weight = routing
    ring, rest_ring, codes, pairs, sums, rest_sums, ready, empty, started, added, taken, inbox = shared
    M, N, K = sizes
    BLOCK_N: gl.constexpr = GROUPS * 64
    mbarrier.init(added, count=GROUPS * SPLIT_K)
    mbarrier.init(taken, count=GROUPS * SPLIT_K)
    init_ring(ready, empty, started, GROUPS, EAGER)
    if CLUSTER > 1:
        init_inbox(inbox, GROUPS * SPLIT_K, sums.shape[1] * 8, CLUSTER)
    if tile_expert is not None:
        tiles_m = tiles_of_rows(tile_count, M, BLOCK_M)
        tiles_n, tile_steps, begin, end, first_tile = program_stretch(tiles_m, N, K, BLOCK_N, DEPTH * 64, True)
        for tile in range(first_tile, gl.cdiv(end, tile_steps)):
            tile_m, tile_n = quick_place(tile, tiles_m, tiles_n)
            ask_for_scales(global_scale, gl.load(tile_expert + tile_m), tile_n, N, BLOCK_N, True)
    _end(EAGER, CLUSTER)


@gluon.jit
def _producer(
    x, words, scale_pairs, given, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, SHARED: gl.constexpr, EAGER: gl.constexpr, CLUSTER: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Fills the ring, in the order in which the consumers take it."""
    operands, routing, shared, sizes = given
    tile_expert, tile_count, row_map, row_weight = routing
    ring, rest_ring, codes, pairs, sums, rest_sums, ready, empty, started, added, taken, inbox = shared
    M, N, K = sizes
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    BLOCK_N: gl.constexpr = codes.shape[2] * 16
    BLOCK_K: gl.constexpr = DEPTH * 64
    STAGE_BYTES: gl.constexpr = BLOCK_M * BLOCK_K * 2 + BLOCK_N * BLOCK_K * 9 // 16
    # Asked for before it is needed.
    tiles_m = tiles_of_rows(tile_count, M, BLOCK_M)
    if tile_expert is not None:
        first_experts = load_first_experts(tile_expert, M, BLOCK_M)
    # No more than the first requests need: the weight, unlike x, does not depend on the kernels before this one.
    for stage in range(0, EAGER):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    mbarrier.arrive(started, count=1)
    tiles_n, tile_steps, begin, end, tile = program_stretch(tiles_m, N, K, BLOCK_N, BLOCK_K, SHARED, CLUSTER)
    tile_m, tile_n = quick_place(tile, tiles_m, tiles_n)
    piece = 0
    if tile_expert is not None:
        piece = first_piece_of(first_expert(tile_m, first_experts, tile_expert, begin < end), K)
    first = (begin - tile * tile_steps, tile_m, tile_n, tile, piece)
    weight = (words, scale_pairs, codes, pairs, ready)
    tiles = (tile_steps, tiles_m, tiles_n, tile_expert, K, SHARED)
    step, tile_m, tile_n, tile, piece = first
    for stage in range(0, EAGER):
        mbarrier.expect(ready.index(stage), STAGE_BYTES, pred=begin + stage < end)
        fetch_weight(*weight, stage, tile_n, step, piece, begin + stage < end)
        step, tile_m, tile_n, tile, piece = next_step(step, tile_m, tile_n, tile, piece, *tiles)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    step, tile_m, tile_n, tile, piece = first
    for stage in range(0, EAGER):
        row = first_row(tile_m, M, BLOCK_M)
        load_rows(x, row, step * BLOCK_K, ready.index(stage), ring.index(stage), begin + stage < end)
        if MAIN < BLOCK_M:
            row = row_in_tile(tile_m, MAIN, M, BLOCK_M)
            load_rows(x, row, step * BLOCK_K, ready.index(stage), rest_ring.index(stage), begin + stage < end)
        step, tile_m, tile_n, tile, piece = next_step(step, tile_m, tile_n, tile, piece, *tiles)
    mbarrier.wait(started, 0)
    stage = EAGER % STAGES
    phase = 1 if EAGER < STAGES else 0
    for _ in range(begin + EAGER, end):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready.index(stage), STAGE_BYTES)
        fetch_weight(*weight, stage, tile_n, step, piece, True)
        load_rows(x, first_row(tile_m, M, BLOCK_M), step * BLOCK_K, ready.index(stage), ring.index(stage))
        if MAIN < BLOCK_M:
            row = row_in_tile(tile_m, MAIN, M, BLOCK_M)
            load_rows(x, row, step * BLOCK_K, ready.index(stage), rest_ring.index(stage))
        step, tile_m, tile_n, tile, piece = next_step(step, tile_m, tile_n, tile, piece, *tiles)
        stage, phase = advance(stage, phase, STAGES)
    _end(stage, CLUSTER)


@gluon.jit
def _place_of(
    GROUP: gl.constexpr, ADDER: gl.constexpr, OWNER: gl.constexpr, SPLIT_K: gl.constexpr, SLICES: gl.constexpr
):  # fmt: skip
    """Where consumer ADDER of a group finds OWNER's sums of its columns; its own stay in registers."""
    return (GROUP * SLICES + ADDER) * (SPLIT_K - 1) + (OWNER if OWNER < ADDER else OWNER - 1)


@gluon.jit
def _share_out(acc, sums, GROUP: gl.constexpr, MINE: gl.constexpr, SPLIT_K: gl.constexpr):
    """Stores those columns of acc [64, M] that other consumers of the group add."""
    SLICE: gl.constexpr = sums.shape[1] * 8
    SLICES: gl.constexpr = acc.shape[1] // SLICE
    for adder in gl.static_range(SLICES):
        if adder != MINE:
            columns = columns_of(acc, SLICE, adder, acc_layout_of(SLICE))
            share_part(columns, sums.index(_place_of(GROUP, adder, MINE, SPLIT_K, SLICES)))


@gluon.jit
def _add_up(acc, sums, GROUP: gl.constexpr, MINE: gl.constexpr, SPLIT_K: gl.constexpr):
    """The consumer's own columns of acc [64, M] plus what the others of its group have of them, in order."""
    SLICE: gl.constexpr = sums.shape[1] * 8
    SLICES: gl.constexpr = acc.shape[1] // SLICE
    layout: gl.constexpr = acc_layout_of(SLICE)
    total = gl.zeros((64, SLICE), gl.float32, layout=layout)
    for owner in gl.static_range(SPLIT_K):
        if owner == MINE:
            total += columns_of(acc, SLICE, MINE, layout)
        else:
            total += load_shared_part(sums.index(_place_of(GROUP, MINE, owner, SPLIT_K, SLICES)), layout)
    return total


@gluon.jit
def _consumer(
    NUMBER: gl.constexpr, given, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, SHARED: gl.constexpr, CLUSTER: gl.constexpr, FP16: gl.constexpr, UNSCALE: gl.constexpr,
    ACTIVATION: gl.constexpr
):  # fmt: skip
    """Multiplies every SPLIT_K-th step of 64 rows of the weight, and adds and stores a share of their columns."""
    operands, routing, shared, sizes = given
    global_scale, bias, out, parts, flags = operands
    tile_expert, tile_count, row_map, row_weight = routing
    ring, rest_ring, codes, pairs, sums, rest_sums, ready, empty, started, added, taken, inbox = shared
    M, N, K = sizes
    GROUP: gl.constexpr = NUMBER // SPLIT_K
    MINE: gl.constexpr = NUMBER % SPLIT_K
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    REST: gl.constexpr = BLOCK_M - MAIN
    BLOCK_N: gl.constexpr = codes.shape[2] * 16
    GROUPS: gl.constexpr = BLOCK_N // 64
    SLICE: gl.constexpr = sums.shape[1] * 8
    SLICES: gl.constexpr = MAIN // SLICE
    PIECE: gl.constexpr = piece_columns(SLICE, CLUSTER)
    dtype: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    acc_layout: gl.constexpr = acc_layout_of(MAIN)
    slice_layout: gl.constexpr = acc_layout_of(SLICE)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    tiles_m = tiles_of_rows(tile_count, M, BLOCK_M)
    tiles_n, tile_steps, begin, end, first_tile = program_stretch(tiles_m, N, K, BLOCK_N, DEPTH * 64, SHARED, CLUSTER)
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
        if REST:
            rest = gl.zeros((64, REST), gl.float32, layout=acc_layout_of(REST))
        first_turn, last_turn = turns_in_tile(tile, tile_steps, begin, end, MINE, SPLIT_K)
        mbarrier.wait(started, 0)
        for _ in range(first_turn, last_turn):
            mbarrier.wait(ready.index(stage), phase)
            my_codes = codes.index(stage).slice(GROUP * 4, 4, dim=1)
            my_pairs = pairs.index(stage).slice(GROUP * 4, 4, dim=1)
            operand = load_operand(my_codes, my_pairs, 0, FP16, DEPTH, operand_layout)
            acc = warpgroup_mma(operand, ring.index(stage).permute((1, 0)), acc, is_async=True)
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

        # Asked for before the sums are exchanged: the epilogue would wait for them.
        scales = load_scales(scale, (tile_n * GROUPS + GROUP) * 64, N, acc_layout, 64)
        parity = (tile - first_tile) & 1
        if SHARED:
            # Until the sums of the tile before are read.
            mbarrier.wait(taken, parity ^ 1)
        else:
            # The sums come to where the ring is, until nobody needs it any more.
            cta_barrier()
            mbarrier.arrive(taken, count=1)
            mbarrier.wait(taken, 0)
        _share_out(acc, sums, GROUP, MINE, SPLIT_K)
        if REST:
            _share_out(rest, rest_sums, GROUP, MINE, SPLIT_K)
        cta_barrier()
        mbarrier.arrive(added, count=1)
        if MINE < SLICES:
            mbarrier.wait(added, parity)
            total = _add_up(acc, sums, GROUP, MINE, SPLIT_K)
            if SHARED:
                cta_barrier()
                mbarrier.arrive(taken, count=1)
            whole = True
            if SHARED:
                whole = begin <= tile * tile_steps
                if whole:
                    steps = tiles_m * tiles_n * tile_steps
                    total = take_parts(
                        total, parts, flags, steps, (tile + 1) * tile_steps, slice_layout, NUMBER, GROUPS * SPLIT_K
                    )  # fmt: skip
                else:
                    give_part(total, parts, flags, NUMBER, GROUPS * SPLIT_K)
            number = MINE * SLICE
            if CLUSTER > 1:
                rank = gl.program_id(0) % CLUSTER
                wait_for_all(rank)
                total = send_parts(total, inbox, rank, NUMBER, CLUSTER)
                whole = rank < SLICE // PIECE
                number += rank * PIECE
            if whole:
                if CLUSTER > 1:
                    total = add_parts(total, inbox, rank, NUMBER, CLUSTER)
                row = row_in_tile(tile_m, number, M, BLOCK_M)
                epilogue(
                    total, scales, row, tile_m * BLOCK_M, tile_n * GROUPS + GROUP, bias, out, row_map, row_weight, M, N,
                    PIECE, 64, dtype, UNSCALE, ACTIVATION, acc_layout_of(PIECE), 4,
                )  # fmt: skip
            if REST:
                total = _add_up(rest, rest_sums, GROUP, MINE, SPLIT_K)
                REST_SLICE: gl.constexpr = rest_sums.shape[1] * 8
                row = row_in_tile(tile_m, MAIN + MINE * REST_SLICE, M, BLOCK_M)
                epilogue(
                    total, scales, row, tile_m * BLOCK_M, tile_n * GROUPS + GROUP, bias, out, None, None, M, N,
                    REST_SLICE, 64, dtype, UNSCALE, None, acc_layout_of(REST_SLICE), 4,
                )  # fmt: skip
        elif SHARED:
            mbarrier.arrive(taken, count=1)
        elif CLUSTER > 1:
            wait_for_all(first_tile)
    leave(stage)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M"])
def nvfp4_wgmma_split_kernel(
    x, words, scale_pairs, global_scale, bias, out, parts, flags, tile_expert, tile_count, row_map, row_weight, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    EAGER: gl.constexpr, CLUSTER: gl.constexpr, REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr,
    FP16: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """One tile of out, of BLOCK_M rows and BLOCK_N columns, a program's share of one that CLUSTER have, or with
    `parts` its share of the steps of all tiles. There are BLOCK_N / 64 * SPLIT_K consumers, 2 or 4.

    x (`row_descriptor`), words and scale_pairs are descriptors of [M, K], [pieces of K, row tiles, 128] and [pieces of
    K, row tiles, 32]. N is the number of rows of the weight that are stored; the packed weight has them padded. `parts`
    fp32 [programs, 4, 64 * max(BLOCK_M / SPLIT_K, 8)] has room for a part of each consumer, and `flags`, a zero for
    each, say which are there. The rest is that of `nvfp4_wgmma_kernel`; with `tile_expert` there are `parts`.
    """
    NT: gl.constexpr = BLOCK_N // 16
    SHARED: gl.constexpr = parts is not None
    ring_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    ring, rest_ring = allocate_ring(x.dtype, ring_layout, STAGES, BLOCK_M, DEPTH * 64)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, DEPTH, NT, 128], words.layout)
    pairs = gl.allocate_shared_memory(gl.uint16, [STAGES, DEPTH, NT, 32], scale_pairs.layout)
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    CONSUMERS: gl.constexpr = BLOCK_N // 64 * SPLIT_K
    sums_shape: gl.constexpr = _sums_shape(MAIN, SPLIT_K, CONSUMERS)
    if SHARED:
        sums = gl.allocate_shared_memory(gl.float32, sums_shape, sums_layout)
    else:
        sums = reinterpret(ring, gl.float32, sums_shape, sums_layout)
    if MAIN < BLOCK_M:
        rest_sums = reinterpret(rest_ring, gl.float32, _sums_shape(BLOCK_M - MAIN, SPLIT_K, CONSUMERS), sums_layout)
    else:
        rest_sums = sums  # not used
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Whether the consumers' sums of a tile are there, and whether there is room for others.
    added = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # Whether all of these are initialized, by two warps.
    started = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(started, count=2)
    inbox = M
    if CLUSTER > 1:
        inbox = inbox_of(M, CONSUMERS, sums_shape[1] * 8, CLUSTER)
    operands = (global_scale, bias, out, parts, flags)
    shared = (ring, rest_ring, codes, pairs, sums, rest_sums, ready, empty, started, added, taken, inbox)
    routing = (tile_expert, tile_count, row_map, row_weight)
    sizes = (M, N, K)
    given = (operands, routing, shared, sizes)
    # Of the partitions the last one is the rest of the producer's four warps. They are written out twice: Triton does
    # not concatenate tuples that have a None in them.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (
                    gl.constexpr(0), given, BLOCK_M, DEPTH, STAGES, SPLIT_K, SHARED, CLUSTER, FP16, UNSCALE, ACTIVATION,
                )),
                (_consumer, (
                    gl.constexpr(1), given, BLOCK_M, DEPTH, STAGES, SPLIT_K, SHARED, CLUSTER, FP16, UNSCALE, ACTIVATION,
                )),
                (_producer, (
                    x, words, scale_pairs, given, BLOCK_M, DEPTH, STAGES, SPLIT_K, SHARED, EAGER, CLUSTER, PDL,
                )),
                (_init, (given, BLOCK_M, DEPTH, BLOCK_N // 64, SPLIT_K, EAGER, CLUSTER)),
                (_end, (M, CLUSTER)),
            ],
            [4, 1, 1, 2],
            [REGISTERS, FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    gl.constexpr(0), given, BLOCK_M, DEPTH, STAGES, SPLIT_K, SHARED, CLUSTER, FP16, UNSCALE, ACTIVATION,
                )),
                (_consumer, (
                    gl.constexpr(1), given, BLOCK_M, DEPTH, STAGES, SPLIT_K, SHARED, CLUSTER, FP16, UNSCALE, ACTIVATION,
                )),
                (_consumer, (
                    gl.constexpr(2), given, BLOCK_M, DEPTH, STAGES, SPLIT_K, SHARED, CLUSTER, FP16, UNSCALE, ACTIVATION,
                )),
                (_consumer, (
                    gl.constexpr(3), given, BLOCK_M, DEPTH, STAGES, SPLIT_K, SHARED, CLUSTER, FP16, UNSCALE, ACTIVATION,
                )),
                (_producer, (
                    x, words, scale_pairs, given, BLOCK_M, DEPTH, STAGES, SPLIT_K, SHARED, EAGER, CLUSTER, PDL,
                )),
                (_init, (given, BLOCK_M, DEPTH, BLOCK_N // 64, SPLIT_K, EAGER, CLUSTER)),
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
    block_n = config.block_n
    block_m, rest = tile_and_rest(config.block_m, m)
    # Steps of 128 columns where there is the room for enough of them.
    depth = 2 if block_m <= 64 else 1
    tiles = config.tiles(m, n)
    programs, parts, flags, sum_bytes = tiles, None, None, config.inbox_bytes
    room = ROOM[config.consumers]
    assert config.programs or routed.tile_expert is None, "only the GPU knows how many tiles experts have"
    if config.programs:
        # No more than run together: one waits for what another adds.
        programs = min(config.programs, multiprocessors(x.device), tiles * cdiv(k, depth * COLUMNS))
        slice_m = max(block_m // config.split_k, 8)
        parts = torch.empty((programs, config.consumers, 64 * slice_m), dtype=torch.float32, device=x.device)
        flags = flags_of(x.device)
        sum_bytes = block_n * (config.split_k - 1) * block_m * 4
    stages = min((room.ring_bytes - sum_bytes) // ((block_m * 2 + block_n * 9 // 16) * depth * COLUMNS), MOST_STAGES)
    fp16 = x.dtype == torch.float16
    row_tiles = block_n // ROWS
    # Each stage is one consumer's turn after turn. Were it another's, that one might come when the stage is still to be
    # filled for the one before, and a barrier tells a turn only from the next.
    stages = stages // config.split_k * config.split_k
    launch(
        nvfp4_wgmma_split_kernel, (programs,),
        row_descriptor(x, rest or block_m),
        *packed_descriptors(words, scale_bytes, depth, row_tiles),
        global_scale, bias, out, parts, flags, *routed.tensors, m, n, k,
        BLOCK_M=block_m, BLOCK_N=block_n, DEPTH=depth, STAGES=stages, SPLIT_K=config.split_k,
        EAGER=min(_eager(block_m), stages), CLUSTER=config.cluster, REGISTERS=room.registers,
        FEW_REGISTERS=room.few_registers, FP16=fp16, UNSCALE=UNSCALE[fp16], ACTIVATION=routed.activation,
        PDL=hardware.pdl, num_warps=4, cluster=config.cluster, **room.options, **pdl_option(hardware),
    )  # fmt: skip
    return out
