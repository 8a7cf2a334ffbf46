# SPDX-License-Identifier: Apache-2.0
"""Parts of a tile's sum on Hopper: from the programs that have the rest of the tile's steps to the one that has its
beginning; or between programs that share a tile.

The steps of all tiles are shared out evenly, each program a stretch (`begin_of`). A program gives away its part of the
tile in whose midst its stretch begins as soon as it has it, and waits for others only at its end: parts are there by
then, and no two programs wait for each other. Where the same number of programs share each tile, and run together, each
adds a piece of it, as far as pieces go: it keeps its own part of that in registers, and gives away the rest
(`give_pieces`). A part is one consumer's, four warps. Consumers of one program that take the steps of a tile in turns
leave their parts to each other in shared memory (`share_part`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llm_quant_rocm.kernels.hopper import acc_layout_of, cta_barrier
from llm_quant_rocm.kernels.stretches import begin_of


@gluon.jit
def _part_pointers(part, COLUMNS: gl.constexpr):
    """A part [128, COLUMNS], a row for each thread of a consumer, in memory four values of each thread side by side."""
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    thread = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return (part + thread * 4)[:, None] + (column // 4 * 512 + column % 4)[None, :]


@gluon.jit
def store_part(acc, part):
    """Stores acc [N, M] as it lies in registers."""
    N: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    COLUMNS: gl.constexpr = N * M // 128
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    # 64 rows, warp, row half, row, column tile, lane % 4, column. Rows of x in their order: a slice is contiguous.
    values = acc.reshape(N // 64, 4, 2, 8, M // 8, 4, 2).permute(1, 3, 5, 4, 0, 2, 6).reshape(128, COLUMNS)
    gl.store(_part_pointers(part, COLUMNS), gl.convert_layout(values, layout, assert_trivial=True))


@gluon.jit
def add_part(acc, part, acc_layout: gl.constexpr):
    """acc plus what another program stored with `store_part`."""
    N: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    values = gl.load(_part_pointers(part, N * M // 128), cache_modifier=".cg")
    values = values.reshape(4, 8, 4, M // 8, N // 64, 2, 2).permute(4, 0, 5, 1, 3, 2, 6).reshape(N, M)
    return acc + gl.convert_layout(values, acc_layout, assert_trivial=True)


@gluon.jit
def share_part(acc, part):
    """Stores acc [64, M] as it lies in registers in `part`, fp32 [M / 8, 128, 4]: four values of each thread side by
    side."""
    M: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([M // 8, 1, 4], [1, 32, 1], [1, 4, 1], [2, 0, 1])
    # Warp, row half, row, column tile, lane % 4, column.
    values = acc.reshape(4, 2, 8, M // 8, 4, 2).permute(3, 0, 2, 4, 1, 5).reshape(M // 8, 128, 4)
    part.store(gl.convert_layout(values, layout, assert_trivial=True))


@gluon.jit
def load_shared_part(part, acc_layout: gl.constexpr):
    """What another consumer of the program stored with `share_part`."""
    M: gl.constexpr = part.shape[0] * 8
    layout: gl.constexpr = gl.BlockedLayout([M // 8, 1, 4], [1, 32, 1], [1, 4, 1], [2, 0, 1])
    values = part.load(layout).reshape(M // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, M)
    return gl.convert_layout(values, acc_layout, assert_trivial=True)


@gluon.constexpr_function
def piece_columns(columns, programs):
    """How many of so many columns, a power of two, each of the programs of a tile adds; the first `columns` // that
    many of them do."""
    piece = 8
    while piece * programs < columns:
        piece *= 2
    return piece


@gluon.jit
def columns_of(acc, SLICE: gl.constexpr, NUMBER: gl.constexpr, layout: gl.constexpr):
    """Columns NUMBER * SLICE and following of acc [N, M], SLICE of them: registers that each thread has."""
    PARTS: gl.constexpr = acc.shape[1] // SLICE
    if PARTS > 1:
        low, high = gl.split(acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1))
        if NUMBER < PARTS // 2:
            return columns_of(low, SLICE, NUMBER, layout)
        else:
            return columns_of(high, SLICE, NUMBER - PARTS // 2, layout)
    else:
        return gl.convert_layout(acc, layout, assert_trivial=True)


@gluon.jit
def give_part(acc, parts, flags, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Stores the program's part acc [N, M] in `parts` fp32 [programs, CONSUMERS, N * M], and tells by `flags`, a zero
    for each, that it is there."""
    slot = gl.program_id(0) * CONSUMERS + CONSUMER
    store_part(acc, parts + slot.to(gl.int64) * (acc.shape[0] * acc.shape[1]))
    cta_barrier()
    gl.atomic_xchg(flags + slot, 1, sem="release", scope="gpu")


