# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product of per-token FP8 activations and per-channel FP8 weights on Hopper: each tile of rows has its
own expert's weight.

The product is computed transposed, out^T = W . x^T, so that the weight fills the matrix unit's long side and a tile may
have as few rows of x as an expert has. Each multiprocessor has one program all the time, which walks over tiles. A
producer, one warp, has the tensor memory accelerator fill a ring in shared memory with tiles of both; two consumers,
four warps each, multiply one half of a tile's rows of the weight each. The consumers do not wait for each other: while
one stores its result, the matrix units have the other's work. What a tile's epilogue needs of memory is asked for
before its products.
"""

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm_quant_rocm.hardware import Hardware, multiprocessors
from llm_quant_rocm.kernels.activate import activate
from llm_quant_rocm.kernels.hopper import (
    acc_layout_of,
    advance,
    init_ring,
    leave,
    load_tile,
    multiply_steps,
    place,
    rounded,
    store_through,
    tile_descriptor,
)
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pdl import pdl_option
from llm_quant_rocm.kernels.routing import Schedule

# Of shared memory, for the ring and what is stored from.
SHARED_BYTES = 225 * 1024
BLOCK_K = 128
# Rows of the weight whose products a consumer stores at a time, and that a copy brings.
STORE = 64
# Registers of a consumer's threads. The four warps of the producer have what is left of 504.
REGISTERS = 224


@dataclass(frozen=True)
class Config:
    """How the product is cut.

    Attributes:
        block_m, block_n: rows of x, 8 to 128, and of the weight, 128 or 256, in a tile.
    """

    block_m: int
    block_n: int

    @property
    def fuses(self) -> bool:
        """Whether the epilogue can apply an activation: a consumer has rows of the gate and as many of up."""
        return self.block_n == 256


@gluon.jit
def _corner(item, tiles_m, tiles_n, tile_expert, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Where the tile number `item` begins: its row of x, its row of the weight of its expert, and that expert's row."""
    tile_m, tile_n = place(item, tiles_m, tiles_n)
    return tile_m * BLOCK_M, tile_n * BLOCK_N, gl.load(tile_expert + tile_m) * N


@gluon.jit
def _row_of_weight(n, row, N, ACTIVATION: gl.constexpr):
    """Which row of an expert's weight is row `row` of the tile that begins at n. If an activation follows, 64 rows of
    the gate, the expert's first half, and 64 of up take turns."""
    if ACTIVATION is not None:
        return n // 2 + row // 128 * 64 + row % 64 + row // 64 % 2 * (N // 2)
    else:
        return n + row


@gluon.jit
def _load_weight(w, w_ring, ready, stage, first, n, k, N, ACTIVATION: gl.constexpr):
    """Has the accelerator bring a step of the weight, 64 rows at a time."""
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    for row in gl.static_range(0, BLOCK_N, 64):
        rows = w_ring.index(stage).slice(row, 64)
        load_tile(w, [first + _row_of_weight(n, row, N, ACTIVATION), k], ready.index(stage), rows)


