# SPDX-License-Identifier: Apache-2.0
"""What the kernels for Hopper that are written in Gluon, Triton's lower language, share."""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from llm_quant_rocm.kernels.sizes import cdiv

# Renamed after Triton 3.6.
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


# Multiprocessors of an H100, by whose number unmeasured products are cut.
SMS = 132


@gluon.jit
def place(tile, tiles_m, tiles_n, GROUP: gl.constexpr = 4):
    """tile_m and tile_n of the program or step number `tile`: GROUP tiles of M at a time with all tiles of N.

    Programs that run together then share both x and the weight in the L2 cache. A tile of x in 16 bits takes about
    four times the room of one of a weight in NVFP4, hence only a few.
    """
    group = tile // (GROUP * tiles_n)
    rest = tile - group * (GROUP * tiles_n)
    rows = gl.minimum(tiles_m - group * GROUP, GROUP)
    return group * GROUP + rest % rows, rest // rows


@gluon.jit
def place_after(tile_m, tile_n, tiles_m, tiles_n, GROUP: gl.constexpr = 4):
    """What `place` gives for the tile after the one at tile_m and tile_n, without its divisions."""
    first = tile_m // GROUP * GROUP
    row_ends = tile_m + 1 == gl.minimum(first + GROUP, tiles_m)
    group_ends = row_ends & (tile_n + 1 == tiles_n)
    next_n = gl.where(row_ends, gl.where(group_ends, 0, tile_n + 1), tile_n)
    return gl.where(row_ends, gl.where(group_ends, first + GROUP, first), tile_m + 1), next_n


def grid_of_tiles(tiles_m: int, tiles_n: int, group: int = 4) -> tuple[int, int, int]:
    """A grid with a program for each tile, in the order of `place` without its divisions: its dimensions are tiles of M
    that go together, `group` or fewer, tiles of N, and such groups. A few of the last one may be beyond M."""
    groups = cdiv(tiles_m, group)
    return cdiv(tiles_m, groups), tiles_n, groups


@gluon.jit
def init_ring(ready, empty, started, CONSUMERS: gl.constexpr, FIRST: gl.constexpr = 0):
    """Initializes the barriers of a ring's stages, empty and, from number FIRST on, filled, and lets those go on who
    wait for `started`.

    For a warp alone: after each barrier of an array that several warps initialize Triton has them wait for each other,
    and nothing is asked of memory before.
    """
    for stage in range(FIRST, ready.shape[0]):
        mbarrier.init(ready.index(stage), count=1)
    for stage in range(0, empty.shape[0]):
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    mbarrier.arrive(started, count=1)


def main_part(rows: int) -> int:
    """How many of the rows of a tile are one operand and one accumulator: a power of two of them. The rest, if any, are
    another of their own."""
    return 1 << rows.bit_length() - 1


main_rows = gluon.constexpr_function(main_part)


def tile_and_rest(rows: int, m: int) -> tuple[int, int]:
    """Rows of a tile for a matrix of m, and how many of them are the rest: all `rows`, or the main part of them where
    that has room for the matrix."""
    main = main_part(rows)
    return (rows, rows - main) if m > main else (main, 0)