@gluon.jit
def take_parts(
    acc, parts, flags, groups, end, acc_layout: gl.constexpr, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr
):  # fmt: skip
    """acc plus the parts, in order, of the programs after this one whose stretches of all `groups` begin before `end`.
    Their flags are zeros again."""
    source = gl.program_id(0) + 1
    while begin_of(source, groups) < end:
        slot = source * CONSUMERS + CONSUMER
        while gl.atomic_add(flags + slot, 0, sem="acquire", scope="gpu") == 0:
            pass
        gl.store(flags + slot, 0)
        acc = add_part(acc, parts + slot.to(gl.int64) * (acc.shape[0] * acc.shape[1]), acc_layout)
        source += 1
    return acc


@gluon.jit
def await_all(arrived, PROGRAMS: gl.constexpr):
    """Tells the PROGRAMS of a tile that this one's part is there, and waits for theirs. `arrived` and the number behind
    it, zeros, count them (`clear`)."""
    cta_barrier()
    gl.atomic_add(arrived, 1, sem="release", scope="gpu")
    while gl.atomic_add(arrived, 0, sem="acquire", scope="gpu") < PROGRAMS:
        pass


@gluon.jit
def clear(arrived, PROGRAMS: gl.constexpr):
    """Makes the numbers of `await_all` zeros again when all programs have gone on from there: at the end, where nothing
    waits for it. A program is counted after its last look, an acquire."""
    if gl.atomic_add(arrived + 1, 1, sem="relaxed", scope="gpu") == PROGRAMS - 1:
        gl.store(arrived, 0)
        gl.store(arrived + 1, 0)


@gluon.jit
def give_pieces(acc, part, rank, PROGRAMS: gl.constexpr, FP8: gl.constexpr):
    """Stores in `part`, fp32 [N * M], what the other programs of a tile add of the program's acc [N, M], and returns
    what number `rank` of the PROGRAMS itself adds of it, [N, `piece_columns`], of no use where that is nothing."""
    PIECE: gl.constexpr = piece_columns(acc.shape[1], PROGRAMS)
    layout: gl.constexpr = acc_layout_of(PIECE, FP8)
    mine = columns_of(acc, PIECE, 0, layout)
    for adder in gl.static_range(acc.shape[1] // PIECE):
        columns = columns_of(acc, PIECE, adder, layout)
        if rank == adder:
            mine = columns
        else:
            store_part(columns, part + adder * (acc.shape[0] * PIECE))
    return mine


@gluon.jit
def take_pieces(mine, parts, rank, apart, PROGRAMS: gl.constexpr):
    """`mine` [N, PIECE] of program number `rank` plus what the other PROGRAMS of the tile have of it, in order. `parts`
    is the first one's part, `apart` values before the second one's."""
    SIZE: gl.constexpr = mine.shape[0] * mine.shape[1]
    layout: gl.constexpr = mine.type.layout
    for other in gl.static_range(PROGRAMS - 1):
        source = other + gl.where(other >= rank, 1, 0)
        mine = add_part(mine, parts + (source * apart + rank * SIZE), layout)
    return mine
