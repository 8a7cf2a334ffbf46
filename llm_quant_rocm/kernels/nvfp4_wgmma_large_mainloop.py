# SPDX-License-Identifier: Apache-2.0
"""The main loop of `nvfp4_wgmma_large`: a producer has the tensor memory accelerator fill a ring in shared memory with
codes, scales and x, and consumers decode the weight on its way to the matrix units.

`shared` is that ring and its barriers: stages of x, of the rest of its rows, of codes and of scale pairs, and where the
tile is that a stage is of (`places`); whether a stage is filled (`ready`) and whether it is free (`empty`); whether all
of these are initialized (`started`), and whether both consumers have their first steps, and then whether they may take
each other's sums (`exchanged`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm_quant_rocm.kernels.decode_hopper import decode_words, decode_words_fp8, split_bytes
from llm_quant_rocm.kernels.hopper import (
    advance,
    behind,
    declare_shared,
    first_row,
    init_ring,
    leave,
    load_rows,
    main_rows,
    multiply_rest,
    place,
    row_in_tile,
)
from llm_quant_rocm.kernels.nvfp4_wgmma import (
    expert_of,
    fetch_weight,
    first_piece_of,
    load_blocks,
    load_words,
    operand_of,
)
from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import count_tiles, piece_at, program_pieces, program_tail


@gluon.constexpr_function
def _stage_bytes(ring, codes, rows):
    """Bytes that fill a stage with so many rows of x."""
    values = codes.shape[1] * codes.shape[2] * codes.shape[3] * 8
    return rows * ring.shape[2] * ring.dtype.primitive_bitwidth // 8 + values * 9 // 16


# A tile's tile_m and tile_n, and of experts whose it is and how many of its rows count: 16 bytes of a stage.
_TELL = gl.constexpr("st.shared.v4.b32 [$1], {$2, $3, $4, $5}; bar.warp.sync -1; mov.b32 $0, 0;")
_TOLD = gl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")


@gluon.jit
def declare_places(value, STAGES: gl.constexpr):
    """The address of room in shared memory for where the tiles of a ring's stages are. Once in a kernel, which declares
    it; `value` is any number."""
    gl.static_assert(STAGES <= 64)
    return declare_shared(1024, value)


@gluon.jit
def _tell_place(places, stage, tile_m, tile_n, expert, rows):
    """Leaves where a tile is with a stage that is free, before its barrier expects bytes: consumers, who would divide,
    read it behind that (`told_place`)."""
    gl.inline_asm_elementwise(
        _TELL, "=r,r,r,r,r,r", [places + stage * 16, tile_m, tile_n, expert, rows], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _told(address):
    return gl.inline_asm_elementwise(_TOLD, "=r,=r,r", [address], dtype=(gl.int32, gl.int32), is_pure=False, pack=1)


@gluon.jit
def told_place(places, stage):
    """tile_m and tile_n of a stage that is filled."""
    return _told(places + stage * 16)


@gluon.jit
def told_expert(places, stage):
    """Whose tile a stage that is filled is of, and how many of its rows count."""
    return _told(places + stage * 16 + 8)


@gluon.jit
def init_barriers(shared, BLOCK_N: gl.constexpr):
    """Initializes all barriers but that of the first stage, which the producer does, in a warp of its own: they take
    about as long as memory does to answer."""
    ring, rest_ring, codes, pairs, places, ready, empty, started, exchanged = shared
    if BLOCK_N == 64:
        mbarrier.init(exchanged, count=2)
    init_ring(ready, empty, started, 2, 1)
    leave(0)


@gluon.jit
def _fetch_x(
    x, rest_x, stage, tile_m, number, step, shared, M, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, wanted=True
):  # fmt: skip
    """Has the accelerator fill a stage with ROWS rows of x, from row `number` of a tile on: all of the tile's, the rest
    of them by `rest_x`, or as many as one of the tail has."""
    ring, rest_ring, codes, pairs, places, ready, empty, started, exchanged = shared
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    column = step * ring.shape[2]
    row = first_row(tile_m, M, BLOCK_M) + number
    tile = ring.index(stage)
    load_rows(x, row, column, ready.index(stage), tile if ROWS >= MAIN else tile.slice(0, ROWS), wanted)
    if MAIN < ROWS:
        row = row_in_tile(tile_m, MAIN, M, BLOCK_M)
        load_rows(rest_x, row, column, ready.index(stage), rest_ring.index(stage), wanted)


@gluon.jit
def _fill(
    x, rest_x, words, scale_pairs, stage, phase, tile_m, tile_n, number, expert, rows, first, last, shared, M, K,
    BLOCK_M: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Fills the ring with the steps from `first` to `last` of a tile, or of one of the tail."""
    ring, rest_ring, codes, pairs, places, ready, empty, started, exchanged = shared
    STAGES: gl.constexpr = ready.shape[0]
    for step in range(first, last):
        mbarrier.wait(empty.index(stage), phase)
        _tell_place(places, stage, tile_m, tile_n, expert, rows)
        mbarrier.expect(ready.index(stage), _stage_bytes(ring, codes, ROWS))
        fetch_weight(words, scale_pairs, codes, pairs, ready, stage, tile_n, step, first_piece_of(expert, K), True)
        _fetch_x(x, rest_x, stage, tile_m, number, step, shared, M, BLOCK_M, ROWS)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def producer(
    x, rest_x, words, scale_pairs, routing, shared, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    UNROLL: gl.constexpr, CUT: gl.constexpr, SHARES: gl.constexpr, TAIL: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Fills the ring, in the order in which the consumers take it."""
    tile_expert, tile_rows, tile_count = routing
    ring, rest_ring, codes, pairs, places, ready, empty, started, exchanged = shared
    M, N, K, whole = sizes
    STAGES: gl.constexpr = ready.shape[0]
    mbarrier.init(ready.index(0), count=1)
    fence_async_shared()
    mbarrier.arrive(started, count=1)
    tiles_m, tiles_n, whole = count_tiles(tile_count, M, N, whole, BLOCK_M, BLOCK_N)
    tile_groups = gl.cdiv(gl.cdiv(K, ring.shape[2]), UNROLL)
    begin, end, pieces = program_pieces(tiles_m * tiles_n, whole, tile_groups, CUT, SHARES)
    tile, first, last = piece_at(0, begin, end, whole, tile_groups, CUT)
    tile_m, tile_n = place(tile, tiles_m, tiles_n)
    expert, rows = 0, BLOCK_M
    if tile_expert is not None:
        expert = expert_of(tile_expert, tile_m, pieces > 0)
        rows = gl.load(tile_rows + tile_m, mask=pieces > 0, other=0)
    _tell_place(places, 0, tile_m, tile_n, expert, rows)
    # The weight, unlike x, does not depend on the kernels before this one.
    mbarrier.expect(ready.index(0), _stage_bytes(ring, codes, BLOCK_M), pred=pieces > 0)
    piece = first_piece_of(expert, K)
    fetch_weight(words, scale_pairs, codes, pairs, ready, 0, tile_n, first * UNROLL, piece, pieces > 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _fetch_x(x, rest_x, 0, tile_m, 0, first * UNROLL, shared, M, BLOCK_M, BLOCK_M, pieces > 0)
    mbarrier.wait(started, 0)
    stage, phase = advance(gl.to_tensor(0), gl.to_tensor(1), STAGES)
    for index in range(0, pieces):
        tile, first, last = piece_at(index, begin, end, whole, tile_groups, CUT)
        tile_m, tile_n = place(tile, tiles_m, tiles_n)
        if tile_expert is not None:
            expert, rows = gl.load(tile_expert + tile_m), gl.load(tile_rows + tile_m)
        # The very first step is on its way.
        begin_step = first * UNROLL + gl.where(index == 0, 1, 0)
        stage, phase = _fill(
            x, rest_x, words, scale_pairs, stage, phase, tile_m, tile_n, 0, expert, rows, begin_step, last * UNROLL,
            shared, M, K, BLOCK_M, BLOCK_M,
        )  # fmt: skip
    if TAIL:
        tile_m, tile_n, number, first, last = program_tail(tiles_m, tiles_n, whole, tile_groups, BLOCK_M, TAIL, SHARES)
        stage, phase = _fill(
            rest_x, rest_x, words, scale_pairs, stage, phase, tile_m, tile_n, number, 0, BLOCK_M, first * UNROLL,
            last * UNROLL, shared, M, K, BLOCK_M, TAIL,
        )  # fmt: skip
    leave(stage)


@gluon.jit
def _take_words(stage, phase, wanted, shared, PART: gl.constexpr, NT: gl.constexpr):
    """A consumer's part of the codes and scales in a stage of the ring, once they are there."""
    ring, rest_ring, codes, pairs, places, ready, empty, started, exchanged = shared
    mbarrier.wait(ready.index(stage), phase, pred=wanted)
    pairs = pairs.index(stage).slice(PART * NT, NT, dim=1)
    if ring.dtype.primitive_bitwidth == 8:
        return load_blocks(codes.index(stage).slice(PART * NT * 8, NT * 8, dim=1), pairs, 4)
    else:
        return load_words(codes.index(stage).slice(PART * NT, NT, dim=1), pairs, 4)


@gluon.jit
def decode(words, scale_pairs, table, FP8: gl.constexpr, FP16: gl.constexpr):
    """A step's part of the weight, `_take_words` of it, in the registers where wgmma reads it, each an int32: LLVM
    takes these apart where a loop has single values from one turn to the next."""
    return decode_words_fp8(words, scale_pairs, table) if FP8 else decode_words(words, scale_pairs, FP16)


@gluon.jit
def _operand(decoded, FP8: gl.constexpr, FP16: gl.constexpr, DEPTH: gl.constexpr, layout: gl.constexpr):
    """wgmma's operand of what `decode` returned."""
    if FP8:
        NT: gl.constexpr = decoded.shape[0] // DEPTH
        # piece, tile, row, block, word, row half, column
        values = split_bytes(decoded).reshape(DEPTH, NT, 8, 4, 4, 2, 4)
        values = values.permute(1, 5, 2, 0, 4, 3, 6).reshape(NT * 16, DEPTH * 64)
        return gl.convert_layout(values, layout, assert_trivial=True)
    else:
        return operand_of(decoded, FP16, DEPTH, layout)


@gluon.jit
def first_step(
    stage, phase, steps, wanted, shared, table, PART: gl.constexpr, NT: gl.constexpr, EARLY: gl.constexpr,
    FP16: gl.constexpr
):  # fmt: skip
    """What `multiply` needs of a program's first step, and how many of its `steps` are then left to load."""
    ring, rest_ring, codes, pairs, places, ready, empty, started, exchanged = shared
    words, scale_pairs = _take_words(stage, phase, wanted, shared, PART, NT)
    decoded = decode(words, scale_pairs, table, ring.dtype.primitive_bitwidth == 8, FP16)
    if EARLY:
        words, scale_pairs, steps = look_ahead(stage, phase, steps, shared, PART, NT)
    return decoded, words, scale_pairs, steps


@gluon.jit
def look_ahead(stage, phase, steps, shared, PART: gl.constexpr, NT: gl.constexpr):
    """The words of the step behind the decoded one in `stage`, and how many of its `steps` are then left to load."""
    ring, rest_ring, codes, pairs, places, ready, empty, started, exchanged = shared
    ahead, ahead_phase = advance(stage, phase, ready.shape[0])
    words, scale_pairs = _take_words(ahead, ahead_phase, steps > 0, shared, PART, NT)
    return words, scale_pairs, steps - 1


@gluon.jit
def await_products(acc, rest, PENDING: gl.constexpr, REST: gl.constexpr):
    """acc and, if it is another, `rest` when no more than PENDING steps are on their way."""
    if REST:
        acc, rest = warpgroup_mma_wait(2 * PENDING, deps=[acc, rest])
    else:
        acc = warpgroup_mma_wait(PENDING, deps=[acc])
    return acc, rest


@gluon.jit
def multiply(
    acc, rest, decoded, words, scale_pairs, table, stage, phase, steps, groups, shared, REST: gl.constexpr,
    UNROLL: gl.constexpr, APART: gl.constexpr, PART: gl.constexpr, QUEUED: gl.constexpr, EARLY: gl.constexpr,
    FP16: gl.constexpr
):  # fmt: skip
    """acc [rows of the weight, rows of x], and `rest` if it is another, plus the product of as many groups of steps as
    there are, the last of them perhaps still on its way, and what the next step needs. The last step's stage is the
    caller's to free.

    Whether a product is queued behind one before that is waited for, QUEUED says, and EARLY, whether the words of a
    step come to registers before the step before is decoded: then `decoded` is of this step and `words` are of the next
    one.
    """
    ring, rest_ring, codes, pairs, places, ready, empty, started, exchanged = shared
    ROWS: gl.constexpr = acc.shape[1]
    STAGES: gl.constexpr = ready.shape[0]
    DEPTH: gl.constexpr = codes.shape[1]
    NT: gl.constexpr = acc.shape[0] // 16
    FP8: gl.constexpr = ring.dtype.primitive_bitwidth == 8
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4 if FP8 else 2)
    # E4M3 takes longest to decode, and much of that is waiting: for the stage, for words and scales, and then for what
    # the table has of them. With products queued, words are asked for before this step's product, not behind it; with
    # two accumulators that took longer, compared by hand.
    FIRST: gl.constexpr = QUEUED and FP8 and not REST
    LAST: gl.constexpr = UNROLL // APART - 1
    # A loop that may have no turn would cost copies of acc, with products in flight: there is always one.
    for turn in range(0, gl.maximum(groups, 1)):
        for i in gl.static_range(UNROLL // APART):
            own = stage
            stage, phase = advance(stage, phase, STAGES, APART)
            if FIRST:
                words, scale_pairs = _take_words(stage, phase, steps > 0, shared, PART, NT)
            tile = ring.index(own)
            if tile.shape[0] > ROWS:
                tile = tile.slice(0, ROWS)
            operand = _operand(decoded, FP8, FP16, DEPTH, layout)
            acc = warpgroup_mma(operand, tile.permute((1, 0)), acc, is_async=True)
            if REST:
                rest = multiply_rest(operand, rest_ring.index(own), rest)
            if QUEUED:
                acc, rest = await_products(acc, rest, 1, REST)
                mbarrier.arrive(empty.index(behind(own, STAGES)), count=1, pred=turn > 0 if i == 0 else True)
            ahead, ahead_phase = stage, phase
            if EARLY:
                decoded = decode(words, scale_pairs, table, FP8, FP16)
                ahead, ahead_phase = advance(stage, phase, STAGES)
            if STAGES % APART:
                # A stage is both consumers' in turn, and a barrier tells a turn only from the next: one that is not
                # filled yet for the other would seem to be filled for this one. So it waits for the other's steps, too.
                # As many stages as a multiple, as in `nvfp4_wgmma_split`, would be four for five: less on its way.
                before = gl.where(stage == 0, phase ^ 1, phase)
                mbarrier.wait(ready.index(behind(stage, STAGES)), before, pred=steps > 0)
            if not FIRST:
                words, scale_pairs = _take_words(ahead, ahead_phase, steps > 0, shared, PART, NT)
            if not EARLY:
                decoded = decode(words, scale_pairs, table, FP8, FP16)
            steps -= 1
            if not QUEUED:
                acc, rest = await_products(acc, rest, 0, REST)
                mbarrier.arrive(empty.index(own), count=APART, pred=turn < groups - 1 if i == LAST else True)
    return acc, rest, decoded, words, scale_pairs, stage, phase, steps
