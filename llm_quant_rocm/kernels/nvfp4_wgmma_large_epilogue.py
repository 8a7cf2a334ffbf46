# SPDX-License-Identifier: Apache-2.0
"""The epilogue of `nvfp4_wgmma_large`: from a consumer's sums of a tile to their place in the result.

Where no tile is cut, the tensor memory accelerator stores them from shared memory (`store_with_tma`), while the next
tile is multiplied; of tiles with 64 rows of the weight the two consumers add up their sums before. Where tiles are cut,
threads store theirs (`add_and_store`) once the parts are added: by the program with a tile's beginning, or by each of
those that share it, some of the rows (`store_shares`, also of a tail).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from llm_quant_rocm.kernels.hopper import (
    acc_layout_of,
    behind,
    cta_barrier,
    first_own_row,
    main_rows,
    reinterpret,
    row_in_tile,
    store_through,
)
from llm_quant_rocm.kernels.nvfp4_wgmma import epilogue, gated
from llm_quant_rocm.kernels.sizes import next_power_of_2
from llm_quant_rocm.kernels.wgmma_parts import (
    await_all,
    clear,
    columns_of,
    give_part,
    give_pieces,
    load_shared_part,
    share_part,
    take_parts,
    take_pieces,
)


@gluon.jit
def _load_row_scales(scale, tile_m, number, M, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, SLICE: gl.constexpr):
    """Scales, of `scale` [M], of ROWS rows of x from `number` on of a tile: [ROWS / SLICE, SLICE]."""
    layout: gl.constexpr = gl.BlockedLayout([ROWS // SLICE, 1], [1, 32], [1, 4], [1, 0])
    first = gl.arange(0, ROWS // SLICE, layout=gl.SliceLayout(1, layout)) * SLICE
    rest = gl.arange(0, SLICE, layout=gl.SliceLayout(0, layout))
    row = row_in_tile(tile_m, number + first[:, None] + rest[None, :], M, BLOCK_M)
    return gl.load(scale + row, mask=row < M, other=0.0)


@gluon.jit
def load_row_scales(
    scale, tile_m, M, BLOCK_M: gl.constexpr, SLICE: gl.constexpr, HALF: gl.constexpr, APART: gl.constexpr
):  # fmt: skip
    """Of `scale` [M], the scales of a tile's main part and of its rest (the same where it has none). Of consumers that
    exchange sums each stores half of the rows."""
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    FIRST: gl.constexpr = HALF * MAIN // 2 if APART == 2 else 0
    main = _load_row_scales(scale, tile_m, FIRST, M, BLOCK_M, MAIN // APART, SLICE)
    rest = main
    if MAIN < BLOCK_M:
        rest = _load_row_scales(scale, tile_m, MAIN, M, BLOCK_M, BLOCK_M - MAIN, SLICE)
    return main, rest


_power_of_2 = gluon.constexpr_function(next_power_of_2)


@gluon.constexpr_function
def kept_shape(block_m, block_n, slice_rows):
    """Of room for `keep_row_scales`: consumers, slices of a consumer's rows, as many as a power of two, and rows of a
    slice."""
    slices = block_m // slice_rows // (2 if block_n == 64 else 1)
    return [2, _power_of_2(slices), slice_rows]


@gluon.jit
def keep_row_scales(main, rest, kept, BLOCK_M: gl.constexpr):
    """Leaves what `load_row_scales` returned in `kept`, a consumer's room in shared memory: slices that came from other
    threads' registers one by one were waited for one by one."""
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    kept.slice(0, main.shape[0]).store(main)
    if MAIN < BLOCK_M:
        kept.slice(main.shape[0], rest.shape[0]).store(rest)


@gluon.jit
def _store_box(acc, row, column, out, staging, HALF: gl.constexpr, TURN: gl.constexpr):
    """Has the accelerator store a consumer's box number TURN of a tile, with its corner at [row, column]."""
    STORES: gl.constexpr = staging.shape[0] // 2
    own = staging.index(HALF * STORES + TURN % STORES)
    # Until there is room. The tile before may have ended with any of the consumer's.
    if TURN == 0:
        tma.store_wait(0)
    elif TURN >= STORES:
        tma.store_wait(STORES - 1)
    store_through(own, acc.to(out.dtype).permute((1, 0)), out, [row, column])


