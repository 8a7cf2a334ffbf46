# SPDX-License-Identifier: Apache-2.0
"""Matrix product of many rows of per-token FP8 activations and per-channel FP8 weights on Hopper, its warps
specialized.

Each multiprocessor has one program all the time, which walks over tiles. A producer, one warp, has the tensor memory
accelerator fill a ring in shared memory with tiles of x and of the weight; two consumers, four warps each, multiply
one half of a tile's rows of x each. The consumers do not wait for each other, and the producer is as many steps ahead
as the ring is long: while one consumer applies the scales and stores its result, the matrix units have the other's
work, and the next tile's loads go on.

Where the tiles of the last wave are half as many as there are multiprocessors, or fewer, each is two programs': one
consumer of either multiplies, in little more than half of the time.
"""

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm_quant_rocm.hardware import Hardware, multiprocessors
from llm_quant_rocm.kernels.hopper import (
    SMS,
    acc_layout_of,
    advance,
    first_row,
    leave,
    load_rows,
    load_tile,
    multiply_steps,
    place,
    row_descriptor,
    row_in_tile,
    store_through,
    tile_descriptor,
)
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pdl import pdl_option_of_tiles
from llm_quant_rocm.kernels.ptpc_gemm import rows_of_16_bytes
from llm_quant_rocm.kernels.sizes import cdiv

RING_BYTES = 192 * 1024
BLOCK_K = 128
# Rows and columns of the result that a consumer stores at a time.
STORE = (64, 128)
# Registers of a consumer's threads. The four warps of the producer have what is left of 504.
REGISTERS = 240


@dataclass(frozen=True)
class Config:
    """How the product is cut.

    Attributes:
        block_m, block_n: rows of x and of the weight in a tile, 128 or 256 each; not both 256.
        group_m: tiles of M that run together over the same columns, for the L2 cache.
    """

    block_m: int
    block_n: int
    group_m: int


def default_config(m: int, n: int) -> Config:
    """A sound choice for shapes that nobody has measured."""
    return min(Config(128, 256, 16), Config(128, 128, 16), key=lambda config: waves(config, m, n))


def waves(config: Config, m: int, n: int) -> float:
    """How long an H100 takes, in waves of tiles of 128 x 128, for tiles of 128 rows.

    The two numbers fit whole layers, quantization included, of 72 to 4096 rows and 20 weights: the choice was slower
    than the better tile by 0.3% on average, by 16% at most, compared by hand.
    """
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    whole = whole_tiles(tiles, SMS)
    count = cdiv(whole, SMS) + (0.7 if whole < tiles else 0)
    return count if config.block_n == 128 else 1.85 * count


def whole_tiles(tiles: int, programs: int) -> int:
    """How many of the tiles are one program's each: those of a last wave that is half empty or more are two
    programs'."""
    last = tiles % programs
    return tiles - last if 2 * last <= programs else tiles


def serves(xq: torch.Tensor, wq: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the kernel can compute the product: the tensor memory accelerator reads and writes rows of 16-byte
    lines, and shared memory has no room for an fp32 result beside the ring."""
    return out_dtype.itemsize == 2 and wq.shape[0] % 8 == 0 and rows_of_16_bytes(xq, wq)


@gluon.jit
def _tile_of(piece, whole):
    """The tile of a piece of work, and which consumer has it, 0 or 1, or both (2): from number `whole` on there are two
    pieces to a tile."""
    rest = piece - whole
    return gl.where(rest < 0, piece, whole + rest // 2), gl.where(rest < 0, 2, rest % 2)


@gluon.jit
def _producer(
    x, w, x_ring, w_ring, ready, empty, M, N, K, whole,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Fills the ring, in the order in which the consumers take it."""
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    stage = 0
    phase = 1
    for piece in range(gl.program_id(0), 2 * tiles_m * tiles_n - whole, gl.num_programs(0)):
        tile, _ = _tile_of(piece, whole)
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_K)
            load_rows(x, first_row(tile_m, M, BLOCK_M), k, ready.index(stage), x_ring.index(stage))
            load_tile(w, [tile_n * BLOCK_N, k], ready.index(stage), w_ring.index(stage))
            stage, phase = advance(stage, phase, STAGES)
    leave(stage)