@gluon.jit
def _producer(
    x, w, routing, shared, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Fills the ring, in the order in which the consumers take it."""
    tile_expert, tile_count = routing
    x_ring, w_ring, ready, empty, started = shared
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    STAGE_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K
    init_ring(ready, empty, started, 2)
    # The experts of tiles do not depend on the kernel just before this one, nor does the weight on any.
    tiles_m = gl.load(tile_count)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    total = gl.cdiv(tiles_m * tiles_n - gl.program_id(0), gl.num_programs(0)) * steps
    for index in range(0, gl.minimum(total, STAGES)):
        item = gl.program_id(0) + index // steps * gl.num_programs(0)
        _, n, first = _corner(item, tiles_m, tiles_n, tile_expert, N, BLOCK_M, BLOCK_N)
        mbarrier.expect(ready.index(index), STAGE_BYTES)
        _load_weight(w, w_ring, ready, index, first, n, index % steps * BLOCK_K, N, ACTIVATION)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for index in range(0, gl.minimum(total, STAGES)):
        item = gl.program_id(0) + index // steps * gl.num_programs(0)
        m, _, _ = _corner(item, tiles_m, tiles_n, tile_expert, N, BLOCK_M, BLOCK_N)
        load_tile(x, [m, index % steps * BLOCK_K], ready.index(index), x_ring.index(index))
    stage = 0
    phase = 0
    for index in range(STAGES, total):
        item = gl.program_id(0) + index // steps * gl.num_programs(0)
        m, n, first = _corner(item, tiles_m, tiles_n, tile_expert, N, BLOCK_M, BLOCK_N)
        k = index % steps * BLOCK_K
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready.index(stage), STAGE_BYTES)
        _load_weight(w, w_ring, ready, stage, first, n, k, N, ACTIVATION)
        load_tile(x, [m, k], ready.index(stage), x_ring.index(stage))
        stage, phase = advance(stage, phase, STAGES)
    leave(stage)


@gluon.jit
def _store(acc, m, n, out, staging):
    """Stores acc^T, whose corner in the result is [m, n], as many rows of acc at a time as `staging` has room for."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc_layout_of(COLUMNS, fp8=True)
    if staging.shape[1] < ROWS:
        upper, lower = acc.reshape(2, ROWS // 2, COLUMNS).permute(1, 2, 0).split()
        _store(upper, m, n, out, staging)
        _store(lower, m, n + ROWS // 2, out, staging)
    else:
        acc = gl.convert_layout(acc, layout, assert_trivial=True)
        tma.store_wait(0)
        store_through(staging, acc.to(out.dtype).permute((1, 0)), out, [m, n])


@gluon.jit
def _consumer(
    HALF: gl.constexpr, x_scale, w_scale, row_weight, out, routing, shared, staging, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Multiplies half of each tile's rows of the weight, the upper (0) or the lower ones (1), with its rows of x."""
    tile_expert, tile_count = routing
    x_ring, w_ring, ready, empty, started = shared
    ROWS: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = acc_layout_of(BLOCK_M, fp8=True)
    tiles_m = gl.load(tile_count)
    tiles_n = gl.cdiv(N, BLOCK_N)
    stage = 0
    phase = 0
    mbarrier.wait(started, 0)
    if PDL:
        gdc_wait()  # for the scales of x: the producer's wait does not hold back these warps
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n, first = _corner(item, tiles_m, tiles_n, tile_expert, N, BLOCK_M, BLOCK_N)
        columns = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
        rows_of_tile = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        rows_of_w = _row_of_weight(n, rows_of_tile, N, ACTIVATION)
        scale_of_x = gl.load(x_scale + columns)
        scale_of_w = gl.load(w_scale + first + rows_of_w, mask=rows_of_w < N, other=0.0)
        if row_weight is not None:
            scale_of_x *= gl.load(row_weight + columns)
        acc = gl.zeros((ROWS, BLOCK_M), gl.float32, layout=layout)
        acc, stage, phase = multiply_steps(acc, w_ring, x_ring, ready, empty, stage, phase, K, HALF)
        acc = acc * scale_of_x[None, :] * scale_of_w[:, None]
        if ACTIVATION is None:
            _store(acc, m, n + HALF * ROWS, out, staging.index(HALF))
        else:
            gate, up = acc.reshape(2, ROWS // 2, BLOCK_M).permute(1, 2, 0).split()
            gate = activate(rounded(gate, out.dtype), ACTIVATION)
            _store(gate * rounded(up, out.dtype), m, n // 2 + HALF * 64, out, staging.index(HALF))
    tma.store_wait(0)
    leave(stage)


@gluon.jit
def ptpc_wgmma_grouped_kernel(
    x, w, x_scale, w_scale, row_weight, out, tile_expert, tile_count, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """A program's share of the tiles of out. x, w and out are descriptors, of E4M3 and of 16-bit values T; w is of the
    rows of all experts, N of each. With an ACTIVATION those are the gate's and up's, and out, [rows, N / 2], is
    T(activation(T(gate)) * T(up))."""
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_N, BLOCK_K], w.layout)
    staging = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # The producer initializes the ring's.
    started = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(started, count=1)
    routing = (tile_expert, tile_count)
    shared = (x_ring, w_ring, ready, empty, started)
    # The last two are the rest of the producer's four warps.
    gl.warp_specialize(
        [
            (_consumer, (
                gl.constexpr(0), x_scale, w_scale, row_weight, out, routing, shared, staging, N, K,
                BLOCK_M, BLOCK_N, STAGES, ACTIVATION, PDL,
            )),
            (_consumer, (
                gl.constexpr(1), x_scale, w_scale, row_weight, out, routing, shared, staging, N, K,
                BLOCK_M, BLOCK_N, STAGES, ACTIVATION, PDL,
            )),
            (_producer, (x, w, routing, shared, N, K, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, PDL)),
            (leave, (N,)),
            (leave, (N,)),
        ],
        [4, 1, 1, 2],
        [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


def grouped_gemm(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    routing: Schedule,
    row_weight: torch.Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
    hardware: Hardware,
    config: Config,
) -> torch.Tensor:
    """Product [rows, N] in `dtype`, of 16 bits, of each tile of rows of xq [rows, K] with its expert's weight.

    wq [E, N, K], contiguous; K and N are multiples of 16. xscale [rows, 1], wscale [E, N, 1] and, if there is one,
    row_weight [rows] are factors. `routing` has tiles of config.block_m rows. With an activation, for a configuration
    that `fuses` it, the first half of an expert's rows is the gate and the second up: [rows, N / 2]. Rows that no slot
    has come out as anything.

    Between `schedule` and this call stands a kernel that waits for what comes before it, as `ptpc_moe_hopper` has them:
    programs read the schedule before they wait for the kernel before them.
    """
    rows, k = xq.shape
    n = wq.shape[1]
    out = torch.empty((rows, n if activation is None else n // 2), dtype=dtype, device=xq.device)
    block_m, block_n = config.block_m, config.block_n
    ring_bytes = SHARED_BYTES - 2 * block_m * STORE * out.element_size()
    launch(
        ptpc_wgmma_grouped_kernel, (multiprocessors(xq.device),),
        tile_descriptor(xq, block_m, BLOCK_K), tile_descriptor(wq.view(-1, k), STORE, BLOCK_K), xscale, wscale,
        row_weight, tile_descriptor(out, block_m, STORE), routing.tile_expert, routing.tile_count, n, k,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, STAGES=ring_bytes // ((block_m + block_n) * BLOCK_K),
        ACTIVATION=activation, REGISTERS=REGISTERS, PDL=hardware.pdl, num_warps=4, **pdl_option(hardware),
    )  # fmt: skip
    return out