@gluon.jit
def _store_slice(
    acc, scales, row_scales, row, column, result, HALF: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr,
    TURN: gl.constexpr
):  # fmt: skip
    """The epilogue of acc [ROWS, SLICE], of as many rows of x as a box of the result has, from `row` on."""
    bias, out, staging, M, N, tile_rows = result
    ROWS: gl.constexpr = acc.shape[0]
    SLICE: gl.constexpr = staging.shape[1]
    WIDTH: gl.constexpr = staging.shape[2]
    layout: gl.constexpr = acc_layout_of(SLICE)
    acc = gl.convert_layout(acc, layout, assert_trivial=True)
    if row_scales is not None:
        acc *= row_scales.load(layout)
    acc *= gl.convert_layout(scales * UNSCALE, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
    if bias is not None:
        columns = column + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        acc += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[:, None]
    if ACTIVATION is not None:
        _store_box(gated(acc, out.dtype, ACTIVATION), row, column // 2, out, staging, HALF, TURN)
    elif ROWS > WIDTH:
        upper, lower = acc.reshape(2, WIDTH, SLICE).permute(1, 2, 0).split()
        upper = gl.convert_layout(upper, layout, assert_trivial=True)
        lower = gl.convert_layout(lower, layout, assert_trivial=True)
        _store_box(upper, row, column, out, staging, HALF, TURN)
        _store_box(lower, row, column + WIDTH, out, staging, HALF, TURN + 1)
    else:
        _store_box(acc, row, column, out, staging, HALF, TURN)


@gluon.jit
def store_slices(
    acc, scales, row_scales, number, rows, column, tile_m, result, HALF: gl.constexpr, BLOCK_M: gl.constexpr,
    UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr, TURN: gl.constexpr
):  # fmt: skip
    """The epilogue of acc [ROWS, columns], rows of x from `number` on of a tile and columns of the result from `column`
    on: the accelerator stores it, while the next tile is multiplied. Its first box is number TURN of the tile. Of
    experts' tiles, boxes beyond their `rows` are not stored."""
    bias, out, staging, M, N, tile_rows = result
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    SLICE: gl.constexpr = staging.shape[1]
    WIDTH: gl.constexpr = staging.shape[2]
    if COLUMNS > SLICE:
        left, right = acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        SLICES: gl.constexpr = COLUMNS // 2 // SLICE
        TURNS: gl.constexpr = SLICES * (ROWS // (WIDTH if ACTIVATION is None else 2 * WIDTH))
        low, high = row_scales, row_scales
        if row_scales is not None:
            low, high = row_scales.slice(0, SLICES), row_scales.slice(SLICES, SLICES)
        store_slices(left, scales, low, number, rows, column, tile_m, result, HALF, BLOCK_M, UNSCALE, ACTIVATION, TURN)
        number += COLUMNS // 2
        store_slices(
            right, scales, high, number, rows, column, tile_m, result, HALF, BLOCK_M, UNSCALE, ACTIVATION, TURN + TURNS
        )  # fmt: skip
    else:
        row = row_in_tile(tile_m, number, M, BLOCK_M)
        if tile_rows is None:  # noqa: SIM114  # constants decide what is compiled
            _store_slice(acc, scales, row_scales, row, column, result, HALF, UNSCALE, ACTIVATION, TURN)
        elif number < rows:
            _store_slice(acc, scales, row_scales, row, column, result, HALF, UNSCALE, ACTIVATION, TURN)


@gluon.jit
def _exchange(acc, ring, empty, exchanged, stage, turn, HALF: gl.constexpr):
    """The sum of both consumers' acc [64, columns] in this one's half of the columns. What it gives the other goes by
    way of the stage of the ring that it multiplied last, whose x nobody needs any more: a stage is filled anew when the
    one has written and the other read. `stage` is the one that it multiplies next, and `turn` the number of tiles
    before."""
    STAGES: gl.constexpr = empty.shape[0]
    # The other consumer looks one stage ahead of its last one before it comes here.
    gl.static_assert(STAGES >= 4)
    COLUMNS: gl.constexpr = acc.shape[1] // 2
    layout: gl.constexpr = acc_layout_of(COLUMNS)
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    own = behind(stage, STAGES, 2)
    other = behind(stage, STAGES, 1 if HALF == 0 else 3)
    mine = reinterpret(ring.index(own), gl.float32, [COLUMNS // 8, 128, 4], sums_layout)
    theirs = reinterpret(ring.index(other), gl.float32, [COLUMNS // 8, 128, 4], sums_layout)
    # A warp that has its product does not know whether others still read x.
    cta_barrier()
    share_part(columns_of(acc, COLUMNS, 1 - HALF, layout), mine)
    cta_barrier()
    mbarrier.arrive(exchanged, count=1)
    # After the one turn when both had their first steps.
    mbarrier.wait(exchanged, (turn + 1) % 2)
    total = columns_of(acc, COLUMNS, HALF, layout) + load_shared_part(theirs, layout)
    # The accelerator writes there next.
    fence_async_shared()
    cta_barrier()
    mbarrier.arrive(empty.index(own), count=1)
    mbarrier.arrive(empty.index(other), count=1)
    return total


@gluon.jit
def store_with_tma(
    acc, rest, scales, row_scales, rows, column, tile_m, result, exchange, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, APART: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """The epilogue of a whole tile, of whose rows the first `rows` count; or of half of it where two consumers exchange
    sums, with `exchange`, what `_exchange` is called with. Rows that are in two tiles, or twice in one, are stored
    twice, with the same bits."""
    bias, out, staging, M, N, tile_rows = result
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    SLICES: gl.constexpr = MAIN // staging.shape[1]
    main_scales, rest_scales = row_scales, row_scales
    if row_scales is not None and MAIN < BLOCK_M:
        main_scales = row_scales.slice(0, SLICES)
        rest_scales = row_scales.slice(SLICES, (BLOCK_M - MAIN) // staging.shape[1])
    number = 0
    if APART == 2:
        ring, empty, exchanged, stage, turn = exchange
        acc = _exchange(acc, ring, empty, exchanged, stage, turn, HALF)
        number = HALF * (BLOCK_M // 2)
    store_slices(
        acc, scales, main_scales, number, rows, column, tile_m, result, HALF, BLOCK_M, UNSCALE, ACTIVATION, 0
    )  # fmt: skip
    if MAIN < BLOCK_M:
        store_slices(
            rest, scales, rest_scales, MAIN, rows, column, tile_m, result, HALF, BLOCK_M, UNSCALE, ACTIVATION, SLICES
        )  # fmt: skip


@gluon.jit
def _times_columns(acc, scale, first, M):
    """acc times scale [M] from `first` on, a scale for each column: not all at once, for want of registers."""
    N: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    if COLUMNS > 64:
        lower, upper = acc.reshape(N, 2, COLUMNS // 2).permute(0, 2, 1).split()
        lower = _times_columns(lower, scale, first, M)
        upper = _times_columns(upper, scale, first + COLUMNS // 2, M)
        both = gl.join(lower, upper).permute(0, 2, 1).reshape(N, COLUMNS)
        return gl.convert_layout(both, layout, assert_trivial=True)
    else:
        m = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        return acc * gl.load(scale + m, mask=m < M, other=0.0)[None, :]


@gluon.jit
def _store_columns(
    acc, scales, number, tile_m, tile_n, result, HALF: gl.constexpr, BLOCK_M: gl.constexpr, UNSCALE: gl.constexpr
):  # fmt: skip
    """The epilogue of acc [ROWS, columns], rows of x from `number` on of a tile. Of rows that are twice in it each is
    stored once: programs that share the tile may add those in different orders."""
    row_scale, bias, out, M, N = result
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    dtype: gl.constexpr = out.dtype.element_ty
    row = row_in_tile(tile_m, number, M, BLOCK_M)
    if row_scale is not None:
        acc = _times_columns(acc, row_scale, row, M)
    least = first_own_row(tile_m, number, M, BLOCK_M)
    epilogue(
        acc, scales, row, least, tile_n * 2 + HALF, bias, out, None, None, M, N, COLUMNS, ROWS, dtype,
        UNSCALE, None, layout, 4,
    )  # fmt: skip


@gluon.jit
def _store_from_registers(
    acc, rest, scales, tile_m, tile_n, result, FP8: gl.constexpr, HALF: gl.constexpr, BLOCK_M: gl.constexpr,
    UNSCALE: gl.constexpr
):  # fmt: skip
    """The epilogue of a whole tile where the accelerator does not store it."""
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    half_layout: gl.constexpr = acc_layout_of(MAIN // 2, FP8)
    for half in gl.static_range(2):
        part = columns_of(acc, MAIN // 2, half, half_layout)
        _store_columns(part, scales, half * (MAIN // 2), tile_m, tile_n, result, HALF, BLOCK_M, UNSCALE)
    if MAIN < BLOCK_M:
        _store_columns(rest, scales, MAIN, tile_m, tile_n, result, HALF, BLOCK_M, UNSCALE)


@gluon.jit
def store_shares(
    acc, rest, scales, number, tile_m, tile_n, parts, flags, result, FP8: gl.constexpr, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, HEIGHT: gl.constexpr, SHARES: gl.constexpr, UNSCALE: gl.constexpr
):  # fmt: skip
    """The epilogue of HEIGHT rows of x, acc and perhaps `rest`, from `number` on of a tile, of which SHARES programs,
    one behind the other, have a part each: they exchange these, and each, as far as pieces go, adds and stores some of
    the rows."""
    ROWS: gl.constexpr = acc.shape[0]
    MAIN: gl.constexpr = acc.shape[1]
    REST: gl.constexpr = HEIGHT - MAIN
    SIZE: gl.constexpr = ROWS * HEIGHT
    program = gl.program_id(0)
    rank = program % SHARES
    own = parts + (program * 2 + HALF).to(gl.int64) * SIZE
    mine = give_pieces(acc, own, rank, SHARES, FP8)
    if REST:
        rest_mine = give_pieces(rest, own + ROWS * MAIN, rank, SHARES, FP8)
    arrived = flags + (program // SHARES * 2 + HALF) * 2
    await_all(arrived, SHARES)
    first = own - rank * (2 * SIZE)
    if rank < MAIN // mine.shape[1]:
        total = take_pieces(mine, first, rank, 2 * SIZE, SHARES)
        place = rank * mine.shape[1]
        _store_columns(total, scales, number + place, tile_m, tile_n, result, HALF, BLOCK_M, UNSCALE)
    if REST:  # noqa: SIM102  # constants decide what is compiled
        if rank < REST // rest_mine.shape[1]:
            total = take_pieces(rest_mine, first + ROWS * MAIN, rank, 2 * SIZE, SHARES)
            place = MAIN + rank * rest_mine.shape[1]
            _store_columns(total, scales, number + place, tile_m, tile_n, result, HALF, BLOCK_M, UNSCALE)
    clear(arrived, SHARES)


@gluon.jit
def _add_parts(acc, piece, cut, parts, flags, HALF: gl.constexpr):
    """The sum of a tile, of which acc is a part, if the program has its beginning. Else acc is given to the one that
    has."""
    tile, first, last = piece
    tiles, whole, tile_groups = cut
    layout: gl.constexpr = acc.type.layout
    if first > 0:
        give_part(acc, parts, flags, HALF, 2)
    elif last < tile_groups:
        cut_groups = (tiles - whole) * tile_groups
        acc = take_parts(acc, parts, flags, cut_groups, (tile - whole + 1) * tile_groups, layout, HALF, 2)
    return acc


@gluon.jit
def add_and_store(
    acc, rest, scales, piece, cut, tile_m, tile_n, parts, flags, result, FP8: gl.constexpr, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, SHARES: gl.constexpr, UNSCALE: gl.constexpr
):  # fmt: skip
    """The epilogue of a `piece` of work, its tile, first group of steps and end of groups, where the accelerator does
    not store results. `cut` is how many tiles there are, how many of them are whole, and groups of steps in each."""
    tile, first, last = piece
    tiles, whole, tile_groups = cut
    is_whole = last - first == tile_groups
    if SHARES:
        if not is_whole:
            store_shares(
                acc, rest, scales, 0, tile_m, tile_n, parts, flags, result, FP8, HALF, BLOCK_M, BLOCK_M, SHARES, UNSCALE
            )  # fmt: skip
    elif parts is not None:
        acc = _add_parts(acc, piece, cut, parts, flags, HALF)
    if is_whole if SHARES else first == 0:
        _store_from_registers(acc, rest, scales, tile_m, tile_n, result, FP8, HALF, BLOCK_M, UNSCALE)


@gluon.jit
def store_tail(
    acc, scales, number, tile_m, tile_n, operands, M, N, FP8: gl.constexpr, HALF: gl.constexpr, BLOCK_M: gl.constexpr,
    SHARES: gl.constexpr, UNSCALE: gl.constexpr
):  # fmt: skip
    """The epilogue of a tile of the tail, rows of x from `number` on of a tile. Of rows that are in two tiles, whose
    bits differ where programs share one, the tile before stores its own; it comes first in the order of `place`, so
    that no whole tile, which stores all it has, begins within a shared one."""
    row_scale, global_scale, bias, out, shared_out, staging, kept_scales, parts, flags = operands
    ROWS: gl.constexpr = acc.shape[0]
    HEIGHT: gl.constexpr = acc.shape[1]
    if SHARES:
        result = (row_scale, bias, shared_out, M, N)
        store_shares(
            acc, acc, scales, number, tile_m, tile_n, parts, flags, result, FP8, HALF, BLOCK_M, HEIGHT, SHARES, UNSCALE
        )  # fmt: skip
    else:
        SLICE: gl.constexpr = staging.shape[1]
        row_scales = row_scale  # None, where rows have none
        if row_scale is not None:
            row_scales = kept_scales.index(HALF).slice(0, HEIGHT // SLICE)
            row_scales.store(_load_row_scales(row_scale, tile_m, number, M, BLOCK_M, HEIGHT, SLICE))
        column = (tile_n * 2 + HALF) * ROWS
        result = (bias, out, staging, M, N, None)
        store_slices(acc, scales, row_scales, number, BLOCK_M, column, tile_m, result, HALF, BLOCK_M, UNSCALE, None, 0)