@gluon.jit
def _store(acc, m, n, x_scale, w_scale, bias, out, staging, M, N):
    """The epilogue of acc, whose corner in the result is [m, n], as much at a time as `staging` has room for."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc_layout_of(staging.shape[1], fp8=True)
    if staging.shape[0] < ROWS:
        upper, lower = acc.reshape(2, ROWS // 2, COLUMNS).permute(1, 2, 0).split()
        _store(upper, m, n, x_scale, w_scale, bias, out, staging, M, N)
        _store(lower, m + ROWS // 2, n, x_scale, w_scale, bias, out, staging, M, N)
    elif staging.shape[1] < COLUMNS:
        left, right = acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        _store(left, m, n, x_scale, w_scale, bias, out, staging, M, N)
        _store(right, m, n + COLUMNS // 2, x_scale, w_scale, bias, out, staging, M, N)
    else:
        acc = gl.convert_layout(acc, layout, assert_trivial=True)
        rows = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        columns = n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        acc *= gl.load(x_scale + rows, mask=rows < M, other=0.0)[:, None]
        acc *= gl.load(w_scale + columns, mask=columns < N, other=0.0)[None, :]
        if bias is not None:
            acc += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        tma.store_wait(0)
        store_through(staging, acc.to(out.dtype), out, [m, n])


@gluon.jit
def _consumer(
    x_scale, w_scale, bias, out, x_ring, w_ring, staging, ready, empty, M, N, K, whole, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Multiplies half of each tile's rows of x, the upper (0) or the lower ones (1), with its rows of the weight."""
    ROWS: gl.constexpr = BLOCK_M // 2
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    layout: gl.constexpr = acc_layout_of(BLOCK_N, fp8=True)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    stage = 0
    phase = 0
    for piece in range(gl.program_id(0), 2 * tiles_m * tiles_n - whole, gl.num_programs(0)):
        tile, consumer = _tile_of(piece, whole)
        if consumer == 1 - HALF:
            for _ in range(0, gl.cdiv(K, BLOCK_K)):
                mbarrier.wait(ready.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
        else:
            acc = gl.zeros((ROWS, BLOCK_N), gl.float32, layout=layout)
            acc, stage, phase = multiply_steps(acc, x_ring, w_ring, ready, empty, stage, phase, K, HALF)
            tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP_M)
            # Rows that are in two tiles, or twice in one, are stored twice, with the same bits.
            m = row_in_tile(tile_m, HALF * ROWS, M, BLOCK_M)
            _store(acc, m, tile_n * BLOCK_N, x_scale, w_scale, bias, out, staging.index(HALF), M, N)
    tma.store_wait(0)
    leave(stage)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M", "whole"])
def ptpc_wgmma_kernel(
    x, w, x_scale, w_scale, bias, out, M, N, K, whole,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """A program's share of the tiles of out, of which those from number `whole` on are two programs' each. x
    (`row_descriptor`), w and out are descriptors, of E4M3 and of 16-bit values."""
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], w.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_N, BLOCK_K], w.layout)
    staging = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    # The last two are the rest of the producer's four warps.
    gl.warp_specialize(
        [
            (_consumer, (
                x_scale, w_scale, bias, out, x_ring, w_ring, staging, ready, empty, M, N, K, whole, gl.constexpr(0),
                BLOCK_M, BLOCK_N, GROUP_M, STAGES,
            )),
            (_consumer, (
                x_scale, w_scale, bias, out, x_ring, w_ring, staging, ready, empty, M, N, K, whole, gl.constexpr(1),
                BLOCK_M, BLOCK_N, GROUP_M, STAGES,
            )),
            (_producer, (x, w, x_ring, w_ring, ready, empty, M, N, K, whole, BLOCK_M, BLOCK_N, GROUP_M, STAGES, PDL)),
            (leave, (M,)),
            (leave, (M,)),
        ],
        [4, 1, 1, 2],
        [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


def ptpc_wgmma(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    hardware: Hardware,
    config: Config,
) -> torch.Tensor:
    """Product [M, N] of xq [M, K] and wq [N, K]; xscale [M, 1], wscale [N, 1], bias [N]. It must be one that the kernel
    `serves`."""
    (m, k), n = xq.shape, wq.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=xq.device)
    block_m, block_n = config.block_m, config.block_n
    tiles, programs = cdiv(m, block_m) * cdiv(n, block_n), multiprocessors(xq.device)
    whole = whole_tiles(tiles, programs)
    pieces = 2 * tiles - whole
    launch(
        ptpc_wgmma_kernel, (min(pieces, programs),),
        row_descriptor(xq, block_m), tile_descriptor(wq, block_n, BLOCK_K), xscale, wscale, bias,
        tile_descriptor(out, *STORE), m, n, k, whole,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, GROUP_M=config.group_m,
        STAGES=RING_BYTES // ((block_m + block_n) * BLOCK_K), REGISTERS=REGISTERS, PDL=hardware.pdl,
        num_warps=4, **pdl_option_of_tiles(hardware, pieces, k),
    )  # fmt: skip
    return out
