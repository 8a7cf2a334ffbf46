# SPDX-License-Identifier: Apache-2.0
"""The epilogue of `nvfp4_wgmma_split`: consumers that took the steps of a tile in turns add up their sums, each a share
of the columns, its own from registers and the others' from shared memory; add those of other programs; and store them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from llm_quant_rocm.kernels.cluster import add_parts, send_parts, wait_for_all
from llm_quant_rocm.kernels.hopper import acc_layout_of, cta_barrier, main_rows, row_in_tile
from llm_quant_rocm.kernels.nvfp4_wgmma import epilogue
from llm_quant_rocm.kernels.wgmma_parts import (
    columns_of,
    give_part,
    load_shared_part,
    piece_columns,
    share_part,
    take_parts,
)


@gluon.constexpr_function
def sums_shape(rows, split_k, consumers):
    """Of the sums of a tile with so many rows of x: for each slice of its columns, those of all consumers but the one
    that adds them."""
    columns = max(rows // split_k, 8)
    return [consumers // split_k * (rows // columns) * (split_k - 1), columns // 8, 128, 4]


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
def share_sums(
    acc, rest, shared, parity, GROUP: gl.constexpr, MINE: gl.constexpr, SPLIT_K: gl.constexpr, SHARED: gl.constexpr,
    BESIDE: gl.constexpr, REST: gl.constexpr
):  # fmt: skip
    """Leaves those columns of acc, and of `rest` if it is another, that other consumers add in shared memory, once
    there is room. `parity` is that of the program's number of tiles before."""
    ring, rest_ring, codes, pairs, sums, rest_sums, decodable, ready, empty, started, idle, added, taken, inbox = shared
    if SHARED:
        # Until the sums of the tile before are read.
        mbarrier.wait(taken, parity ^ 1)
    elif not BESIDE:
        # The sums come to where the ring is, until nobody needs it any more.
        cta_barrier()
        mbarrier.arrive(taken, count=1)
        mbarrier.wait(taken, 0)
    _share_out(acc, sums, GROUP, MINE, SPLIT_K)
    if REST:
        _share_out(rest, rest_sums, GROUP, MINE, SPLIT_K)
    cta_barrier()
    mbarrier.arrive(added, count=1)


@gluon.jit
def _store(
    total, scales, number, tile_m, tile_n, result, GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr,
    UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """The epilogue of total [64, columns], rows of x from `number` on of a tile."""
    bias, out, row_map, row_weight, M, N = result
    COLUMNS: gl.constexpr = total.shape[1]
    layout: gl.constexpr = total.type.layout
    dtype: gl.constexpr = out.dtype.element_ty
    row = row_in_tile(tile_m, number, M, BLOCK_M)
    epilogue(
        total, scales, row, tile_m * BLOCK_M, tile_n * GROUPS + GROUP, bias, out, row_map, row_weight, M, N, COLUMNS,
        64, dtype, UNSCALE, ACTIVATION, layout, 4,
    )  # fmt: skip


@gluon.jit
def add_and_store(
    acc, rest, scales, given, stretch, tile, parity, tile_m, tile_n, NUMBER: gl.constexpr, BLOCK_M: gl.constexpr,
    SPLIT_K: gl.constexpr, SHARED: gl.constexpr, CLUSTER: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """The epilogue of consumer NUMBER's columns of a tile, when all have left theirs (`share_sums`). `stretch` is where
    the program's steps begin, how many a tile has, and the tiles of rows of x and of the weight."""
    operands, routing, shared, sizes = given
    global_scale, bias, out, parts, flags = operands
    tile_expert, tile_count, row_map, row_weight = routing
    ring, rest_ring, codes, pairs, sums, rest_sums, decodable, ready, empty, started, idle, added, taken, inbox = shared
    M, N, K = sizes
    begin, tile_steps, tiles_m, tiles_n = stretch
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    GROUP: gl.constexpr = NUMBER // SPLIT_K
    MINE: gl.constexpr = NUMBER % SPLIT_K
    GROUPS: gl.constexpr = codes.shape[2] // 4
    SLICE: gl.constexpr = sums.shape[1] * 8
    PIECE: gl.constexpr = piece_columns(SLICE, CLUSTER)
    result = (bias, out, row_map, row_weight, M, N)
    mbarrier.wait(added, parity)
    total = _add_up(acc, sums, GROUP, MINE, SPLIT_K)
    whole = True
    if SHARED:
        cta_barrier()
        mbarrier.arrive(taken, count=1)
        whole = begin <= tile * tile_steps
        if whole:
            steps = tiles_m * tiles_n * tile_steps
            layout: gl.constexpr = total.type.layout
            total = take_parts(
                total, parts, flags, steps, (tile + 1) * tile_steps, layout, NUMBER, GROUPS * SPLIT_K
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
        _store(total, scales, number, tile_m, tile_n, result, GROUP, GROUPS, BLOCK_M, UNSCALE, ACTIVATION)
    if MAIN < BLOCK_M:
        total = _add_up(rest, rest_sums, GROUP, MINE, SPLIT_K)
        number = MAIN + MINE * (rest_sums.shape[1] * 8)
        _store(total, scales, number, tile_m, tile_n, result, GROUP, GROUPS, BLOCK_M, UNSCALE, ACTIVATION)
