# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and NVFP4 weights on CDNA GPUs: gfx90a, gfx942 and gfx950.

The product is computed transposed, out^T = W . x^T. Each lane loads the codes of its own operand of the matrix
instructions (`formats/nvfp4_mfma.py`), decodes them in registers and multiplies: a weight never passes through the LDS.
Tiles of x do, in two buffers, since all waves of a program share them.

Loads are issued two steps ahead: while a step multiplies, the codes and the x of the next one are on their way or have
arrived, and those of the one after are being asked for. Two steps of the loop over K are written out, so that every
load has registers of its own and none are copied.

Written in Gluon, Triton's lower language, so that what must be so is so with every version of the compiler: that no
weight moves between lanes (`assert_trivial` below), and that addresses cost no vector instruction (a buffer load takes
its base from scalar registers, for weights of any size).

The sum over K of a tile can be cut among `split_k` programs, whose parts a second kernel adds in order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma

from llm_quant_rocm.formats.nvfp4_mfma import PAD_K
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.activate import activate
from llm_quant_rocm.kernels.decode_cdna import FACTOR, decode_scales, decode_words
from llm_quant_rocm.kernels.launch import PLANS, Launch
from llm_quant_rocm.kernels.routing import Schedule
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2
from llm_quant_rocm.kernels.stretches import begin_of
from llm_quant_rocm.kernels.xcd import neighbours_gluon

# Later Tritons than 3.6 let the caller choose the registers of sums; 3.6 takes accumulation registers by itself.
CHOOSES_REGISTERS = gl.constexpr("cd_regclass" in signature(mfma).parameters)
# Rows of x that a program of the second kernel adds up.
PART_ROWS = 16


@dataclass(frozen=True)
class Config:
    """How the product is cut.

    Attributes:
        block_m: rows of x in a tile: 16, 32, 64 or 128. With 128 only one wave fits a SIMD.
        block_n: rows of the weight in a tile, 32 to 128, at least 32 for each wave.
        split_k: programs that share the sum of each tile.
        warps: waves of a program.
    """

    block_m: int
    block_n: int = 128
    split_k: int = 1
    warps: int = 4


