# SPDX-License-Identifier: Apache-2.0
"""Matrix product of up to 128 rows of per-token FP8 activations and per-channel FP8 weights on Hopper.

Reading the weight takes the time, so memory must not be idle. Each multiprocessor has one program with a ring of tiles
in nearly all of its shared memory: a producer, one warp, has the tensor memory accelerator fill it, and the consumer
multiplies. The L2 cache is asked for the beginning of the weight before the kernels before have ended. As two programs
have no room beside each other, the next product's comes, and asks for its weight, when one ends, and not before: it
would take memory's time from those that are still at work.

Tiles are as wide as it takes for the multiprocessors to have nearly the same number of columns. The accumulator of a
tile of 80 columns, say, is two, of 64 and of 16. Each tile reads all of x, so they are no narrower than that.
"""

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm_quant_rocm.hardware import Hardware, multiprocessors
from llm_quant_rocm.kernels.hopper import (
    SMS,
    advance,
    behind,
    leave,
    load_tile,
    main_part,
    main_rows,
    reinterpret,
    row_descriptor,
    row_in_tile,
    tile_descriptor,
)
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pdl import pdl_option
from llm_quant_rocm.kernels.ptpc_gemm import rows_of_16_bytes
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2

RING_BYTES = 208 * 1024
# Columns of K that lie side by side in shared memory: a line of 128 bytes.
LINE = 128
# Of each row of the weight, what the L2 cache is asked for early.
EARLY_BYTES = 1024
# Registers that each thread starts with, and of the producer's in the end; the consumer's have what these leave. They
# are not all that there are, so that small kernels between two products can be set up beside them.
REGISTERS, FEW_REGISTERS = 104, 32
MAX_ROWS = 128
BLOCK_NS = (16, 32, 48, 64, 80, 96)


@dataclass(frozen=True)
class Config:
    """How the product is cut.

    Attributes:
        block_n: columns of the result in a tile, one of `BLOCK_NS`: a power of two, or the sum of two.
        block_k: columns of K in a step, 128 or 256.
    """

    block_n: int
    block_k: int


def default_config(m: int, n: int) -> Config:
    """What was best, or nearly, of 22 weights on an H100: the multiprocessor with most tiles has the least to do, where
    one costs what four columns do beside its own; and steps are long, unless the many rows of x leave room for few."""
    block_n = min(BLOCK_NS, key=lambda each: cdiv(cdiv(n, each), SMS) * (each + 4))
    return Config(block_n, 256 if m <= 64 else 128)


def serves(xq: torch.Tensor, wq: torch.Tensor) -> bool:
    """Whether the kernel can compute the product."""
    return xq.shape[0] <= MAX_ROWS and rows_of_16_bytes(xq, wq)


@gluon.jit
def _ask_early(matrix, first, N, K, stride, COUNT: gl.constexpr, BYTES: gl.constexpr):
    """Asks the L2 cache for the first BYTES of COUNT rows of a matrix of bytes, from row `first` on. Nothing is changed
    and no copy kept: it may stand before `gdc_wait` even where the kernels before write there."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = gl.arange(0, gl.num_warps() * 32, layout=layout)
    inside = (row < COUNT) & (first + row < N)
    size = gl.where(inside, gl.minimum(K, BYTES) // 16 * 16, 0)
    place = matrix + gl.where(inside, first + row, 0).to(gl.int64) * stride
    gl.inline_asm_elementwise(
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [place, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _producer(
    x, w, rest_of_w, shared, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, LINES: gl.constexpr,
    PDL: gl.constexpr
):  # fmt: skip
    """Fills the ring, in the order in which the consumer takes it."""
    x_ring, w_ring, rest_ring, ready, empty = shared
    N, K = sizes
    MAIN: gl.constexpr = main_rows(BLOCK_N)
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    LINE: gl.constexpr = x_ring.shape[2]
    HALVES: gl.constexpr = x.block_shape[0]
    HALF: gl.constexpr = x.block_shape[1]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        for k in range(0, K, LINES * LINE):
            filled = ready.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(filled, (BLOCK_M + BLOCK_N) * LINES * LINE)
            for i in gl.static_range(LINES):
                number = stage * LINES + i
                column = k + i * LINE
                load_tile(w, [tile * BLOCK_N, column], filled, w_ring.index(number))
                if MAIN < BLOCK_N:
                    load_tile(rest_of_w, [tile * BLOCK_N + MAIN, column], filled, rest_ring.index(number))
                # The rows of the ring that are beyond x hold anything: what becomes of them is not stored.
                boxes = reinterpret(x_ring.index(number), x.dtype, [ROWS // HALF, HALF, LINE], x.layout)
                load_tile(x, [0, 0, column], filled, boxes.slice(0, HALVES))
            stage, phase = advance(stage, phase, STAGES)
    leave(stage)


@gluon.jit
def _column_scales(w_scale, first, N, COUNT: gl.constexpr, layout: gl.constexpr):
    columns = first + gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))
    return gl.load(w_scale + columns, mask=columns < N, other=0.0)


@gluon.jit
def _store(acc, rows, column_scale, bias, out, first, N):
    """The epilogue of acc, which are the columns of the result from `first` on. `rows`: of each the number, whether it
    is to be stored, and its scale."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row = gl.convert_layout(rows[0], layout, assert_trivial=True)
    inside = gl.convert_layout(rows[1], layout, assert_trivial=True)
    row_scale = gl.convert_layout(rows[2], layout, assert_trivial=True)
    columns = first + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    acc = acc * row_scale[:, None] * column_scale[None, :]
    if bias is not None:
        acc += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    place = out + row.to(gl.int64)[:, None] * N + columns[None, :]
    gl.store(place, acc.to(out.dtype.element_ty), mask=inside[:, None] & (columns < N)[None, :])