@gluon.jit
def allocate_ring(dtype, layout: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory for x, WIDTH columns of it in a stage: the main part of a tile's rows, and the rest."""
    MAIN: gl.constexpr = main_rows(ROWS)
    ring = gl.allocate_shared_memory(dtype, [STAGES, MAIN, WIDTH], layout)
    rest = ring  # not used
    if MAIN < ROWS:
        rest = gl.allocate_shared_memory(dtype, [STAGES, ROWS - MAIN, WIDTH], layout)
    return ring, rest


@gluon.jit
def first_row(tile_m, M, BLOCK: gl.constexpr):
    """The row of the matrix that is the first one of tile number `tile_m`: the last tile begins so much earlier that it
    ends with the matrix."""
    return gl.maximum(gl.minimum(tile_m * BLOCK, M - BLOCK), 0)


@gluon.jit
def row_in_tile(tile_m, number, M, BLOCK: gl.constexpr):
    """The row of the matrix that is row `number` of tile number `tile_m`, as `load_rows` fills it. In a tile with a
    rest, which has more rows than the matrix only if that has more than the main part, the rest begins earlier."""
    first = first_row(tile_m, M, BLOCK)
    MAIN: gl.constexpr = main_rows(BLOCK)
    if MAIN < BLOCK:
        return first + number + gl.where(number >= MAIN, gl.minimum(M - BLOCK, 0), 0)
    elif BLOCK >= 16:
        folded = (M > BLOCK // 2) & (number >= BLOCK // 2)
        return first + number + gl.where(folded, gl.minimum(M - BLOCK, 0), 0)
    else:
        return first + number


@gluon.jit
def first_own_row(tile_m, number, M, BLOCK: gl.constexpr):
    """Of the rows from `number` on of a tile, the first one of the matrix that is theirs to store: those before it are
    the tile before's too, or, where a tile has more rows than the matrix, its first part's."""
    MAIN: gl.constexpr = main_rows(BLOCK)
    SECOND: gl.constexpr = MAIN if MAIN < BLOCK else BLOCK // 2
    return tile_m * BLOCK + gl.where((M < BLOCK) & (number >= SECOND), SECOND, 0)


@gluon.jit
def load_rows(x, row, column, ready, tile, pred=True):
    """Has the accelerator fill `tile` with a matrix's rows from `row` on, `first_row` of a tile, and its columns from
    `column` on; x is its `row_descriptor`, for as many rows as the tile has or a part of them."""
    WIDTH: gl.constexpr = x.block_shape[2]
    HALVES: gl.constexpr = x.block_shape[0]
    ROWS: gl.constexpr = HALVES * x.block_shape[1]
    ACROSS: gl.constexpr = tile.shape[1] // WIDTH
    DOWN: gl.constexpr = tile.shape[0] // ROWS
    boxes = reinterpret(tile, x.dtype, [ACROSS * DOWN * HALVES, x.block_shape[1], WIDTH], x.layout)
    for i in gl.static_range(ACROSS * DOWN):
        corner = [0, row + i % DOWN * ROWS, column + i // DOWN * WIDTH]
        load_tile(x, corner, ready, boxes.slice(i * HALVES, HALVES), pred=pred)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr, STEPS: gl.constexpr = 1):
    """The stage of a ring STEPS after this one, and its barrier's phase."""
    for _ in gl.static_range(STEPS):
        wrapped = stage == STAGES - 1
        stage, phase = gl.where(wrapped, 0, stage + 1), gl.where(wrapped, phase ^ 1, phase)
    return stage, phase


@gluon.jit
def behind(stage, STAGES: gl.constexpr, STEPS: gl.constexpr = 1):
    """The stage of a ring STEPS before this one."""
    for _ in gl.static_range(STEPS):
        stage = gl.where(stage == 0, STAGES - 1, stage - 1)
    return stage


@gluon.constexpr_function
def acc_layout_of(columns, fp8=False):
    """Of an accumulator of four warps with so many columns, of products of 16-bit values or of FP8."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32 if fp8 else 16])


@gluon.jit
def multiply_rest(operand, x, acc):
    """acc plus the product of `operand`, a part of the weight that multiplies the tile's main part, and x [REST, K]."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 32 // x.dtype.primitive_bitwidth)
    operand = gl.convert_layout(operand, layout, assert_trivial=True)
    return warpgroup_mma(operand, x.permute((1, 0)), acc, is_async=True)


@gluon.jit
def multiply_by_warps(operand, x, acc):
    """acc plus the product of `operand`, a part of the weight as a wgmma takes it, and x [rows, K] in shared memory:
    each warp's own 16 rows of the weight, without the others (mma.sync)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], acc.type.layout.warps_per_cta, [16, 8])
    operand = gl.convert_layout(operand, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    x = x.permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
    total = mma_v2(operand, x, gl.convert_layout(acc, layout, assert_trivial=True))
    return gl.convert_layout(total, acc.type.layout, assert_trivial=True)


@gluon.jit
def multiply_steps(acc, rows, columns, ready, empty, stage, phase, K, HALF: gl.constexpr):
    """acc [ROWS, N] plus the product of all steps along K of two rings, `rows` [stages, 2 * ROWS, K] in half HALF and
    `columns` [stages, N, K], from `stage` on; and the stage and phase after them. Their stages are free then."""
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = acc.shape[0]
    # A loop that may have no turn would cost copies of acc, with products in flight: there is always one.
    for step in range(0, gl.maximum(gl.cdiv(K, rows.shape[2]), 1)):
        mbarrier.wait(ready.index(stage), phase)
        mine = rows.index(stage).slice(HALF * ROWS, ROWS)
        acc = warpgroup_mma(mine, columns.index(stage).permute((1, 0)), acc, is_async=True)
        # Now the step before is finished, and its stage free.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(behind(stage, STAGES)), count=1, pred=step > 0)
        stage, phase = advance(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(behind(stage, STAGES)), count=1)
    return acc, stage, phase


# Two fp32 values as bf16 or fp16 have them.
_BF16_VALUES = gl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)
_FP16_VALUES = gl.constexpr(
    "{ .reg .b32 both; .reg .b16 low, high; cvt.rn.f16x2.f32 both, $3, $2; mov.b32 {low, high}, both; "
    "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)


@gluon.jit
def rounded(values, dtype: gl.constexpr):
    """fp32 values rounded to `dtype`, bf16 or fp16, and still fp32. In pairs, one instruction for two conversions:
    where nothing stores the result, Triton converts each value alone."""
    ASSEMBLY: gl.constexpr = _BF16_VALUES if dtype == gl.bfloat16 else _FP16_VALUES
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r,r", [values], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def store_through(staging, values, out, corner):
    """Stores `values`, a box of the descriptor `out` from `corner` on, by way of shared memory: the accelerator reads
    them there (`tma.store_wait`)."""
    staging.store(values)
    fence_async_shared()
    store_tile(out, corner, staging)


@gluon.jit
def run_ptx(ASSEMBLY: gl.constexpr, value):
    """Runs PTX with one operand, $1, and returns its result, $0, both int32."""
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _declaration(size):
    # Triton's shared memory comes behind, and tiles that the tensor memory accelerator swizzles begin at multiples of
    # so many bytes.
    return f"{{ .shared .align 1024 .b8 room[{size}]; mov.u32 $0, room; }}"


@gluon.jit
def declare_shared(SIZE: gl.constexpr, value):
    """The address of SIZE bytes of shared memory, a multiple of 1024, for PTX: declared there, beside what Triton knows
    of. Once in a kernel for each purpose; `value` is any number."""
    return run_ptx(_declaration(SIZE), value)


@gluon.jit
def leave(value):
    """Ends the warps that call it. Else they would wait for more work in a loop around everything, and there ptxas does
    not keep products in flight from one turn of an inner loop to the next (C7512)."""
    run_ptx("exit; mov.b32 $0, $1;", value)


def row_descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """A matrix [M, K] for `load_rows`, in tiles of so many rows and lines of 128 bytes, as a wgmma takes them.

    For a row beyond a matrix the accelerator takes longer than for one of it, by so much that in tiles of 128 a
    product of 65 rows took longer than one of 128, compared by hand on an H100. So tiles do not reach beyond it:
    the last one begins earlier, and that of fewer rows than a tile has, but more than half of them, is the first
    half and the last. In a tile of 8 rows, or half of a tile, it matters less.
    """
    m, k = tensor.shape
    stride, width = tensor.stride(0), 128 // tensor.element_size()
    halves = 2 if rows >= 16 else 1
    half = rows // halves
    # In the first dimension a step is from one half to the other.
    apart = half if m >= rows or m <= half else m - half
    shape = (1, m, k) if m <= half or halves == 1 else (2, m - apart, k)
    block = [halves, half, width]
    return _descriptor(tensor, shape, (apart * stride, stride, 1), block, _layout(128, 1024 // width, 3))


def tile_descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix of 16-bit values or E4M3 for the tensor memory accelerator, in tiles that a wgmma takes as they are."""
    layout = _tile_layout(rows, columns, tensor.element_size())
    return _descriptor(tensor, tensor.shape, tensor.stride(), [rows, columns], layout)


@cache
def _tile_layout(rows: int, columns: int, size: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float8e4nv if size == 1 else gl.bfloat16)


def descriptor(tensor: torch.Tensor, block: list[int], swizzle: int) -> TensorDescriptor:
    """A tensor for the tensor memory accelerator, in boxes `block` that are swizzled by so many bytes."""
    layout = _layout(swizzle, tensor.element_size() * 8, len(block))
    return _descriptor(tensor, tensor.shape, tensor.stride(), block, layout)


def packed_descriptors(
    words: torch.Tensor, scale_bytes: torch.Tensor, depth: int, row_tiles: int, blocks: bool = False
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Codes and scales of `formats.nvfp4_wgmma.pack`, of all experts if there are several, in boxes of `depth` times 64
    columns and `row_tiles` times 16 rows.

    With `blocks` the 16 words of two rows are a line of their own, swizzled so that `nvfp4_wgmma.load_blocks`, with
    which 32 lanes take a word each of eight lines, finds them in 32 banks."""
    rows = words.shape[-2]
    columns = words.numel() // (rows * 128)
    line, swizzle = (16, 64) if blocks else (128, 0)
    lines = 128 // line
    return (
        _descriptor(
            words, (columns, rows * lines, line), (rows * 128, line, 1), [depth, row_tiles * lines, line],
            _layout(swizzle, 32, 3)
        ),
        _descriptor(
            scale_bytes.view(torch.uint16), (columns, rows, 32), (rows * 32, 32, 1), [depth, row_tiles, 32],
            _layout(0, 16, 3),
        ),
    )  # fmt: skip


def _descriptor(
    base: torch.Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: list[int],
    layout: gl.NVMMASharedLayout,
) -> TensorDescriptor:
    """Without Triton's checks, which took the host longer than all else, compared by hand: of tensors whose lines begin
    at multiples of 16 bytes, what the functions above make passes them (tests/kernels/test_descriptors.py)."""
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(base=base, shape=shape, strides=strides, block_shape=block, layout=layout)
    return found


@cache
def _layout(swizzle: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle, bits, rank)
