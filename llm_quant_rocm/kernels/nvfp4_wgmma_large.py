# SPDX-License-Identifier: Apache-2.0
"""Matrix product of more than a few rows of 16-bit activations and NVFP4 weights on Hopper, its warps specialized.

As in `nvfp4_wgmma`, out^T = W . x^T, and a weight goes through registers, where its codes are decoded, into the matrix
units. Here a multiprocessor has one program all the time. Four warps each, two consumers multiply one half of a tile's
rows of the weight with the same rows of x; a producer, one warp, has the tensor memory accelerator fill a ring of
codes, scales and x. The consumers do not wait for each other, and each has a step queued while it decodes the next, so
that the matrix units run meanwhile. Where every tile is one program's, the accelerator stores it from shared memory,
while the next one is multiplied. Of a tile with 64 rows of the weight, what one wgmma takes, each consumer multiplies
every second step, and then they exchange sums.

How the product is cut, and which tiles or parts of some are a program's, `nvfp4_wgmma_large_tiles` says.

Of routed experts, each tile of rows has its own expert's weight. How many tiles there are, programs read on the GPU.

x may be E4M3 with a scale a row. The weight then becomes E4M3 too, for twice the rate of the matrix units. They add
FP8 products with the 14 bits or so that they have for them, as torch._scaled_mm(use_fast_accum=True) has them do.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm_quant_rocm.formats.nvfp4_wgmma import COLUMNS, ROWS
from llm_quant_rocm.hardware import Hardware, multiprocessors
from llm_quant_rocm.kernels.decode_hopper import (
    UNSCALE,
    UNSCALE_FP8,
    declare_fp8_table,
    decode_words_fp8,
    fill_fp8_table,
    split_bytes,
)
from llm_quant_rocm.kernels.flags import flags_of
from llm_quant_rocm.kernels.hopper import (
    acc_layout_of,
    advance,
    allocate_ring,
    behind,
    cta_barrier,
    first_row,
    init_ring,
    leave,
    load_rows,
    main_part,
    main_rows,
    multiply_rest,
    packed_descriptors,
    place,
    reinterpret,
    row_descriptor,
    row_in_tile,
    store_through,
    tile_and_rest,
    tile_descriptor,
)
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.nvfp4_wgmma import (
    DENSE,
    Routed,
    ask_for_scales,
    decode_operand,
    epilogue,
    expert_of,
    fetch_weight,
    first_piece_of,
    gated,
    lines_of_16_bytes,
    load_scales,
    load_words,
)
from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import (
    STEP_BYTES,
    UNROLL,
    Config,
    count_tiles,
    groups_of,
    piece_at,
    program_pieces,
    program_tail,
    shares_of,
    tail_of,
    whole_tiles,
)
from llm_quant_rocm.kernels.pdl import pdl_option
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2
from llm_quant_rocm.kernels.wgmma_parts import (
    add_part,
    columns_of,
    give_part,
    load_shared_part,
    share_part,
    store_part,
    take_parts,
)

RING_BYTES = 220 * 1024
# What of a result a consumer has the accelerator store at once: rows, fewer of tiles of 64, and columns. And how many
# of these may be on their way.
STORE = (64, 64)
STORES = 2
# Registers of a consumer's threads. The four warps of the producer have what is left of 504.
REGISTERS = 240
# Not Triton's own: SGLang puts a function of the host in its place.
_power_of_2 = gluon.constexpr_function(next_power_of_2)


@gluon.constexpr_function
def _stage_bytes(ring, codes, rows):
    """Bytes that fill a stage with so many rows of x."""
    values = codes.shape[1] * codes.shape[2] * codes.shape[3] * 8
    return rows * ring.shape[2] * ring.dtype.primitive_bitwidth // 8 + values * 9 // 16


@gluon.jit
def _init(shared, BLOCK_N: gl.constexpr):
    """Initializes all barriers but that of the first stage, which the producer does, in a warp of its own: they take
    about as long as memory does to answer."""
    ring, rest_ring, codes, pairs, ready, empty, started, exchanged = shared
    if BLOCK_N == 64:
        for i in gl.static_range(2):
            mbarrier.init(exchanged.index(i), count=2)
    init_ring(ready, empty, started, 2, 1)
    leave(0)


@gluon.jit
def _fetch_x(x, stage, tile_m, number, step, shared, M, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, wanted=True):
    """Has the accelerator fill a stage with ROWS rows of x, from row `number` of a tile on: all of the tile's, or as
    many as one of the tail has."""
    ring, rest_ring, codes, pairs, ready, empty, started, exchanged = shared
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    column = step * ring.shape[2]
    row = first_row(tile_m, M, BLOCK_M) + number
    tile = ring.index(stage)
    load_rows(x, row, column, ready.index(stage), tile if ROWS >= MAIN else tile.slice(0, ROWS), wanted)
    if MAIN < ROWS:
        row = row_in_tile(tile_m, MAIN, M, BLOCK_M)
        load_rows(x, row, column, ready.index(stage), rest_ring.index(stage), wanted)


@gluon.jit
def _fill(
    x, words, scale_pairs, stage, phase, tile_m, tile_n, number, first, last, first_piece, shared, M,
    BLOCK_M: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Fills the ring with the steps from `first` to `last` of a tile, or of one of the tail."""
    ring, rest_ring, codes, pairs, ready, empty, started, exchanged = shared
    STAGES: gl.constexpr = ready.shape[0]
    for step in range(first, last):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready.index(stage), _stage_bytes(ring, codes, ROWS))
        fetch_weight(words, scale_pairs, codes, pairs, ready, stage, tile_n, step, first_piece, True)
        _fetch_x(x, stage, tile_m, number, step, shared, M, BLOCK_M, ROWS)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _producer(
    x, tail_x, words, scale_pairs, routing, shared, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    UNROLL: gl.constexpr, CUT: gl.constexpr, SHARES: gl.constexpr, TAIL: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Fills the ring, in the order in which the consumers take it."""
    tile_expert, tile_rows, tile_count = routing
    ring, rest_ring, codes, pairs, ready, empty, started, exchanged = shared
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
    first_piece = 0
    if tile_expert is not None:
        first_piece = first_piece_of(expert_of(tile_expert, tile_m, pieces > 0), K)
    # The weight, unlike x, does not depend on the kernels before this one.
    mbarrier.expect(ready.index(0), _stage_bytes(ring, codes, BLOCK_M), pred=pieces > 0)
    fetch_weight(words, scale_pairs, codes, pairs, ready, 0, tile_n, first * UNROLL, first_piece, pieces > 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _fetch_x(x, 0, tile_m, 0, first * UNROLL, shared, M, BLOCK_M, BLOCK_M, pieces > 0)
    mbarrier.wait(started, 0)
    stage, phase = advance(gl.to_tensor(0), gl.to_tensor(1), STAGES)
    for index in range(0, pieces):
        tile, first, last = piece_at(index, begin, end, whole, tile_groups, CUT)
        tile_m, tile_n = place(tile, tiles_m, tiles_n)
        if tile_expert is not None:
            first_piece = first_piece_of(gl.load(tile_expert + tile_m), K)
        # The very first step is on its way.
        begin_step = first * UNROLL + gl.where(index == 0, 1, 0)
        stage, phase = _fill(
            x, words, scale_pairs, stage, phase, tile_m, tile_n, 0, begin_step, last * UNROLL, first_piece, shared, M,
            BLOCK_M, BLOCK_M,
        )  # fmt: skip
    if TAIL:
        tile_m, tile_n, number, wanted = program_tail(tiles_m, tiles_n, whole, BLOCK_M, TAIL)
        steps = gl.where(wanted, tile_groups * UNROLL, 0)
        stage, phase = _fill(
            tail_x, words, scale_pairs, stage, phase, tile_m, tile_n, number, 0, steps, 0, shared, M, BLOCK_M, TAIL,
        )  # fmt: skip
    leave(stage)


@gluon.jit
def _await_parts(arrived, SHARES: gl.constexpr):
    """Tells the SHARES programs of a tile that this one's part is there, and waits for theirs. `arrived` and the number
    after it count, and are zeros again when all have gone on."""
    cta_barrier()
    gl.atomic_add(arrived, 1, sem="release", scope="gpu")
    while gl.atomic_add(arrived, 0, sem="acquire", scope="gpu") < SHARES:
        pass
    if gl.atomic_add(arrived + 1, 1, sem="acq_rel", scope="gpu") == SHARES - 1:
        gl.store(arrived, 0)
        gl.store(arrived + 1, 0)


@gluon.jit
def _load(codes, pairs, stage, HALF: gl.constexpr, NT: gl.constexpr):
    """A consumer's half of the codes and scales in a stage of the ring."""
    return load_words(codes.index(stage).slice(HALF * NT, NT, dim=1), pairs.index(stage).slice(HALF * NT, NT, dim=1), 4)


@gluon.jit
def _operand(
    words, scale_pairs, table, DEPTH: gl.constexpr, FP8: gl.constexpr, FP16: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """A step's part of the weight, `load_words` of it, in the registers where wgmma reads it."""
    if FP8:
        NT: gl.constexpr = words.shape[0] // DEPTH
        # piece, tile, row, lane % 4, step, row half, column
        values = split_bytes(decode_words_fp8(words, scale_pairs, table)).reshape(DEPTH, NT, 8, 4, 4, 2, 4)
        values = values.permute(1, 5, 2, 0, 4, 3, 6).reshape(NT * 16, DEPTH * 64)
        return gl.convert_layout(values, layout, assert_trivial=True)
    else:
        return decode_operand(words, scale_pairs, FP16, DEPTH, layout)


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
def _load_row_scales(scale, tile_m, number, M, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, SLICE: gl.constexpr):
    """Scales, of `scale` [M], of ROWS rows of x from `number` on of a tile: [ROWS / SLICE, SLICE]."""
    layout: gl.constexpr = gl.BlockedLayout([ROWS // SLICE, 1], [1, 32], [1, 4], [1, 0])
    first = gl.arange(0, ROWS // SLICE, layout=gl.SliceLayout(1, layout)) * SLICE
    rest = gl.arange(0, SLICE, layout=gl.SliceLayout(0, layout))
    row = row_in_tile(tile_m, number + first[:, None] + rest[None, :], M, BLOCK_M)
    return gl.load(scale + row, mask=row < M, other=0.0)


@gluon.jit
def _store_slice(acc, row, column, out, staging, HALF: gl.constexpr, TURN: gl.constexpr):
    """Has the accelerator store a consumer's slice number TURN of a tile, with its corner at [row, column]."""
    STORES: gl.constexpr = staging.shape[0] // 2
    own = staging.index(HALF * STORES + TURN % STORES)
    # Until there is room. The tile before may have ended with any of the consumer's.
    if TURN == 0:
        tma.store_wait(0)
    elif TURN >= STORES:
        tma.store_wait(STORES - 1)
    store_through(own, acc.to(out.dtype).permute((1, 0)), out, [row, column])


@gluon.jit
def _store_box(
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
        acc *= gl.convert_layout(row_scales.reshape(SLICE), gl.SliceLayout(0, layout))[None, :]
    acc *= gl.convert_layout(scales * UNSCALE, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
    if bias is not None:
        columns = column + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        acc += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[:, None]
    if ACTIVATION is not None:
        _store_slice(gated(acc, out.dtype, ACTIVATION), row, column // 2, out, staging, HALF, TURN)
    elif ROWS > WIDTH:
        upper, lower = acc.reshape(2, WIDTH, SLICE).permute(1, 2, 0).split()
        upper = gl.convert_layout(upper, layout, assert_trivial=True)
        lower = gl.convert_layout(lower, layout, assert_trivial=True)
        _store_slice(upper, row, column, out, staging, HALF, TURN)
        _store_slice(lower, row, column + WIDTH, out, staging, HALF, TURN + 1)
    else:
        _store_slice(acc, row, column, out, staging, HALF, TURN)


@gluon.jit
def _store(
    acc, scales, row_scales, number, rows, column, tile_m, result, HALF: gl.constexpr, BLOCK_M: gl.constexpr,
    UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr, TURN: gl.constexpr
):  # fmt: skip
    """The epilogue of acc [ROWS, columns], rows of x from `number` on of a tile and columns of the result from `column`
    on: the accelerator stores it, while the next tile is multiplied. Its first slice is number TURN of the tile. Of
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
            low, high = row_scales.reshape(2, SLICES, SLICE).permute(1, 2, 0).split()
        _store(left, scales, low, number, rows, column, tile_m, result, HALF, BLOCK_M, UNSCALE, ACTIVATION, TURN)
        number += COLUMNS // 2
        _store(
            right, scales, high, number, rows, column, tile_m, result, HALF, BLOCK_M, UNSCALE, ACTIVATION, TURN + TURNS
        )  # fmt: skip
    else:
        row = row_in_tile(tile_m, number, M, BLOCK_M)
        if tile_rows is None:  # noqa: SIM114  # constants decide what is compiled
            _store_box(acc, scales, row_scales, row, column, result, HALF, UNSCALE, ACTIVATION, TURN)
        elif number < rows:
            _store_box(acc, scales, row_scales, row, column, result, HALF, UNSCALE, ACTIVATION, TURN)


@gluon.jit
def _exchange(acc, staging, exchanged, HALF: gl.constexpr, TURN: gl.constexpr):
    """The sum of both consumers' acc [64, columns] in slice number TURN of this one's half of the columns. TURN is even
    at every second call."""
    SLICE: gl.constexpr = staging.shape[1]
    SLICES: gl.constexpr = acc.shape[1] // SLICE
    layout: gl.constexpr = acc_layout_of(SLICE)
    # Where a consumer's results wait to be stored there is room for as much in fp32.
    sums = reinterpret(staging, gl.float32, [2, SLICE // 8, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    tma.store_wait(0)
    cta_barrier()
    share_part(columns_of(acc, SLICE, (1 - HALF) * (SLICES // 2) + TURN, layout), sums.index(HALF))
    cta_barrier()
    mbarrier.arrive(exchanged.index(0), count=1)
    mbarrier.wait(exchanged.index(0), TURN % 2)
    theirs = load_shared_part(sums.index(1 - HALF), layout)
    cta_barrier()
    mbarrier.arrive(exchanged.index(1), count=1)
    mbarrier.wait(exchanged.index(1), TURN % 2)
    return columns_of(acc, SLICE, HALF * (SLICES // 2) + TURN, layout) + theirs


@gluon.jit
def _store_sums(
    acc, scales, row_scales, column, tile_m, result, exchanged, HALF: gl.constexpr, UNSCALE: gl.constexpr
):  # fmt: skip
    """The epilogue of half of a tile's rows of x, the sums of both consumers' acc [64, BLOCK_M]."""
    bias, out, staging, M, N, tile_rows = result
    BLOCK_M: gl.constexpr = acc.shape[1]
    SLICE: gl.constexpr = staging.shape[1]
    low, high = row_scales, row_scales
    if row_scales is not None:
        low, high = row_scales.reshape(2, 1, SLICE).permute(1, 2, 0).split()
    for i in gl.static_range(2):
        total = _exchange(acc, staging, exchanged, HALF, i)
        number = (HALF * 2 + i) * SLICE
        own_scales = low if i == 0 else high
        _store(total, scales, own_scales, number, BLOCK_M, column, tile_m, result, HALF, BLOCK_M, UNSCALE, None, 0)


@gluon.jit
def _multiply(
    acc, rest, operand, words, scale_pairs, table, stage, phase, steps, groups, shared, ROWS: gl.constexpr,
    REST: gl.constexpr, UNROLL: gl.constexpr, APART: gl.constexpr, PART: gl.constexpr, EARLY: gl.constexpr,
    FP16: gl.constexpr
):  # fmt: skip
    """acc [rows of the weight, ROWS], and `rest` if it is another, plus the product of as many groups of steps as there
    are, the last of them perhaps still on its way, and what the next step needs."""
    ring, rest_ring, codes, pairs, ready, empty, started, exchanged = shared
    STAGES: gl.constexpr = ready.shape[0]
    DEPTH: gl.constexpr = codes.shape[1]
    NT: gl.constexpr = acc.shape[0] // 16
    FP8: gl.constexpr = ring.dtype.primitive_bitwidth == 8
    operand_layout: gl.constexpr = operand.type.layout
    # A loop that may have no turn would cost copies of acc, with products in flight: there is always one.
    for turn in range(0, gl.maximum(groups, 1)):
        for i in gl.static_range(UNROLL // APART):
            tile = ring.index(stage)
            if tile.shape[0] > ROWS:
                tile = tile.slice(0, ROWS)
            acc = warpgroup_mma(operand, tile.permute((1, 0)), acc, is_async=True)
            # Then the step before is finished, and its stage free.
            if REST:
                rest = multiply_rest(operand, rest_ring.index(stage), rest)
                acc, rest = warpgroup_mma_wait(2, deps=[acc, rest])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            free = behind(stage, STAGES, APART)
            mbarrier.arrive(empty.index(free), count=APART, pred=turn > 0 if i == 0 else True)
            stage, phase = advance(stage, phase, STAGES, APART)
            if EARLY:
                operand = _operand(words, scale_pairs, table, DEPTH, FP8, FP16, operand_layout)
            ahead, ahead_phase = stage, phase
            if EARLY:
                ahead, ahead_phase = advance(stage, phase, STAGES)
            mbarrier.wait(ready.index(ahead), ahead_phase, pred=steps > 0)
            words, scale_pairs = _load(codes, pairs, ahead, PART, NT)
            if not EARLY:
                operand = _operand(words, scale_pairs, table, DEPTH, FP8, FP16, operand_layout)
            steps -= 1
    return acc, rest, operand, words, scale_pairs, stage, phase, steps


@gluon.jit
def _compute_tail(
    operand, stage, phase, steps, tile_m, tile_n, number, groups, operands, shared, M, N, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, TAIL: gl.constexpr, UNROLL: gl.constexpr, FP16: gl.constexpr, UNSCALE: gl.constexpr
):  # fmt: skip
    """A consumer's half of the program's tile of the tail, from its product to its result."""
    row_scale, global_scale, bias, out, staging, parts, flags = operands
    ring, rest_ring, codes, pairs, ready, empty, started, exchanged = shared
    ROWS: gl.constexpr = operand.shape[0]
    layout: gl.constexpr = acc_layout_of(TAIL)
    acc = gl.zeros((ROWS, TAIL), gl.float32, layout=layout)
    operand = gl.convert_layout(operand, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    ahead, ahead_phase = advance(stage, phase, ready.shape[0])
    mbarrier.wait(ready.index(ahead), ahead_phase, pred=steps > 0)
    words, scale_pairs = _load(codes, pairs, ahead, HALF, ROWS // 16)
    acc = _multiply(
        acc, 0, operand, words, scale_pairs, 0, stage, phase, steps - 1, groups, shared, TAIL, 0, UNROLL, 1, HALF, True,
        FP16,
    )[0]  # fmt: skip
    column = (tile_n * 2 + HALF) * ROWS
    scales = load_scales(global_scale, column, N, layout, ROWS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    result = (bias, out, staging, M, N, None)
    _store(acc, scales, None, number, BLOCK_M, column, tile_m, result, HALF, BLOCK_M, UNSCALE, None, 0)


@gluon.jit
def _consumer(
    HALF: gl.constexpr, operands, routing, shared, table, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STORES: gl.constexpr, UNROLL: gl.constexpr, SHARES: gl.constexpr, TAIL: gl.constexpr, FP16: gl.constexpr,
    UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """Multiplies half of each tile's rows of the weight, the lower (0) or the upper ones (1), with its rows of x; or 64
    of them in every second step, and then has half of the rows of x."""
    row_scale, global_scale, bias, out, staging, parts, flags = operands
    tile_expert, tile_rows, tile_count = routing
    ring, rest_ring, codes, pairs, ready, empty, started, exchanged = shared
    M, N, K, whole = sizes
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    REST: gl.constexpr = BLOCK_M - MAIN
    # Steps from one of this consumer to its next, and the number of consumers that add them.
    APART: gl.constexpr = 2 if BLOCK_N == 64 else 1
    ROWS: gl.constexpr = BLOCK_N * APART // 2
    PART: gl.constexpr = HALF if APART == 1 else 0
    NT: gl.constexpr = ROWS // 16
    STAGES: gl.constexpr = ready.shape[0]
    DEPTH: gl.constexpr = codes.shape[1]
    dtype: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    FP8: gl.constexpr = ring.dtype.primitive_bitwidth == 8
    CUT: gl.constexpr = parts is not None
    acc_layout: gl.constexpr = acc_layout_of(MAIN, FP8)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4 if FP8 else 2)
    # Whether a step's codes come to registers before the step before is decoded. A wgmma holds its warps until it has
    # read its operand: with few rows decoding is what takes the time. With many it is the matrix units, and the first
    # product should not wait for a second step.
    EARLY: gl.constexpr = BLOCK_M <= 128
    # Scales are asked for before the epilogue, which would wait for them: of a dense weight when a tile begins, of
    # experts, whose number comes from memory first, while the last step is multiplied. With 320 rows there are no
    # registers for them then, nor for where the tile is.
    EARLY_SCALES: gl.constexpr = BLOCK_M <= 256

    program = gl.program_id(0)
    tiles_m, tiles_n, whole = count_tiles(tile_count, M, N, whole, BLOCK_M, BLOCK_N)
    tiles = tiles_m * tiles_n
    tile_groups = gl.cdiv(gl.cdiv(K, DEPTH * 64), UNROLL)
    begin, end, pieces = program_pieces(tiles, whole, tile_groups, CUT, SHARES)

    # Steps beyond K, and rows beyond the stored ones, are zeros: the accelerator reads them so.
    stage = HALF if APART == 2 else 0
    phase = 0
    groups = gl.cdiv(whole - program, gl.num_programs(0)) * tile_groups + end - begin
    if TAIL:
        tail_m, tail_n, number, in_tail = program_tail(tiles_m, tiles_n, whole, BLOCK_M, TAIL)
        groups += gl.where(in_tail, tile_groups, 0)
    steps = groups * (UNROLL // APART) - 1
    if FP8:
        fill_fp8_table(table)
        cta_barrier()
    mbarrier.wait(started, 0)
    mbarrier.wait(ready.index(stage), 0, pred=pieces > 0)
    words, scale_pairs = _load(codes, pairs, stage, PART, NT)
    operand = _operand(words, scale_pairs, table, DEPTH, FP8, FP16, operand_layout)
    if EARLY:
        ahead, ahead_phase = advance(stage, phase, STAGES)
        mbarrier.wait(ready.index(ahead), ahead_phase, pred=steps > 0)
        words, scale_pairs = _load(codes, pairs, ahead, PART, NT)
        steps -= 1
    for index in range(0, pieces):
        tile, first, last = piece_at(index, begin, end, whole, tile_groups, CUT)
        tile_m, tile_n = place(tile, tiles_m, tiles_n)
        scale, rows = global_scale, BLOCK_M
        if tile_expert is not None:
            scale += gl.load(tile_expert + tile_m) * N
            rows = gl.load(tile_rows + tile_m)
        first_column = tile_n * BLOCK_N + PART * ROWS
        if EARLY_SCALES:
            if tile_expert is None:
                scales = load_scales(scale, first_column, N, acc_layout, ROWS)
            elif HALF == 0:
                ask_for_scales(scale, 0, tile_n, N, BLOCK_N, True)
        acc = gl.zeros((ROWS, MAIN), gl.float32, layout=acc_layout)
        rest = 0  # not used
        if REST:
            rest = gl.zeros((ROWS, REST), gl.float32, layout=acc_layout_of(REST, FP8))
        acc, rest, operand, words, scale_pairs, stage, phase, steps = _multiply(
            acc, rest, operand, words, scale_pairs, table, stage, phase, steps, last - first, shared, MAIN, REST,
            UNROLL, APART, PART, EARLY, FP16,
        )  # fmt: skip
        if EARLY_SCALES and tile_expert is not None:
            scales = load_scales(scale, first_column, N, acc_layout, ROWS)
        # Those of x, too, whose are so many that only what is stored slice by slice has registers for them.
        row_scales, rest_scales = row_scale, row_scale  # None, where rows have none
        if STORES and row_scale is not None:
            SLICE_ROWS: gl.constexpr = staging.shape[1]
            # Of consumers that exchange sums each stores half of the rows.
            OWN: gl.constexpr = MAIN // APART
            FIRST: gl.constexpr = HALF * OWN if APART == 2 else 0
            row_scales = _load_row_scales(row_scale, tile_m, FIRST, M, BLOCK_M, OWN, SLICE_ROWS)
            if REST:
                rest_scales = _load_row_scales(row_scale, tile_m, MAIN, M, BLOCK_M, REST, SLICE_ROWS)
        if REST:
            acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        if not EARLY_SCALES:
            tile_m, tile_n = place(tile, tiles_m, tiles_n)
            first_column = tile_n * BLOCK_N + PART * ROWS
            scales = load_scales(scale, first_column, N, acc_layout, ROWS)
        mbarrier.arrive(empty.index(behind(stage, STAGES, APART)), count=APART)

        is_whole = last - first == tile_groups
        if SHARES:
            if not is_whole:
                # Each program adds and stores every SHARES-th slice of the tile's rows.
                SLICE: gl.constexpr = 32 if REST else BLOCK_M // _power_of_2(SHARES)
                slice_layout: gl.constexpr = acc_layout_of(SLICE, FP8)
                own = parts + (program * 2 + HALF).to(gl.int64) * (ROWS * BLOCK_M)
                store_part(acc, own)
                if REST:
                    store_part(rest, own + ROWS * MAIN)
                cut_tile = tile - whole
                _await_parts(flags + (cut_tile * 2 + HALF) * 2, SHARES)
                for i in range(program % SHARES, BLOCK_M // SLICE, SHARES):
                    total = gl.zeros((ROWS, SLICE), gl.float32, layout=slice_layout)
                    for share in gl.static_range(SHARES):
                        source = (((cut_tile * SHARES + share) * 2 + HALF).to(gl.int64) * BLOCK_M + i * SLICE) * ROWS
                        total = add_part(total, parts + source, slice_layout)
                    row = row_in_tile(tile_m, i * SLICE, M, BLOCK_M)
                    if FP8:
                        total = _times_columns(total, row_scale, row, M)
                    epilogue(
                        total, scales, row, tile_m * BLOCK_M, tile_n * 2 + HALF, bias, out, None, None, M, N,
                        SLICE, ROWS, dtype, UNSCALE, None, slice_layout, 4,
                    )  # fmt: skip
        elif CUT:
            if first > 0:
                give_part(acc, parts, flags, HALF, 2)
            elif last < tile_groups:
                cut_groups = (tiles - whole) * tile_groups
                acc = take_parts(acc, parts, flags, cut_groups, (tile - whole + 1) * tile_groups, acc_layout, HALF, 2)
        if STORES:
            # Rows that are in two tiles, or twice in one, are stored twice, with the same bits.
            result = (bias, out, staging, M, N, tile_rows)
            if APART == 2:
                _store_sums(acc, scales, row_scales, first_column, tile_m, result, exchanged, HALF, UNSCALE)
            else:
                _store(
                    acc, scales, row_scales, 0, rows, first_column, tile_m, result, HALF, BLOCK_M, UNSCALE, ACTIVATION,
                    0,
                )  # fmt: skip
            if REST:
                TURN: gl.constexpr = MAIN // staging.shape[1]
                _store(
                    rest, scales, rest_scales, MAIN, rows, first_column, tile_m, result, HALF, BLOCK_M, UNSCALE,
                    ACTIVATION, TURN,
                )  # fmt: skip
        elif is_whole if SHARES else first == 0:
            half_layout: gl.constexpr = acc_layout_of(MAIN // 2, FP8)
            for half in gl.static_range(2):
                part = columns_of(acc, MAIN // 2, half, half_layout)
                row = row_in_tile(tile_m, half * (MAIN // 2), M, BLOCK_M)
                if FP8:
                    part = _times_columns(part, row_scale, row, M)
                epilogue(
                    part, scales, row, tile_m * BLOCK_M, tile_n * 2 + HALF, bias, out, None, None, M, N,
                    MAIN // 2, ROWS, dtype, UNSCALE, None, half_layout, 4,
                )  # fmt: skip
            if REST:
                row = row_in_tile(tile_m, MAIN, M, BLOCK_M)
                if FP8:
                    rest = _times_columns(rest, row_scale, row, M)
                epilogue(
                    rest, scales, row, tile_m * BLOCK_M, tile_n * 2 + HALF, bias, out, None, None, M, N,
                    REST, ROWS, dtype, UNSCALE, None, acc_layout_of(REST, FP8), 4,
                )  # fmt: skip
    if TAIL:  # noqa: SIM102  # constants decide what is compiled
        if in_tail:
            _compute_tail(
                operand, stage, phase, steps, tail_m, tail_n, number, tile_groups, operands, shared, M, N, HALF,
                BLOCK_M, TAIL, UNROLL, FP16, UNSCALE,
            )  # fmt: skip
    if STORES:
        tma.store_wait(0)
    leave(stage)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M", "whole"])
def nvfp4_wgmma_large_kernel(
    x, tail_x, row_scale, words, scale_pairs, global_scale, bias, out, parts, flags, tile_expert, tile_rows, tile_count,
    M, N, K, whole,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, STORES: gl.constexpr,
    UNROLL: gl.constexpr, SHARES: gl.constexpr, TAIL: gl.constexpr, REGISTERS: gl.constexpr, FP16: gl.constexpr,
    UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """A program's share of the tiles of out, one of as many programs as run together.

    x (`row_descriptor`), words and scale_pairs are descriptors of [M, K], [pieces of K, row tiles, 128] and [pieces of
    K, row tiles, 32]; x is of 16-bit values or of E4M3 in the order of columns that `decode_words_fp8` names.
    `row_scale` fp32 [M], if given, are factors of its rows: the scales of E4M3, the router's weights of experts.
    N is the number of rows of the weight that are stored; the packed weight has them padded. The first `whole` tiles
    are not cut, and with TAIL the others are of so many rows of x, of which `tail_x` is a descriptor. `parts` fp32
    [programs, BLOCK_N, BLOCK_M] has room for a part of each program, and `flags`, two zeros for each, say which are
    there. With SHARES as many programs compute each tile. With STORES, where no tile is cut, out is a descriptor, and
    so many boxes of it each consumer may have waiting in shared memory to be stored. The rest is that of
    `nvfp4_wgmma_kernel`; with `tile_expert` no tile is cut, and there is no tail.
    """
    ring_layout: gl.constexpr = gl.NVMMASharedLayout(128, x.dtype.primitive_bitwidth, 2)
    ring, rest_ring = allocate_ring(x.dtype, ring_layout, STAGES, BLOCK_M, DEPTH * 64)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, DEPTH, BLOCK_N // 16, 128], words.layout)
    pairs = gl.allocate_shared_memory(gl.uint16, [STAGES, DEPTH, BLOCK_N // 16, 32], scale_pairs.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Whether all of these are initialized, by two warps.
    started = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    exchanged = ready  # not used
    if BLOCK_N == 64:
        exchanged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(started, count=2)
    if STORES:  # noqa: SIM108  # constants decide what is compiled
        staging = gl.allocate_shared_memory(out.dtype, [2 * STORES] + out.block_shape, out.layout)
    else:
        staging = ring  # not used
    table = 0  # not used
    if x.dtype.primitive_bitwidth == 8:
        table = declare_fp8_table(M)
    operands = (row_scale, global_scale, bias, out, staging, parts, flags)
    routing = (tile_expert, tile_rows, tile_count)
    shared = (ring, rest_ring, codes, pairs, ready, empty, started, exchanged)
    sizes = (M, N, K, whole)
    # The last one is the rest of the producer's four warps.
    gl.warp_specialize(
        [
            (_consumer, (
                gl.constexpr(0), operands, routing, shared, table, sizes, BLOCK_M, BLOCK_N, STORES, UNROLL, SHARES,
                TAIL, FP16, UNSCALE, ACTIVATION,
            )),
            (_consumer, (
                gl.constexpr(1), operands, routing, shared, table, sizes, BLOCK_M, BLOCK_N, STORES, UNROLL, SHARES,
                TAIL, FP16, UNSCALE, ACTIVATION,
            )),
            (_producer, (
                x, tail_x, words, scale_pairs, routing, shared, sizes, BLOCK_M, BLOCK_N, UNROLL,
                gl.constexpr(parts is not None), SHARES, TAIL, PDL,
            )),
            (_init, (shared, BLOCK_N)),
            (leave, (M,)),
        ],
        [4, 1, 1, 2],
        [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


def gemm_large(
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
    """`nvfp4_wgmma.gemm` by this kernel."""
    x = lines_of_16_bytes(x)
    return _launch(x, routed.row_weight, words, scale_bytes, global_scale, bias, n, hardware, config, routed, out)


def gemm_large_fp8(
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    hardware: Hardware,
    config: Config,
) -> torch.Tensor:
    """The product with x in E4M3, `codes` and `x_scale` of `per_token_quant_fp8(interleave=True)`, in `out` [M, n]
    (bf16 or fp16, contiguous). The weight, on its way to the matrix unit, becomes what `formats.nvfp4.to_fp8` makes of
    it."""
    return _launch(codes, x_scale, words, scale_bytes, global_scale, bias, out.shape[1], hardware, config, DENSE, out)


def _launch(
    x: torch.Tensor,
    row_scale: torch.Tensor | None,
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
    m, k = x.shape
    if out is None:
        out = routed.result(x, n)
    block_k = STEP_BYTES // x.element_size()
    block_m, rest = tile_and_rest(config.block_m, m)
    # Of tiles with 64 rows of the weight only the accelerator stores results.
    block_n = config.block_n if n % 8 == 0 else max(config.block_n, 128)
    # No more than run together: one waits for what another adds.
    programs = multiprocessors(x.device)
    tiles = cdiv(m, block_m) * cdiv(n, block_n)
    groups = groups_of(k, block_k)
    shares = shares_of(config, tiles, groups, programs)
    # Only the accelerator stores its results.
    tail = tail_of(config, m, tiles, programs) if n % 8 == 0 and x.element_size() == 2 else 0
    if routed.tile_expert is not None:
        shares, tail, whole = 0, 0, tiles
    elif tail or shares:
        whole = tiles // programs * programs
        if not whole:
            programs = tiles * shares
            # One of two has half of the sum in registers: it adds the other's part.
            shares = shares if shares > 2 or rest else 0
    else:
        whole = whole_tiles(tiles, groups, programs, config.cut)
    parts = flags = None
    if whole < tiles and not tail:
        parts = torch.empty((programs, block_n, block_m), dtype=torch.float32, device=x.device)
        flags = flags_of(x.device)
    fp16 = out.dtype == torch.float16
    depth, row_tiles = block_k // COLUMNS, block_n // ROWS
    stores, ring_bytes, target = 0, RING_BYTES, out
    if parts is None and out.shape[1] % 8 == 0:
        rows = min(STORE[0], main_part(block_m) // 2)
        # An activation makes one of two columns.
        columns = STORE[1] if routed.activation is None else min(STORE[1], block_n // 4)
        stores, target = STORES, tile_descriptor(out, rows, columns)
        ring_bytes -= 2 * stores * rows * columns * out.element_size()
    assert stores or routed.tile_expert is None, "rows of experts are lines of 16 bytes"
    assert routed.row_map is None, "tiles are stored whole"
    launch(
        nvfp4_wgmma_large_kernel, (programs,),
        row_descriptor(x, rest or block_m), row_descriptor(x, tail) if tail else None, row_scale,
        *packed_descriptors(words, scale_bytes, depth, row_tiles),
        global_scale, bias, target, parts, flags, routed.tile_expert, routed.tile_rows, routed.tile_count,
        m, n, k, whole, BLOCK_M=block_m, BLOCK_N=block_n, DEPTH=depth,
        STORES=stores, STAGES=ring_bytes // (block_m * STEP_BYTES + block_n * block_k * 9 // 16),
        UNROLL=UNROLL, SHARES=shares, TAIL=tail, REGISTERS=REGISTERS, FP16=fp16,
        UNSCALE=UNSCALE[fp16] if x.element_size() == 2 else UNSCALE_FP8,
        ACTIVATION=routed.activation, PDL=hardware.pdl, num_warps=4, **pdl_option(hardware),
    )  # fmt: skip
    return out
