# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that are not of this project, compiled for an AMD GPU in a process of their own.

`triton_kernels.py ARCH` prints, as JSON, the assembly and the LDS of every kernel below.
"""

import triton
import triton.language as tl


@triton.jit
def vadd(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def gemm(a, b, c, m, n, k, OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c [m, n] = a [m, k] times the transpose of b [n, k]."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    total = tl.zeros((BM, BN), OUT)
    for start in range(0, k, BK):
        inside = start + step < k
        rows = tl.load(a + row[:, None] * k + start + step, mask=(row < m)[:, None] & inside, other=0.0)
        columns = tl.load(b + column[:, None] * k + start + step, mask=(column < n)[:, None] & inside, other=0.0)
        total = tl.dot(rows, columns.T, total, out_dtype=OUT)
    place = c + row[:, None] * n + column
    tl.store(place, total.to(c.dtype.element_ty), mask=(row < m)[:, None] & (column < n))
