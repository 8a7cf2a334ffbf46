# SPDX-License-Identifier: Apache-2.0
"""Kernels that are not the library's: what the launcher must run rightly, and what it and the budgets must catch."""

import triton
import triton.language as tl

from llm_quant_rocm.kernels import wire_units


@triton.jit
def softmax(x_ptr, y_ptr, columns, stride, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * columns + column, e / tl.sum(e, axis=0), mask=column < columns)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           B_BY_COLUMN: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """c [M, N] = a [M, K] . b, with b [K, N] stored by rows or by columns; K a multiple of BLOCK_K."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + row[:, None] * K + k[None, :], mask=row[:, None] < M, other=0)
        place = k[:, None] + column[None, :] * K if B_BY_COLUMN else k[:, None] * N + column[None, :]
        acc = tl.dot(a, tl.load(b_ptr + place, mask=column[None, :] < N, other=0), acc, out_dtype=ACC)
    place = row[:, None] * N + column[None, :]
    tl.store(c_ptr + place, acc.to(c_ptr.dtype.element_ty), mask=(row[:, None] < M) & (column[None, :] < N))


@triton.jit
def histogram(x_ptr, count_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    tl.atomic_add(count_ptr + tl.load(x_ptr + place, mask=inside, other=0), 1, mask=inside)


@triton.jit
def copy_unmasked(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Reads and writes BLOCK elements, whatever there is."""
    place = tl.arange(0, BLOCK)
    tl.store(y_ptr + place, tl.load(x_ptr + place))


@triton.jit
def exchange(mine_ptr, theirs_ptr, my_flag_ptr, their_flag_ptr, out_ptr, WAIT: tl.constexpr, BLOCK: tl.constexpr):
    """One rank: shows a block to its peer, waits for the peer's, and adds both."""
    place = tl.arange(0, BLOCK)
    tl.store(mine_ptr + place, place + 1)
    tl.debug_barrier()
    tl.atomic_xchg(my_flag_ptr, 1, sem="release", scope="sys")
    if WAIT:
        while tl.atomic_add(their_flag_ptr, 0, sem="acquire", scope="sys") == 0:
            pass
    tl.debug_barrier()
    tl.store(out_ptr + place, place + 1 + tl.load(theirs_ptr + place))


@triton.jit
def exchange_on_one_gpu(my_flag_ptr, their_flag_ptr):
    """The flags of `exchange` with the scope of one GPU, too narrow for a peer."""
    tl.atomic_xchg(my_flag_ptr, 1, sem="release", scope="gpu")
    while tl.atomic_add(their_flag_ptr, 0, sem="acquire", scope="gpu") == 0:
        pass


@triton.jit
def spin_on_a_variable(flag_ptr, wanted):
    """Triton 3.6.0 makes a loop with two entries of this: the lanes that do not read wait for the one that does."""
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while seen < wanted:
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def count_to(count_ptr, turns):
    """Keeps a rank busy."""
    for _ in range(turns):
        tl.atomic_add(count_ptr, 1)


@triton.jit
def there_and_back(
    x_ptr, buffers_ptr, y_ptr, PIECE_BYTES: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
    CAP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Encodes a buffer of GROUPS groups for each program, and decodes it, rounded to T, once it is stored."""
    UNIT: tl.constexpr = wire_units.unit_values(LOW)
    words = tl.program_id(0) * GROUPS * 16
    buffer = buffers_ptr.to(tl.int64, bitcast=True) + tl.program_id(0) * PIECE_BYTES
    x = wire_units.load_eights(x_ptr.to(tl.pointer_type(tl.int32)) + words, GROUPS * 32 // UNIT, UNIT // 8)
    parts = wire_units.encode(x, KIND, LIMIT, CAP, LOW, HIGH, T)
    wire_units.store_parts(buffer, parts, LOW, HIGH, GROUPS)
    tl.debug_barrier()
    pairs = wire_units.decode(buffer, KIND, LIMIT, LOW, HIGH, T, T, GROUPS)
    wire_units.store_words(y_ptr.to(tl.pointer_type(tl.int32)) + words, pairs)