@gluon.jit
def _consumer(
    codes, stride, x_scale, w_scale, bias, out, shared, M, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    LINES: gl.constexpr, EARLY_BYTES: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Multiplies x with each tile of the weight."""
    x_ring, w_ring, rest_ring, ready, empty = shared
    N, K = sizes
    MAIN: gl.constexpr = main_rows(BLOCK_N)
    REST: gl.constexpr = BLOCK_N - MAIN if MAIN < BLOCK_N else MAIN  # without a rest not used
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    LINE: gl.constexpr = x_ring.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, MAIN, 32])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, REST, 32])
    if PDL:
        _ask_early(codes, gl.program_id(0) * BLOCK_N, N, K, stride, BLOCK_N, EARLY_BYTES)
        gdc_wait()
    number = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    row = row_in_tile(0, number, M, BLOCK_M)
    inside = (number < BLOCK_M) & (row < M)
    rows = (row, inside, gl.load(x_scale + row, mask=inside, other=0.0))
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        # Asked for before the products, so that the last of these is not followed by a wait for memory.
        scale = _column_scales(w_scale, tile * BLOCK_N, N, MAIN, layout)
        rest_scale = _column_scales(w_scale, tile * BLOCK_N + MAIN, N, REST, rest_layout)
        acc = gl.zeros((ROWS, MAIN), gl.float32, layout=layout)
        rest = gl.zeros((ROWS, REST), gl.float32, layout=rest_layout)
        # A loop that may have no turn would cost copies of acc, with products in flight: there is always one.
        for step in range(0, gl.maximum(gl.cdiv(K, LINES * LINE), 1)):
            mbarrier.wait(ready.index(stage), phase)
            for i in gl.static_range(LINES):
                line = stage * LINES + i
                acc = warpgroup_mma(x_ring.index(line), w_ring.index(line).permute((1, 0)), acc, is_async=True)
                if MAIN < BLOCK_N:
                    rest_of_w = rest_ring.index(line).permute((1, 0))
                    rest = warpgroup_mma(x_ring.index(line), rest_of_w, rest, is_async=True)
            # Then the step before is finished, and its stage free.
            if MAIN < BLOCK_N:
                acc, rest = warpgroup_mma_wait(2 * LINES, deps=[acc, rest])
            else:
                acc = warpgroup_mma_wait(LINES, deps=[acc])
            mbarrier.arrive(empty.index(behind(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = advance(stage, phase, STAGES)
        if MAIN < BLOCK_N:
            acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(behind(stage, STAGES)), count=1)
        _store(acc, rows, scale, bias, out, tile * BLOCK_N, N)
        if MAIN < BLOCK_N:
            _store(rest, rows, rest_scale, bias, out, tile * BLOCK_N + MAIN, N)
    leave(stage)


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@gluon.jit(do_not_specialize=["M"])
def ptpc_wgmma_few_kernel(
    x, w, rest_of_w, codes, stride, x_scale, w_scale, bias, out, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, LINES: gl.constexpr, STAGES: gl.constexpr,
    EARLY_BYTES: gl.constexpr, FEW_REGISTERS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """A program's share of the tiles of out [M, N]. x (`row_descriptor` of BLOCK_M rows), w and rest_of_w, for either
    part of a tile's BLOCK_N columns, are descriptors of E4M3; `codes`, with `stride` bytes a row, is the weight."""
    MAIN: gl.constexpr = main_rows(BLOCK_N)
    LINE: gl.constexpr = w.block_shape[1]
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * LINES, gl.num_warps() * 16, LINE], w.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES * LINES, MAIN, LINE], w.layout)
    if MAIN < BLOCK_N:
        rest_ring = gl.allocate_shared_memory(w.dtype, [STAGES * LINES, BLOCK_N - MAIN, LINE], w.layout)
    else:
        rest_ring = w_ring  # not used
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    shared = (x_ring, w_ring, rest_ring, ready, empty)
    sizes = (N, K)
    # The last two are the rest of the producer's four warps.
    gl.warp_specialize(
        [
            (_consumer, (
                codes, stride, x_scale, w_scale, bias, out, shared, M, sizes, BLOCK_M, BLOCK_N, LINES, EARLY_BYTES, PDL,
            )),
            (_producer, (x, w, rest_of_w, shared, sizes, BLOCK_M, BLOCK_N, LINES, PDL)),
            (leave, (M,)),
            (leave, (M,)),
        ],
        [1, 1, 2],
        [FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
    )  # fmt: skip


def ptpc_wgmma_few(
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
    block_m, block_n, lines = max(8, next_power_of_2(m)), config.block_n, config.block_k // LINE
    # A wgmma multiplies 64 rows at least.
    rows, main = max(64, block_m), main_part(block_n)
    w = tile_descriptor(wq, main, LINE)
    launch(
        ptpc_wgmma_few_kernel, (min(cdiv(n, block_n), multiprocessors(xq.device)),),
        row_descriptor(xq, block_m), w, w if main == block_n else tile_descriptor(wq, block_n - main, LINE),
        wq.view(torch.uint8), wq.stride(0), xscale, wscale, bias, out, m, n, k,
        BLOCK_M=block_m, BLOCK_N=block_n, LINES=lines, STAGES=RING_BYTES // ((rows + block_n) * LINE * lines),
        EARLY_BYTES=EARLY_BYTES, FEW_REGISTERS=FEW_REGISTERS, PDL=hardware.pdl,
        num_warps=rows // 16, maxnreg=REGISTERS, **pdl_option(hardware),
    )  # fmt: skip
    return out
