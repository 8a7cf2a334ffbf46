# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and NVFP4 weights on Hopper's warpgroup matrix units.

The product is computed transposed, out^T = W . x^T: a wgmma takes its first operand from registers, so a weight goes
from memory through registers, where its codes are decoded, to the matrix unit. Tiles of x come by the tensor memory
accelerator through a ring in shared memory. While one step multiplies, the codes of the next are decoded and those of
the one after are loaded.

Written in Gluon, Triton's lower language, for one reason: Triton 3.6 pipelines a product with an operand in registers
wrongly (it lets the next step overwrite registers that a wgmma in flight still reads). Here every wait names the
registers that it frees.

A tile's sum over K can be cut among several programs, so that there are enough of them where N is small. A second
kernel adds their parts in order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm_quant_rocm.formats.nvfp4_wgmma import COLUMNS
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.activate import activate
from llm_quant_rocm.kernels.decode_hopper import UNSCALE, decode_words
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch

# Renamed after Triton 3.6.
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# Steps that codes are brought to the L2 cache before they are decoded. Registers have room for the next step's only.
PREFETCH = gl.constexpr(3)
# Tiles of M that are multiplied with all tiles of N before the next ones are.
GROUP = gl.constexpr(4)


@dataclass(frozen=True)
class Config:
    """How the product is cut.

    Attributes:
        block_m, block_n, block_k: rows of x, rows of the weight and columns of both in one step. block_m is at least
            16, block_n 64 or 128, block_k 64 or 128.
        split_k: programs that share the sum of a tile.
        stages: steps of x in shared memory.
        unroll: steps between two points where the matrix unit may run dry.
        warps: 4 or 8.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    stages: int = 4
    unroll: int = 2
    warps: int = 4


def default_config(m: int, n: int, k: int) -> Config:
    """A sound choice for up to 64 rows where nobody has measured."""
    block_m = max(16, triton.next_power_of_2(m))
    programs = 3 * 132  # three on each multiprocessor of an H100
    split_k = max(1, min(8, triton.cdiv(programs, triton.cdiv(n, 64)), k // 512))
    return Config(block_m, 64, 128, split_k, stages=5 if block_m < 64 else 4)


@gluon.jit
def _load(words, scale_bytes, step, word_offset, scale_offset, row_tiles, DEPTH: gl.constexpr):
    """Words and scale pairs [DEPTH * NT, 128] of step `step` over K."""
    piece = (step * DEPTH * row_tiles).to(gl.int64)
    return gl.load(words + piece * 128 + word_offset), gl.load(scale_bytes + piece * 32 + scale_offset)


@gluon.jit
def place(tile, tiles_m, tiles_n):
    """tile_m and tile_n of the program or step number `tile`: a few tiles of M at a time with all tiles of N.

    Programs that run together then share both x and the weight in the L2 cache. A tile of x, in 16 bits, takes about
    four times the room of one of the weight, hence only a few.
    """
    group = tile // (GROUP * tiles_n)
    rest = tile - group * (GROUP * tiles_n)
    rows = gl.minimum(tiles_m - group * GROUP, GROUP)
    return group * GROUP + rest % rows, rest // rows


@gluon.jit
def prefetch(pointer, size, REGISTER: gl.constexpr):
    """Brings `size` bytes, whole lines of 16, to the L2 cache; done by the threads whose special `REGISTER` is 0."""
    ASSEMBLY: gl.constexpr = (
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, " + REGISTER + "; setp.eq.u32 first, thread, 0; "
        "@first cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(ASSEMBLY, "=r,l,r", [pointer, size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _prefetch_step(words, scale_bytes, step, row_tile, row_tiles, DEPTH: gl.constexpr, NT: gl.constexpr):
    """Has the codes of a step brought to the L2 cache."""
    piece = (step * DEPTH * row_tiles + row_tile).to(gl.int64)
    for _ in gl.static_range(DEPTH):
        prefetch(words + piece * 128, NT * 512, "%tid.x")
        prefetch(scale_bytes + piece * 32, NT * 64, "%tid.x")
        piece += row_tiles


@gluon.jit
def _decode(words, scale_pairs, FP16: gl.constexpr, DEPTH: gl.constexpr, layout: gl.constexpr):
    """The weight [NT * 16, DEPTH * 64] in the registers where wgmma reads it, times 2^SCALE_EXPONENT or so
    (`decode_words`). Nothing moves between lanes, which `assert_trivial` checks when it compiles."""
    NT: gl.constexpr = words.shape[0] // DEPTH
    values = decode_words(words, scale_pairs, FP16)
    # piece, tile, row, lane % 4, step, row half, column half, column
    values = values.reshape(DEPTH, NT, 8, 4, 4, 2, 2, 2)
    values = values.permute(1, 5, 2, 0, 4, 6, 3, 7).reshape(NT * 16, DEPTH * 64)
    return gl.convert_layout(values, layout, assert_trivial=True)


@gluon.jit
def _store_tile(
    acc, tile_m, tile_n, global_scale, bias, out, row_map, row_weight, M, N,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, dtype: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr,
    acc_layout: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """The epilogue of a finished tile acc [BLOCK_N, BLOCK_M]: scales, bias, activation, router weight, rounding."""
    rows = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, acc_layout))
    acc = acc * UNSCALE * gl.load(global_scale + rows, mask=rows < N, other=0.0)[:, None]
    if bias is not None:
        acc += gl.load(bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    WIDTH: gl.constexpr = BLOCK_N if ACTIVATION is None else BLOCK_N // 2
    if ACTIVATION is not None:
        gate, up = acc.reshape(BLOCK_N // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1).split()
        gate = activate(gate.to(dtype).to(gl.float32), ACTIVATION)
        acc = (gate * up.to(dtype).to(gl.float32)).reshape(WIDTH, BLOCK_M)
        N = N // 2
    if row_weight is not None:
        m_acc = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, acc_layout))
        acc *= gl.load(row_weight + m_acc, mask=m_acc < M, other=0.0)[None, :]
    store_layout: gl.constexpr = gl.BlockedLayout([8, 1], [WIDTH // 8, 256 // WIDTH], [1, num_warps], [0, 1])
    m = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, store_layout))
    n = tile_n * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, store_layout))
    inside = m < M
    if row_map is not None:
        m = gl.load(row_map + m, mask=inside, other=-1)
        inside = m >= 0
    place = m.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(out + place, gl.convert_layout(acc.to(dtype), store_layout), mask=inside[None, :] & (n < N)[:, None])


@gluon.jit
def _store_part(acc, part, rows, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, num_warps: gl.constexpr):
    """A part of a tile's sum, fp32 [BLOCK_M, BLOCK_N], as far as it has rows."""
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, num_warps], [0, 1])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    gl.store(part + m[None, :] * BLOCK_N + n[:, None], gl.convert_layout(acc, layout), mask=(m < rows)[None, :])


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M"])
def nvfp4_wgmma_kernel(
    x, words, scale_bytes, global_scale, bias, out, partial, tile_expert, row_map, row_weight, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr, SPLIT_K: gl.constexpr, STAGES: gl.constexpr,
    UNROLL: gl.constexpr, FP16: gl.constexpr, UNSCALE: gl.constexpr, ACTIVATION: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """One tile of out, or one part of the sum of one.

    x is a descriptor of [M, K]. N is the number of rows of the weight that are stored, a multiple of nothing; the
    packed weight has them padded. With `tile_expert` each tile of M has an expert of its own (-1: no work), and
    `words`, `scale_bytes` and `global_scale` have experts as their leading dimension. With `row_map` row m of the
    result is stored as row row_map[m], or not if that is negative. With ACTIVATION the weight's rows alternate, eight
    of the gate and eight of up, and out is T(activation(T(gate)) * T(up)), [M, N / 2].
    """
    NT: gl.constexpr = BLOCK_N // 16
    BLOCK_K: gl.constexpr = DEPTH * 64
    dtype: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    word_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])

    tiles_m = gl.cdiv(M, BLOCK_M)
    tile_m, tile_n = place(gl.program_id(0) // SPLIT_K, tiles_m, gl.cdiv(N, BLOCK_N))
    split = gl.program_id(0) % SPLIT_K
    row_tiles = (N + 127) // 128 * 8
    if tile_expert is not None:
        expert = gl.load(tile_expert + tile_m)
        if expert < 0:
            return
        pieces = expert.to(gl.int64) * ((K + 127) // 128 * 2) * row_tiles
        words += pieces * 128
        scale_bytes += pieces * 32
        global_scale += expert * N

    # Steps beyond K multiply zeros: the accelerator reads x as zero there.
    last = gl.cdiv(K, BLOCK_K) - 1
    steps = gl.cdiv(last + 1, UNROLL * SPLIT_K) * UNROLL
    first = split * steps
    piece = gl.arange(0, DEPTH * NT, layout=gl.SliceLayout(1, word_layout))
    piece = (piece // NT) * row_tiles + tile_n * NT + piece % NT
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, word_layout))
    word_offset = piece[:, None] * 128 + word[None, :]
    pair = gl.max_contiguous(gl.multiple_of((word >> 4) * 4 + (word & 3), 4), 4)
    scale_offset = piece[:, None] * 32 + pair[None, :]

    ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    # The weight does not depend on the kernels before this one.
    for ahead in gl.static_range(1, PREFETCH):
        _prefetch_step(words, scale_bytes, gl.minimum(first + ahead, last), tile_n * NT, row_tiles, DEPTH, NT)
    codes, pairs = _load(words, scale_bytes, gl.minimum(first, last), word_offset, scale_offset, row_tiles, DEPTH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES - 1):
        wanted = stage < steps
        mbarrier.expect(ready.index(stage), BLOCK_M * BLOCK_K * 2, pred=wanted)
        load_tile(x, [tile_m * BLOCK_M, (first + stage) * BLOCK_K], ready.index(stage), ring.index(stage), pred=wanted)
    operand = _decode(codes, pairs, FP16, DEPTH, operand_layout)
    codes, pairs = _load(words, scale_bytes, gl.minimum(first + 1, last), word_offset, scale_offset, row_tiles, DEPTH)

    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=acc_layout)
    previous = operand
    stage = 0
    phase = 0
    step = first
    for _ in range(0, steps, UNROLL):
        for i in gl.static_range(UNROLL):
            mbarrier.wait(ready.index(stage), phase)
            acc = warpgroup_mma(operand, ring.index(stage).permute((1, 0)), acc, is_async=True)
            if i > 0:
                acc, previous = warpgroup_mma_wait(1, deps=[acc, previous])
            # Past this barrier every warp has finished the step before, so its stage can be filled again.
            cta_barrier()
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            fetched = step + STAGES - 1
            wanted = fetched < first + steps
            mbarrier.expect(ready.index(free), BLOCK_M * BLOCK_K * 2, pred=wanted)
            load_tile(x, [tile_m * BLOCK_M, fetched * BLOCK_K], ready.index(free), ring.index(free), pred=wanted)
            _prefetch_step(words, scale_bytes, gl.minimum(step + PREFETCH, last), tile_n * NT, row_tiles, DEPTH, NT)
            next_codes, next_pairs = _load(
                words, scale_bytes, gl.minimum(step + 2, last), word_offset, scale_offset, row_tiles, DEPTH
            )
            previous = operand
            operand = _decode(codes, pairs, FP16, DEPTH, operand_layout)
            codes = next_codes
            pairs = next_pairs
            step += 1
            stage += 1
            wrapped = stage == STAGES
            phase = gl.where(wrapped, phase ^ 1, phase)
            stage = gl.where(wrapped, 0, stage)
        acc, previous = warpgroup_mma_wait(0, deps=[acc, previous])
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(stage))

    if SPLIT_K > 1:
        slot = ((tile_n * tiles_m + tile_m) * SPLIT_K + split).to(gl.int64) * (BLOCK_M * BLOCK_N)
        _store_part(acc, partial + slot, M - tile_m * BLOCK_M, BLOCK_M, BLOCK_N, num_warps)
    else:
        _store_tile(
            acc, tile_m, tile_n, global_scale, bias, out, row_map, row_weight, M, N,
            BLOCK_M, BLOCK_N, dtype, UNSCALE, ACTIVATION, acc_layout, num_warps,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def add_parts_kernel(
    partial, global_scale, bias, out, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, ROWS: tl.constexpr, UNSCALE: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Adds the parts [tiles, SPLIT_K, BLOCK_M, BLOCK_N] of every tile, in order, and applies the epilogue."""
    if PDL:
        programmatic_launch()
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    rows = (tile % tiles_m) * BLOCK_M + m
    columns = (tile // tiles_m) * BLOCK_N + n
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    part = partial + (tile * SPLIT_K).to(tl.int64) * (BLOCK_M * BLOCK_N) + m[:, None] * BLOCK_N + n[None, :]
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for index in tl.static_range(SPLIT_K):
        total += tl.load(part + index * (BLOCK_M * BLOCK_N), mask=inside, other=0.0)
    total = total * UNSCALE * tl.load(global_scale + columns, mask=columns < N, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


def lines_of_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] of 16-bit values as the tensor memory accelerator can read it, copied only where it must be."""
    if x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(0) < x.shape[1]:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    hardware: Hardware,
    config: Config,
    *,
    tile_expert: torch.Tensor | None = None,
    row_map: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x . weight^T * global_scale + bias: [M, n] in x's dtype, of x [M, K] (bf16 or fp16, contiguous rows).

    words and scale_bytes are of `formats.nvfp4_wgmma.pack`, global_scale is fp32 [n]. The other arguments are those of
    the kernel; `out` is needed where `row_map` scatters rows.
    """
    x = lines_of_16_bytes(x)
    m, k = x.shape
    if out is None:
        out = torch.empty((m, n if activation is None else n // 2), dtype=x.dtype, device=x.device)
    depth = config.block_k // COLUMNS
    tiles_m = triton.cdiv(m, config.block_m)
    tiles = tiles_m * triton.cdiv(n, config.block_n)
    split_k = min(config.split_k, triton.cdiv(k, config.block_k * config.unroll))
    partial = None
    if split_k > 1:
        partial = torch.empty((tiles, split_k, config.block_m, config.block_n), dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout.get_default_for([config.block_m, config.block_k], gl.bfloat16)
    fp16 = x.dtype == torch.float16
    rows_of_x = TensorDescriptor.from_tensor(x, [config.block_m, config.block_k], layout)
    nvfp4_wgmma_kernel[(tiles * split_k,)](
        rows_of_x, words, scale_bytes.view(torch.uint16), global_scale, bias, out, partial,
        tile_expert, row_map, row_weight, m, n, k,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, DEPTH=depth, SPLIT_K=split_k, STAGES=config.stages,
        UNROLL=config.unroll, FP16=fp16, UNSCALE=UNSCALE[fp16], ACTIVATION=activation,
        PDL=hardware.pdl, num_warps=config.warps, **pdl_option(hardware),
    )  # fmt: skip
    if split_k > 1:
        rows = min(config.block_m, 16)
        add_parts_kernel[(tiles, triton.cdiv(min(m, config.block_m), rows))](
            partial, global_scale, bias, out, m, n, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            SPLIT_K=split_k, ROWS=rows, UNSCALE=UNSCALE[fp16], PDL=hardware.pdl, num_warps=4, **pdl_option(hardware),
        )  # fmt: skip
    return out