def default_config(m: int, n: int, k: int, units: int) -> Config:
    """A sound choice, by reasoning: no AMD GPU was at hand to measure one.

    Where a sum that is cut as often as `_parts` has it leaves units without a program, tiles have fewer rows. The
    weight is then decoded once more for each, but by units that had nothing to do: of 128 columns gfx942's matrix units
    take 1024 cycles for 64 rows and 256 for 16, and the instructions that decode about 640 for either.
    """
    block_m = min(64, max(16, next_power_of_2(m)))
    tiles_n = cdiv(n, 128)
    split_k = _parts(cdiv(m, block_m) * tiles_n, k, m, units)
    while block_m > 16 and cdiv(m, block_m // 2) * tiles_n * split_k <= units:
        block_m //= 2
    return Config(block_m, 128, split_k)


def default_moe_config(slots: int, experts: int, n: int, k: int, units: int) -> Config:
    """Tiles cut for the rows that an expert has on average, and parts where few experts have rows, by reasoning too."""
    slots = max(slots, 1)  # where no expert is on this rank
    block_m = min(64, max(16, next_power_of_2(cdiv(slots, experts))))
    chosen = min(slots, experts)
    return Config(block_m, 128, _parts(chosen * cdiv(n, 128), k, cdiv(slots, chosen), units))


def _parts(tiles: int, k: int, rows: int, units: int) -> int:
    """Into how many parts to cut the sums over K of so many tiles, where each row of a weight meets `rows` of x.

    Reading the weight is the limit, and enough of it must be on its way: a wave asks for 4.5 KiB ahead, so with eight
    waves to a compute unit, two programs, 304 units wait for 11 MB, twice what 5 TB/s bring in a microsecond. Sums are
    cut until there are so many programs, but not into parts shorter than four steps of 128 columns, nor so that writing
    and reading the parts (8 bytes an element of the result, in the cache) comes to more than half of the weight (9/16
    byte an element). Of numbers of parts the longest of which is the same the least serves: it has most of the same
    length, and adds less.
    """
    rows = next_power_of_2(rows)  # for few numbers of parts: a kernel that adds them is compiled for each
    pairs = cdiv(k, PAD_K)
    most = max(min(2 * units // tiles, pairs // 2, 9 * k // (256 * rows), 16), 1)
    return cdiv(pairs, cdiv(pairs, most))


def config_of(fields: Mapping[str, Any]) -> Config:
    """The configuration with these fields, as a file of configurations holds it."""
    return Config(**fields)


def batch_invariant(config: Config) -> Config:
    """The same without sums of parts: each sum is then added in one order, however many rows there are."""
    return replace(config, split_k=1)


@gluon.jit
def load_weight(words, scales, piece, word_offset, scale_offset):
    """Words [BLOCK_N / 16, 256] and scale words [BLOCK_N / 32, 64] of the pieces from `piece` on."""
    piece = piece.to(gl.int64)
    return buffer_load(words + piece * 512, word_offset), buffer_load(scales + piece * 64, scale_offset)


@gluon.jit
def _load_x(x, offset, column, step, K, EVEN_K: gl.constexpr):
    """x [BLOCK_M, 128] of step `step`, zero beyond K: what the mask leaves out is read past the buffer's end, which
    brings zeros."""
    if EVEN_K:
        return buffer_load(x + step * 128, offset)
    else:
        return buffer_load(x + step * 128, offset, mask=(column < K - step * 128)[None, :])


@gluon.jit
def _store_x(shared, x, BLOCK_M: gl.constexpr):
    """Puts x [BLOCK_M, 128] where the matrix instructions look for it: they have 8 columns of each of four groups in
    turn, where a lane of the weight has the 32 columns of its group."""
    shared.store(x.reshape(BLOCK_M, 4, 4, 8).permute(0, 2, 1, 3).reshape(BLOCK_M, 128))


@gluon.jit
def _in_place(words):
    """The same registers, but nothing reads them earlier than here: an empty statement that keeps its place among
    loads, stores and barriers. Without it the compiler decodes the second step's codes at the top of the loop, and so
    waits for loads that were issued just before."""
    return gl.inline_asm_elementwise("", "=v,0", [words], dtype=gl.int32, is_pure=False, pack=1)


# Not an argument of the kernels: where engines are told what Triton compiles, as vLLM is, Triton has to say of every
# argument in JSON what it is, and cannot of a layout.
@gluon.constexpr_function
def _acc_layout(arch: str, warps: int) -> AMDMFMALayout:
    """How the sums [BLOCK_N, BLOCK_M] lie in registers: 16x16 instructions, every wave 32 rows of the weight."""
    version, depth = {"gfx90a": (2, 16), "gfx942": (3, 16), "gfx950": (4, 32)}[arch]
    return AMDMFMALayout(version, [16, 16, depth], False, [warps, 1], tiles_per_warp=[2, 1])


@gluon.jit
def _zeros(BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """Sums in accumulation registers. `_multiply` keeps them there.

    A matrix instruction reads its sums late, so registers that they leave must not be written too soon. The compiler
    keeps the distance, except from inline assembly; and that writes no accumulation registers.
    """
    zeros = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=layout)
    return gl.inline_asm_elementwise("", "=a,0", [zeros], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _multiply(a, b, acc):
    if CHOOSES_REGISTERS:
        return mfma(a, b, acc, cd_regclass="a")
    else:
        return mfma(a, b, acc)


@gluon.jit
def _scales_of_words(scales, words):
    """Scales [piece, lane, row tile] for the two words of a block [piece, row tile, lane, word]."""
    scales = scales.permute(0, 2, 1)
    return gl.convert_layout(gl.join(scales, scales), words.type.layout, assert_trivial=True)


@gluon.jit
def decode_pieces(words, scale_words, ARCH: gl.constexpr, FP16: gl.constexpr):
    """Values [row tile, group of columns, row, word, 8 columns, block] of words [row tiles, 256] and scale words."""
    NT: gl.constexpr = words.shape[0]
    words_0, words_1 = words.reshape(NT // 2, 2, 64, 2, 2).permute(0, 1, 2, 4, 3).split()  # by block
    scales_0, scales_1 = decode_scales(scale_words, ARCH, FP16)
    values_0 = decode_words(words_0, _scales_of_words(scales_0, words_0), 0, ARCH, FP16)
    values_1 = decode_words(words_1, _scales_of_words(scales_1, words_1), 1, ARCH, FP16)
    return gl.join(values_0, values_1).reshape(NT, 4, 16, 2, 8, 2)


@gluon.jit
def _operand(words, scale_words, ARCH: gl.constexpr, FP16: gl.constexpr, layout: gl.constexpr):
    """The weight [BLOCK_N, 128] in the registers where the matrix instructions read it. Nothing moves between lanes,
    which `assert_trivial` checks when it compiles."""
    values = decode_pieces(words, scale_words, ARCH, FP16).permute(0, 2, 5, 3, 1, 4)
    return gl.convert_layout(values.reshape(words.shape[0] * 16, 128), layout, assert_trivial=True)


@gluon.jit
def _store_tile(
    acc, first_m, first_n, global_scale, bias, out, row_map, row_weight, M, N,
    UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """The epilogue of finished sums acc [rows of the weight, rows of x]: scales, bias, activation, router weight,
    rounding."""
    dtype: gl.constexpr = out.dtype.element_ty
    HEIGHT: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    n = first_n + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, acc.type.layout))
    acc = acc * UNSCALE * gl.load(global_scale + n, mask=n < N, other=0.0)[:, None]
    if bias is not None:
        acc += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if ACTIVATION is not None:
        gate, up = acc.reshape(HEIGHT // 32, 2, 16, WIDTH).permute(0, 2, 3, 1).split()
        gate = activate(gate.to(dtype).to(gl.float32), ACTIVATION)
        acc = (gate * up.to(dtype).to(gl.float32)).reshape(HEIGHT // 2, WIDTH)
        n = first_n // 2 + gl.arange(0, HEIGHT // 2, layout=gl.SliceLayout(1, acc.type.layout))
        N = N // 2
    m = first_m + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, acc.type.layout))
    inside = m < M
    if row_weight is not None:
        acc *= gl.load(row_weight + m, mask=inside, other=0.0)[None, :]
    if row_map is not None:
        m = gl.load(row_map + m, mask=inside, other=0)
    gl.store(out + m.to(gl.int64)[None, :] * N + n[:, None], acc.to(dtype), mask=inside[None, :] & (n < N)[:, None])


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M"])
def nvfp4_mfma_kernel(
    x, words, scales, global_scale, bias, out, partial, tile_expert, tile_rows, row_map, row_weight, M, N, K, stride_x,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, EVEN_K: gl.constexpr, ARCH: gl.constexpr, UNSCALE: gl.constexpr,
    ACTIVATION: gl.constexpr, SLOTS_PER_ROW: gl.constexpr, XCDS: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """One tile of out, with a grid of [tiles, 1]; or one part of its sum, stored in `partial` fp32 [tiles, parts,
    BLOCK_M, BLOCK_N], with one of [tiles, parts]: however many these are, the kernel is the same.

    x is [M, K] with rows `stride_x` apart, N the number of rows of the weight; the packed weight has N and K padded.
    `scales` are the scale bytes, four to a word. With ACTIVATION the weight's rows alternate, 16 of the gate and 16 of
    up, and out is T(activation(T(gate)) * T(up)), [M, N / 2]. EVEN_K: K is a multiple of 256.

    With `tile_expert` the M rows are those of a `routing.Schedule`. Each tile has an expert of its own (-1: no work),
    and `words`, `scales` and `global_scale` have experts as their leading dimension; the first `tile_rows` of its rows
    are slots, `row_map` says which. The row of x of a slot is slot // SLOTS_PER_ROW, that of out the slot's number, and
    `row_weight` fp32 [M], if given, are factors. x is less than 2 GiB.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    FP16: gl.constexpr = dtype == gl.float16
    NT: gl.constexpr = BLOCK_N // 16
    acc_layout: gl.constexpr = _acc_layout(ARCH, num_warps)
    w_operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 8)
    x_operand: gl.constexpr = gl.DotOperandLayout(1, acc_layout, 8)
    word_layout: gl.constexpr = gl.BlockedLayout([2, 4], [1, 64], [num_warps, 1], [1, 0])
    scale_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 64], [num_warps, 1], [1, 0])
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 16], [num_warps, 1], [1, 0])
    shared_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 16, [1, 0])

    # Tiles of M that share a tile of the weight run together, on one die, and find it in the cache.
    tile = neighbours_gluon(gl.program_id(0), gl.num_programs(0), XCDS)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tile_m = tile % tiles_m
    tile_n = tile // tiles_m
    row_pieces = (N + 127) // 128 * 4
    steps = gl.cdiv(K, 256) * 2
    if tile_expert is not None:
        expert = gl.load(tile_expert + tile_m)
        if expert < 0:
            return
        pieces = expert.to(gl.int64) * steps * row_pieces
        words += pieces * 512
        scales += pieces * 64
        global_scale += expert * N
        M = tile_m * BLOCK_M + gl.load(tile_rows + tile_m)
    # Of a whole sum 0, which the compiler is not to know: Triton 3.6 moved sums between registers in each turn then.
    first, end = gl.program_id(1), steps
    if partial is not None:
        first = begin_of(gl.program_id(1), steps // 2, gl.num_programs(1)) * 2
        end = begin_of(gl.program_id(1) + 1, steps // 2, gl.num_programs(1)) * 2

    row_tile = gl.arange(0, NT, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 256, layout=gl.SliceLayout(0, word_layout))
    word_offset = (tile_n * NT + row_tile)[:, None] * 256 + word[None, :]
    piece = gl.arange(0, NT // 2, layout=gl.SliceLayout(1, scale_layout))
    lane = gl.arange(0, 64, layout=gl.SliceLayout(0, scale_layout))
    scale_offset = (tile_n * (NT // 2) + piece)[:, None] * 64 + lane[None, :]
    # Rows beyond M repeat the last one; they are not stored.
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_layout))
    row = gl.minimum(row, M - 1 - tile_m * BLOCK_M)
    if row_map is None:
        x += (tile_m * BLOCK_M).to(gl.int64) * stride_x
    else:
        slot = buffer_load(row_map + tile_m * BLOCK_M, row)
        row = (slot.to(gl.uint32) // SLOTS_PER_ROW).to(gl.int32)  # unsigned: a shift, if that is a power of two
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, x_layout))
    x_offset = row[:, None] * stride_x + column[None, :]

    shared_0 = gl.allocate_shared_memory(dtype, [BLOCK_M, 128], shared_layout)
    shared_1 = gl.allocate_shared_memory(dtype, [BLOCK_M, 128], shared_layout)
    acc = _zeros(BLOCK_N, BLOCK_M, acc_layout)

    # Loads arrive in the order of their issue, which must be the same here as in the loop for it to know how many
    # may still be on their way.
    _store_x(shared_0, _load_x(x, x_offset, column, first, K, EVEN_K), BLOCK_M)
    x_1 = _load_x(x, x_offset, column, first + 1, K, EVEN_K)
    scale_offset = _in_place(scale_offset)
    codes_0, scales_0 = load_weight(words, scales, first * row_pieces, word_offset, scale_offset)
    scale_offset = _in_place(scale_offset)
    codes_1, scales_1 = load_weight(words, scales, (first + 1) * row_pieces, word_offset, scale_offset)
    for step in range(first, end, 2):
        ahead = gl.minimum(step + 2, end - 1)
        x_0 = _load_x(x, x_offset, column, ahead, K, EVEN_K)
        b = shared_0.permute((1, 0)).load(x_operand)
        a = _operand(_in_place(codes_0), _in_place(scales_0), ARCH, FP16, w_operand)
        codes_0, scales_0 = load_weight(words, scales, ahead * row_pieces, word_offset, scale_offset)
        acc = _multiply(a, b, acc)
        _store_x(shared_1, x_1, BLOCK_M)

        ahead = gl.minimum(step + 3, end - 1)
        x_1 = _load_x(x, x_offset, column, ahead, K, EVEN_K)
        b = shared_1.permute((1, 0)).load(x_operand)
        a = _operand(_in_place(codes_1), _in_place(scales_1), ARCH, FP16, w_operand)
        codes_1, scales_1 = load_weight(words, scales, ahead * row_pieces, word_offset, scale_offset)
        acc = _multiply(a, b, acc)
        _store_x(shared_0, x_0, BLOCK_M)

    if partial is not None:
        n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, acc_layout))
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, acc_layout))
        part = (tile * gl.num_programs(1) + gl.program_id(1)).to(gl.int64) * (BLOCK_M * BLOCK_N)
        place = m[None, :] * BLOCK_N + n[:, None]
        gl.store(partial + part + place, acc, mask=(m < M - tile_m * BLOCK_M)[None, :])
    else:
        _store_tile(
            acc, tile_m * BLOCK_M, tile_n * BLOCK_N, global_scale, bias, out, row_map, row_weight, M, N,
            UNSCALE, ACTIVATION,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def nvfp4_mfma_add_kernel(
    partial, global_scale, bias, out, tile_expert, tile_rows, row_map, row_weight, M, N,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLIT_K: gl.constexpr, ROWS: gl.constexpr, ARCH: gl.constexpr,
    UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """Adds the parts [tiles, SPLIT_K, BLOCK_M, BLOCK_N] in order and applies the epilogue, ROWS rows of x a program;
    a grid of [tiles, BLOCK_M / ROWS]."""
    acc_layout: gl.constexpr = _acc_layout(ARCH, num_warps)
    tile = gl.program_id(0)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tile_m = tile % tiles_m
    if tile_expert is not None:
        expert = gl.load(tile_expert + tile_m)
        if expert < 0:
            return
        global_scale += expert * N
        M = tile_m * BLOCK_M + gl.load(tile_rows + tile_m)
    first_m = tile_m * BLOCK_M + gl.program_id(1) * ROWS
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, acc_layout))
    m = gl.program_id(1) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, acc_layout))
    part = partial + (tile * SPLIT_K).to(gl.int64) * (BLOCK_M * BLOCK_N) + m[None, :] * BLOCK_N + n[:, None]
    stored = (m < M - tile_m * BLOCK_M)[None, :]
    acc = gl.zeros((BLOCK_N, ROWS), gl.float32, layout=acc_layout)
    for index in gl.static_range(SPLIT_K):
        acc += gl.load(part + index * (BLOCK_M * BLOCK_N), mask=stored, other=0.0)
    _store_tile(
        acc, first_m, tile // tiles_m * BLOCK_N, global_scale, bias, out, row_map, row_weight, M, N,
        UNSCALE, ACTIVATION,
    )  # fmt: skip


def gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    hardware: Hardware,
    config: Config,
    routing: Schedule | None = None,
    *,
    row_weight: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """x . weight^T * global_scale + bias: [M, n] in x's dtype, of x [M, K] (bf16 or fp16, contiguous rows).

    words and scale_bytes are of `formats.nvfp4_mfma.pack` in the layout of hardware.arch, global_scale is fp32 [n]. The
    other arguments are those of the kernel. With a routing the result is that of each slot, [slots, n], and the slots
    are shared out evenly to the rows of x, in order.

    A row's result depends on split_k, but on no other part of the configuration and not on the rows beside it.
    """
    m, k = x.shape
    tile_expert = tile_rows = row_map = None
    rows, slots_per_row = m, 1
    if routing is not None:
        tile_expert, tile_rows, row_map = routing.tile_expert, routing.tile_rows, routing.row_map
        rows = routing.slot_row.numel()
        slots_per_row, m = rows // m, row_map.numel()
    if x.data_ptr() % 16 or x.stride(0) % 16:
        # A lane loads 16 bytes, which Triton allows with strides that it knows to be multiples of 16 elements.
        x = x.clone(memory_format=torch.contiguous_format)
    out = torch.empty((rows, n if activation is None else n // 2), dtype=x.dtype, device=x.device)
    plan = _plan(config, m, n, k, x.stride(0), x.dtype == torch.float16, activation, slots_per_row, hardware)
    partial = torch.empty(plan.parts, dtype=torch.float32, device=x.device) if plan.parts else None
    plan.multiply(
        x, words, scale_bytes.view(torch.int32), global_scale, bias, out, partial, tile_expert, tile_rows, row_map,
        row_weight,
    )  # fmt: skip
    if plan.add is not None:
        plan.add(partial, global_scale, bias, out, tile_expert, tile_rows, row_map, row_weight)
    return out


class _Plan(NamedTuple):
    """The launch that multiplies, and where K is split that which adds up parts, and their shape."""

    multiply: Launch
    add: Launch | None
    parts: tuple[int, ...] | None


@lru_cache(PLANS)
def _plan(
    config: Config,
    m: int,
    n: int,
    k: int,
    stride: int,
    fp16: bool,
    activation: str | None,
    slots_per_row: int,
    hardware: Hardware,
) -> _Plan:
    block_m, block_n = config.block_m, config.block_n
    tiles = cdiv(m, block_m) * cdiv(n, block_n)
    split_k = min(config.split_k, cdiv(k, PAD_K))
    constants: dict[str, Any] = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "ARCH": hardware.arch, "UNSCALE": 1 / FACTOR[hardware.arch, fp16],
        "ACTIVATION": activation, "num_warps": config.warps,
    }  # fmt: skip
    multiply = Launch(
        nvfp4_mfma_kernel, (tiles, split_k), m, n, k, stride,
        EVEN_K=k % PAD_K == 0, SLOTS_PER_ROW=slots_per_row, XCDS=hardware.xcds, **constants,
    )  # fmt: skip
    if split_k == 1:
        return _Plan(multiply, None, None)
    add = Launch(
        nvfp4_mfma_add_kernel, (tiles, cdiv(min(m, block_m), PART_ROWS)), m, n,
        SPLIT_K=split_k, ROWS=PART_ROWS, **constants,
    )  # fmt: skip
    return _Plan(multiply, add, (tiles, split_k, block_m, block_n))
