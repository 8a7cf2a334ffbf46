# SPDX-License-Identifier: Apache-2.0
"""Matrix product of more than a few rows of 16-bit activations and NVFP4 weights on Hopper, its warps specialized.

As in `nvfp4_wgmma`, out^T = W . x^T, and a weight goes through registers, where its codes are decoded, into the matrix
units. Here a multiprocessor has one program all the time. Four warps each, two consumers multiply one half of a tile's
rows of the weight with the same rows of x; a producer, one warp, has the tensor memory accelerator fill a ring of
codes, scales and x. The consumers do not wait for each other, and each decodes the next step while one of its steps is
multiplied, so that the matrix units run meanwhile. Where every tile is one program's, the accelerator stores it from
shared memory, while the next one is multiplied. Of a tile with 64 rows of the weight, what one wgmma takes, each
consumer multiplies every second step, and then they exchange sums.

Here is what a consumer does with a tile, the kernel and its launch. `nvfp4_wgmma_large_tiles` says how the product is
cut, and which tiles, or parts of one, are a program's; `nvfp4_wgmma_large_mainloop` fills the ring and multiplies, and
`nvfp4_wgmma_large_epilogue` stores results.

Of routed experts, each tile of rows has its own expert's weight. How many tiles there are, programs read on the GPU.

x may be E4M3 with a scale a row. The weight then becomes E4M3 too, for twice the rate of the matrix units. They add
FP8 products with the 14 bits or so that they have for them, as torch._scaled_mm(use_fast_accum=True) has them do.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from llm_quant_rocm.formats.nvfp4_wgmma import COLUMNS, ROWS
from llm_quant_rocm.hardware import Hardware, multiprocessors
from llm_quant_rocm.kernels.decode_hopper import UNSCALE, UNSCALE_FP8, declare_fp8_table, fill_fp8_table
from llm_quant_rocm.kernels.flags import parts_and_flags
from llm_quant_rocm.kernels.hopper import (
    acc_layout_of,
    allocate_ring,
    behind,
    cta_barrier,
    leave,
    main_part,
    main_rows,
    packed_descriptors,
    row_descriptor,
    tile_and_rest,
    tile_descriptor,
)
from llm_quant_rocm.kernels.launch import PLANS, Launch
from llm_quant_rocm.kernels.nvfp4_wgmma import DENSE, Routed, lines_of_16_bytes, load_scales
from llm_quant_rocm.kernels.nvfp4_wgmma_large_epilogue import (
    add_and_store,
    keep_row_scales,
    kept_shape,
    load_row_scales,
    store_tail,
    store_with_tma,
)
from llm_quant_rocm.kernels.nvfp4_wgmma_large_mainloop import (
    await_products,
    declare_places,
    first_step,
    init_barriers,
    look_ahead,
    multiply,
    producer,
    told_expert,
    told_place,
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
from llm_quant_rocm.kernels.sizes import cdiv

# Of a multiprocessor's 227 KiB, by the bytes of a value of x. The rest has room for barriers, places of tiles, scales
# of rows and, in FP8, a table of E4M3.
RING_BYTES = {1: 217 * 1024, 2: 220 * 1024}
# What of a result a consumer has the accelerator store at once: rows, fewer of tiles of 64, and columns. And how many
# of these may be on their way.
STORE = (64, 64)
STORES = 2
# Registers of a consumer's threads. The four warps of the producer have what is left of 504.
REGISTERS = 240


@gluon.jit
def _compute_tail(
    decoded, stage, phase, steps, tile_m, tile_n, number, groups, operands, shared, table, M, N, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TAIL: gl.constexpr, UNROLL: gl.constexpr, SHARES: gl.constexpr,
    FP16: gl.constexpr, UNSCALE: gl.constexpr
):  # fmt: skip
    """A consumer's half of the program's tile of the tail, from its product to its result."""
    row_scale, global_scale, bias, out, shared_out, staging, kept_scales, parts, flags = operands
    ring = shared[0]
    ROWS: gl.constexpr = BLOCK_N // 2
    FP8: gl.constexpr = ring.dtype.primitive_bitwidth == 8
    layout: gl.constexpr = acc_layout_of(TAIL, FP8)
    acc = gl.zeros((ROWS, TAIL), gl.float32, layout=layout)
    words, scale_pairs, steps = look_ahead(stage, phase, steps, shared, HALF, ROWS // 16)
    rest = gl.to_tensor(0)  # not used
    acc = multiply(
        acc, rest, decoded, words, scale_pairs, table, stage, phase, steps, groups, shared, 0, UNROLL, 1, HALF,
        not FP8, True, FP16,
    )[0]  # fmt: skip
    scales = load_scales(global_scale, (tile_n * 2 + HALF) * ROWS, N, layout, ROWS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    store_tail(acc, scales, number, tile_m, tile_n, operands, M, N, FP8, HALF, BLOCK_M, SHARES, UNSCALE)


@gluon.jit
def _consumer(
    HALF: gl.constexpr, operands, routing, shared, table, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STORES: gl.constexpr, UNROLL: gl.constexpr, CUT: gl.constexpr, SHARES: gl.constexpr, TAIL: gl.constexpr,
    FP16: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """Multiplies half of each tile's rows of the weight, the lower (0) or the upper ones (1), with its rows of x; or 64
    of them in every second step, and then has half of the rows of x."""
    row_scale, global_scale, bias, out, shared_out, staging, kept_scales, parts, flags = operands
    tile_expert, tile_rows, tile_count = routing
    ring, rest_ring, codes, pairs, places, ready, empty, started, exchanged = shared
    M, N, K, whole = sizes
    MAIN: gl.constexpr = main_rows(BLOCK_M)
    REST: gl.constexpr = BLOCK_M - MAIN
    # Steps from one of this consumer to its next, and the number of consumers that add them.
    APART: gl.constexpr = 2 if BLOCK_N == 64 else 1
    ROWS: gl.constexpr = BLOCK_N * APART // 2
    PART: gl.constexpr = HALF if APART == 1 else 0
    STAGES: gl.constexpr = ready.shape[0]
    FP8: gl.constexpr = ring.dtype.primitive_bitwidth == 8
    acc_layout: gl.constexpr = acc_layout_of(MAIN, FP8)
    # Whether a consumer's next product is queued behind one before it waits for that. If not, it waits as soon as the
    # next step is decoded, and the stage is free so much earlier: more of the ring is on its way. The matrix units have
    # the other consumer's product meanwhile. Compared by hand for every kind of tile, and where there is a tail.
    QUEUED: gl.constexpr = APART == 1 and (not FP8 or (not TAIL and (BLOCK_M == 192 or BLOCK_M == 256)))
    # Whether a step's codes come to registers before the step before is decoded. A wgmma holds its warps until it has
    # read its operand: with few rows decoding is what takes the time. With many it is the matrix units, and the first
    # product should not wait for a second step.
    EARLY: gl.constexpr = BLOCK_M <= 128
    # Scales are asked for when a tile begins: the epilogue would wait for them. With 320 rows there are no registers
    # for them then.
    EARLY_SCALES: gl.constexpr = BLOCK_M <= 256
    # Whether the scales of rows are left in shared memory: for what is stored slice by slice.
    KEEPS: gl.constexpr = STORES > 0 and row_scale is not None
    SLICE: gl.constexpr = staging.shape[1]

    program = gl.program_id(0)
    tiles_m, tiles_n, whole = count_tiles(tile_count, M, N, whole, BLOCK_M, BLOCK_N)
    tiles = tiles_m * tiles_n
    tile_groups = gl.cdiv(gl.cdiv(K, ring.shape[2]), UNROLL)
    begin, end, pieces = program_pieces(tiles, whole, tile_groups, CUT, SHARES)

    # Steps beyond K, and rows beyond the stored ones, are zeros: the accelerator reads them so.
    stage = HALF if APART == 2 else 0
    phase = 0
    groups = gl.cdiv(whole - program, gl.num_programs(0)) * tile_groups + end - begin
    if TAIL:
        tail_m, tail_n, number, first_in_tail, last_in_tail = program_tail(
            tiles_m, tiles_n, whole, tile_groups, BLOCK_M, TAIL, SHARES
        )  # fmt: skip
        tail_groups = last_in_tail - first_in_tail
        groups += tail_groups
    steps = groups * (UNROLL // APART) - 1
    if FP8:
        fill_fp8_table(table)
        cta_barrier()
    mbarrier.wait(started, 0)
    decoded, words, scale_pairs, steps = first_step(
        stage, phase, steps, pieces > 0, shared, table, PART, ROWS // 16, EARLY, FP16
    )
    if APART == 2:
        # From then on each waits for the steps of both in order.
        mbarrier.arrive(exchanged, count=1)
        mbarrier.wait(exchanged, 0)
    for index in range(0, pieces):
        tile, first, last = piece_at(index, begin, end, whole, tile_groups, CUT)
        tile_m, tile_n = told_place(places, stage)
        scale, rows = global_scale, BLOCK_M
        if tile_expert is not None:
            expert, rows = told_expert(places, stage)
            scale += expert * N
        column = tile_n * BLOCK_N + PART * ROWS
        if EARLY_SCALES:
            scales = load_scales(scale, column, N, acc_layout, ROWS)
            if KEEPS:
                main_scales, rest_scales = load_row_scales(row_scale, tile_m, M, BLOCK_M, SLICE, HALF, APART)
        acc = gl.zeros((ROWS, MAIN), gl.float32, layout=acc_layout)
        rest = 0  # not used
        if REST:
            rest = gl.zeros((ROWS, REST), gl.float32, layout=acc_layout_of(REST, FP8))
        acc, rest, decoded, words, scale_pairs, stage, phase, steps = multiply(
            acc, rest, decoded, words, scale_pairs, table, stage, phase, steps, last - first, shared, REST, UNROLL,
            APART, PART, QUEUED, EARLY, FP16,
        )  # fmt: skip
        row_scales = row_scale  # None, where rows have none; else not used unless they are kept
        if KEEPS:
            row_scales = kept_scales.index(HALF)
            if not EARLY_SCALES:
                main_scales, rest_scales = load_row_scales(row_scale, tile_m, M, BLOCK_M, SLICE, HALF, APART)
            keep_row_scales(main_scales, rest_scales, row_scales, BLOCK_M)
        acc, rest = await_products(acc, rest, 0, REST)
        if not EARLY_SCALES:
            scales = load_scales(scale, column, N, acc_layout, ROWS)
        if APART == 1:  # else once they have exchanged sums by way of it
            mbarrier.arrive(empty.index(behind(stage, STAGES)), count=1)

        if STORES:
            store_with_tma(
                acc, rest, scales, row_scales, rows, column, tile_m, (bias, out, staging, M, N, tile_rows),
                (ring, empty, exchanged, stage, index), HALF, BLOCK_M, APART, UNSCALE, ACTIVATION,
            )  # fmt: skip
        else:
            add_and_store(
                acc, rest, scales, (tile, first, last), (tiles, whole, tile_groups), tile_m, tile_n, parts, flags,
                (row_scale, bias, out, M, N), FP8, HALF, BLOCK_M, SHARES, UNSCALE,
            )  # fmt: skip
    if TAIL:  # noqa: SIM102  # constants decide what is compiled
        if tail_groups > 0:
            _compute_tail(
                decoded, stage, phase, steps, tail_m, tail_n, number, tail_groups, operands, shared, table, M, N, HALF,
                BLOCK_M, BLOCK_N, TAIL, UNROLL, SHARES, FP16, UNSCALE,
            )  # fmt: skip
    if STORES:
        tma.store_wait(0)
    leave(stage)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M", "whole"])
def nvfp4_wgmma_large_kernel(
    x, rest_x, row_scale, words, scale_pairs, global_scale, bias, out, shared_out, parts, flags,
    tile_expert, tile_rows, tile_count, M, N, K, whole,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, STORES: gl.constexpr,
    UNROLL: gl.constexpr, SHARES: gl.constexpr, TAIL: gl.constexpr, REGISTERS: gl.constexpr, FP16: gl.constexpr,
    UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """A program's share of the tiles of out, one of as many programs as run together.

    x (`row_descriptor`), words and scale_pairs are descriptors of [M, K], [pieces of K, row tiles, 128] and [pieces of
    K, row tiles, 32]; x is of 16-bit values or of E4M3 in the order of columns that `decode_words_fp8` names.
    `row_scale` fp32 [M], if given, are factors of its rows: the scales of E4M3, the router's weights of experts.
    N is the number of rows of the weight that are stored; the packed weight has them padded. Of tiles whose rows of x
    are no power of two `rest_x` is a descriptor of the rest. The first `whole` tiles are not cut, and with TAIL the
    others are of so many rows of x, of which `rest_x` is a descriptor then. `parts` fp32
    [programs, BLOCK_N, BLOCK_M or TAIL] has room for a part of each program, and `flags`, two zeros for each, say which
    are there. With SHARES as many programs compute each tile that is not whole. With STORES, where no tile is cut, but
    for a tail, out is a descriptor, and so many boxes of it each consumer may have waiting in shared memory to be
    stored; of a tail that programs share `shared_out` is the result itself. The rest is that of `nvfp4_wgmma_kernel`;
    with `tile_expert` no tile is cut, and there is no tail.
    """
    ring_layout: gl.constexpr = gl.NVMMASharedLayout(128, x.dtype.primitive_bitwidth, 2)
    ring, rest_ring = allocate_ring(x.dtype, ring_layout, STAGES, BLOCK_M, DEPTH * 64)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES] + words.block_shape, words.layout)
    pairs = gl.allocate_shared_memory(gl.uint16, [STAGES, DEPTH, BLOCK_N // 16, 32], scale_pairs.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Whether all of these are initialized, by two warps.
    started = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    exchanged = ready  # not used
    if BLOCK_N == 64:
        exchanged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(started, count=2)
    if STORES:  # noqa: SIM108  # constants decide what is compiled
        staging = gl.allocate_shared_memory(out.dtype, [2 * STORES] + out.block_shape, out.layout)
    else:
        staging = ring  # not used
    kept_scales = ring  # not used
    if STORES and row_scale is not None:
        kept_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        kept_scales = gl.allocate_shared_memory(gl.float32, kept_shape(BLOCK_M, BLOCK_N, staging.shape[1]), kept_layout)
    # Whether tiles of all rows are. A tail's parts are of its own tiles.
    CUT: gl.constexpr = parts is not None and not TAIL
    table = 0  # not used
    if x.dtype.primitive_bitwidth == 8:
        table = declare_fp8_table(M)
    operands = (row_scale, global_scale, bias, out, shared_out, staging, kept_scales, parts, flags)
    routing = (tile_expert, tile_rows, tile_count)
    shared = (ring, rest_ring, codes, pairs, declare_places(M, STAGES), ready, empty, started, exchanged)
    sizes = (M, N, K, whole)
    # The last one is the rest of the producer's four warps.
    gl.warp_specialize(
        [
            (_consumer, (
                gl.constexpr(0), operands, routing, shared, table, sizes, BLOCK_M, BLOCK_N, STORES, UNROLL, CUT, SHARES,
                TAIL, FP16, UNSCALE, ACTIVATION,
            )),
            (_consumer, (
                gl.constexpr(1), operands, routing, shared, table, sizes, BLOCK_M, BLOCK_N, STORES, UNROLL, CUT, SHARES,
                TAIL, FP16, UNSCALE, ACTIVATION,
            )),
            (producer, (
                x, rest_x, words, scale_pairs, routing, shared, sizes, BLOCK_M, BLOCK_N, UNROLL, CUT, SHARES, TAIL, PDL,
            )),
            (init_barriers, (shared, BLOCK_N)),
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
    assert routed.row_map is None, "tiles are stored whole"
    plan = _plan(
        config, m, n, k, x.element_size() == 1, out.dtype, routed.tile_expert is not None, routed.activation, hardware,
        multiprocessors(x.device),
    )  # fmt: skip
    plan.launch(
        row_descriptor(x, plan.rows), row_descriptor(x, plan.rest) if plan.rest else None, row_scale,
        *packed_descriptors(words, scale_bytes, plan.depth, plan.tile_rows, blocks=x.element_size() == 1),
        global_scale, bias, tile_descriptor(out, *plan.box) if plan.box else out, out if plan.adds_to_tail else None,
        *parts_and_flags(plan.parts, x.device), routed.tile_expert, routed.tile_rows, routed.tile_count,
    )  # fmt: skip
    return out


class _Plan(NamedTuple):
    """A launch, and what its tensors are to be.

    Attributes:
        rows: of x, in a box.
        rest: the same of the rest of a tile's rows, or of a tail's tiles; 0: there is neither.
        depth, tile_rows: pieces of 64 columns and tiles of 16 rows of the weight in a step.
        box: rows and columns of the result that the accelerator stores together; None: threads store it.
        adds_to_tail: whether parts of a tail's tiles are added up.
        parts: their shape, if there are any.
    """

    launch: Launch
    rows: int
    rest: int
    depth: int
    tile_rows: int
    box: tuple[int, int] | None
    adds_to_tail: bool
    parts: tuple[int, ...] | None


@lru_cache(PLANS)
def _plan(
    config: Config,
    m: int,
    n: int,
    k: int,
    fp8: bool,
    dtype: torch.dtype,
    of_experts: bool,
    activation: str | None,
    hardware: Hardware,
    programs: int,
) -> _Plan:
    """Of a result in `dtype`, by so many programs, no more than run together: one waits for what another adds."""
    block_k = STEP_BYTES if fp8 else STEP_BYTES // 2
    block_m, rest = tile_and_rest(config.block_m, m)
    # Of tiles with 64 rows of the weight only the accelerator stores results.
    block_n = config.block_n if n % 8 == 0 else max(config.block_n, 128)
    tiles = cdiv(m, block_m) * cdiv(n, block_n)
    groups = groups_of(k, block_k)
    # Only the accelerator stores its results.
    tail = tail_of(config, m, tiles, programs) if n % 8 == 0 else 0
    shares = shares_of(config, tiles, groups, programs, tail)
    if of_experts:
        shares, tail, whole = 0, 0, tiles
    elif tail or shares:
        whole = tiles // programs * programs
        if not whole:
            programs = tiles * shares
    else:
        whole = whole_tiles(tiles, groups, programs, config.cut)
    parts = None
    if whole < tiles and (shares or not tail):
        parts = programs, block_n, tail or block_m
    stores, ring_bytes, box = 0, RING_BYTES[1 if fp8 else 2], None
    if (tail or parts is None) and (n if activation is None else n // 2) % 8 == 0:
        # An activation makes one of two columns.
        columns = STORE[1] if activation is None else min(STORE[1], block_n // 4)
        stores, box = STORES, (min(STORE[0], main_part(block_m) // 2, rest or STORE[0]), columns)
        ring_bytes -= 2 * stores * prod(box) * dtype.itemsize
    assert stores or block_n > 64, "two consumers exchange sums where the accelerator stores them"
    assert stores or not of_experts, "rows of experts are lines of 16 bytes"
    assert activation is None or block_n > 64, "what two consumers add up is stored as it is"
    launch = Launch(
        nvfp4_wgmma_large_kernel, (programs,), m, n, k, whole,
        BLOCK_M=block_m, BLOCK_N=block_n, DEPTH=block_k // COLUMNS, STORES=stores,
        STAGES=ring_bytes // (block_m * STEP_BYTES + block_n * block_k * 9 // 16),
        UNROLL=UNROLL, SHARES=shares, TAIL=tail, REGISTERS=REGISTERS, FP16=dtype == torch.float16,
        UNSCALE=UNSCALE_FP8 if fp8 else UNSCALE, ACTIVATION=activation, PDL=hardware.pdl, num_warps=4,
        **pdl_option(hardware),
    )  # fmt: skip
    adds_to_tail = tail > 0 and shares > 0
    return _Plan(launch, block_m - rest, rest or tail, block_k // COLUMNS, block_n // ROWS, box, adds_to_tail, parts)
