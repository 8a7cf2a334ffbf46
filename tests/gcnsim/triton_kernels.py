# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that are not of this project, compiled for an AMD GPU in a process of their own.

`python triton_kernels.py ARCH` prints as JSON, by name, the assembly of every entry of KERNELS, its LDS and its warps.
"""

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl


@triton.jit
def vadd(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def vadd_without_mask(x, y, out, n, BLOCK: tl.constexpr):
    """Reads and writes beyond the end where BLOCK does not divide n."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * columns + i, powers / tl.sum(powers, axis=0), mask=i < columns)


@triton.jit
def histogram(x, out, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Of each block in LDS, then into the total by atomics."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(tl.load(x + i, mask=i < n, other=0), BINS, mask=i < n)
    tl.atomic_add(out + tl.arange(0, BINS), counts)


@triton.jit
def scatter_add(x, where, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(where + i, mask=i < n), tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def sort_and_scan(x, ordered, sums, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, COLUMNS)
    values = tl.load(x + row * COLUMNS + i)
    tl.store(ordered + row * COLUMNS + i, tl.sort(values))
    tl.store(sums + row * COLUMNS + i, tl.cumsum(values, axis=0))


@triton.jit
def gemm(
    a, b, c, m, n, k, TRANSPOSED: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """c [m, n] = a [m, k] times b, which is [k, n] or, with TRANSPOSED, [n, k]."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    total = tl.zeros((BM, BN), OUT)
    for start in range(0, k, BK):
        inside = start + step < k
        left = tl.load(a + row[:, None] * k + start + step, mask=(row < m)[:, None] & inside, other=0.0)
        if TRANSPOSED:
            right = tl.load(b + column[:, None] * k + start + step, mask=(column < n)[:, None] & inside, other=0.0).T
        else:
            right = tl.load(b + (start + step)[:, None] * n + column, mask=inside[:, None] & (column < n), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=OUT)
    tl.store(c + row[:, None] * n + column, total.to(c.dtype.element_ty), mask=(row < m)[:, None] & (column < n))


@triton.jit
def scaled_gemm(
    a,
    a_scale,
    b,
    b_scale,
    c,
    K: tl.constexpr,
    KIND_A: tl.constexpr,
    KIND_B: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile: MX formats with a scale for each 32 along K. FP4 is packed in pairs, low half first."""
    row, column, blocks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, K // 32)
    bytes_a: tl.constexpr = K // 2 if KIND_A == "e2m1" else K
    bytes_b: tl.constexpr = K // 2 if KIND_B == "e2m1" else K
    left = tl.load(a + row[:, None] * bytes_a + tl.arange(0, bytes_a))
    right = tl.load(b + column[:, None] * bytes_b + tl.arange(0, bytes_b)).T
    left_scale = tl.load(a_scale + row[:, None] * (K // 32) + blocks)
    right_scale = tl.load(b_scale + column[:, None] * (K // 32) + blocks)
    total = tl.dot_scaled(left, left_scale, KIND_A, right, right_scale, KIND_B)
    tl.store(c + row[:, None] * BN + column, total)


@triton.jit
def scaled_gemm_by_rows(a, a_scale, b, b_scale, c, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """FP4 by FP4, with b [K, N] packed along N, which the matrix instructions want transposed."""
    row, column, blocks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, K // 32)
    left = tl.load(a + row[:, None] * (K // 2) + tl.arange(0, K // 2))
    right = tl.load(b + tl.arange(0, K)[:, None] * (BN // 2) + tl.arange(0, BN // 2))
    left_scale = tl.load(a_scale + row[:, None] * (K // 32) + blocks)
    right_scale = tl.load(b_scale + column[:, None] * (K // 32) + blocks)
    total = tl.dot_scaled(left, left_scale, "e2m1", right, right_scale, "e2m1", rhs_k_pack=False)
    tl.store(c + row[:, None] * BN + column, total)


@triton.jit
def exchange(mine, other, out, SIGNAL: tl.constexpr, WAIT: tl.constexpr, BLOCK: tl.constexpr):
    """Two ranks: send a block to the other, raise its flag, wait for one's own. Word 0 of each buffer is the flag."""
    i = tl.arange(0, BLOCK)
    tl.store(other + 16 + i, tl.load(mine + 16 + BLOCK + i))
    tl.debug_barrier()
    if SIGNAL:
        tl.atomic_xchg(other, 1, sem="release", scope="sys")
    if WAIT:
        while tl.atomic_add(mine, 0, sem="acquire", scope="sys") < 1:
            pass
        tl.debug_barrier()
    tl.store(out + i, tl.load(mine + 16 + i, volatile=True) + tl.load(mine + 16 + BLOCK + i))


@triton.jit
def programs(out):
    """Which program of how many."""
    place = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    tl.store(out + place, tl.num_programs(0) * 100 + tl.num_programs(1) * 10 + tl.num_programs(2))


@dataclass(frozen=True)
class Kernel:
    """What to compile: `types` of the arguments that are no constants, in their order."""

    function: Any
    types: tuple[str, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def tile(bm: int, bn: int, bk: int, out: Any, transposed: bool) -> dict[str, Any]:
    return {"BM": bm, "BN": bn, "BK": bk, "OUT": out, "TRANSPOSED": transposed}


def matmul(kind: str, result: str, constants: dict[str, Any], **options: Any) -> Kernel:
    return Kernel(gemm, (f"*{kind}", f"*{kind}", f"*{result}", "i32", "i32", "i32"), constants, options)


def between_ranks(signal: bool, wait: bool) -> Kernel:
    return Kernel(exchange, ("*i32", "*i32", "*i32"), {"SIGNAL": signal, "WAIT": wait, "BLOCK": 512})


FP8 = {"gfx942": "fp8e4b8", "gfx950": "fp8e4nv"}


def kernels(arch: str) -> dict[str, Kernel]:
    small, square = {"matrix_instr_nonkdim": 16}, {"matrix_instr_nonkdim": 32}
    chosen = {
        "vadd": Kernel(vadd, ("*fp32", "*fp32", "*fp32", "i32"), {"BLOCK": 256}),
        "vadd_without_mask": Kernel(vadd_without_mask, ("*fp32", "*fp32", "*fp32", "i32"), {"BLOCK": 256}),
        "softmax": Kernel(softmax, ("*fp32", "*fp32", "i32"), {"BLOCK": 2048}, {"num_warps": 8}),
        "softmax_fp16": Kernel(softmax, ("*fp16", "*fp16", "i32"), {"BLOCK": 512}, {"num_warps": 2}),
        "histogram": Kernel(histogram, ("*i32", "*i32", "i32"), {"BINS": 64, "BLOCK": 1024}),
        "scatter_add": Kernel(scatter_add, ("*fp32", "*i32", "*fp32", "i32"), {"BLOCK": 256}),
        "sort_and_scan": Kernel(sort_and_scan, ("*i32", "*i32", "*i32"), {"COLUMNS": 512}),
        "gemm_fp16": matmul("fp16", "fp32", tile(64, 64, 32, tl.float32, True), num_stages=2, **small),
        "gemm_fp16_plain": matmul("fp16", "fp32", tile(64, 64, 32, tl.float32, False), num_stages=1, **square),
        "gemm_bf16": matmul("bf16", "fp32", tile(64, 128, 64, tl.float32, False), num_stages=2, **square),
        "gemm_int8": matmul("i8", "i32", tile(64, 64, 64, tl.int32, True), num_stages=2, **small),
        "gemm_int8_plain": matmul("i8", "i32", tile(128, 64, 64, tl.int32, False), num_warps=8, **square),
        "gemm_fp32": matmul("fp32", "fp32", tile(32, 32, 32, tl.float32, False), num_warps=1),
        "gemm_that_spills": matmul("fp16", "fp32", tile(256, 256, 64, tl.float32, True), num_warps=4, num_stages=1),
        "exchange": between_ranks(signal=True, wait=True),
        "exchange_without_signal": between_ranks(signal=False, wait=True),
        "exchange_without_wait": between_ranks(signal=True, wait=False),
        "programs": Kernel(programs, ("*i32",)),
    }
    if kind := FP8.get(arch):
        chosen["gemm_fp8"] = matmul(kind, "fp32", tile(64, 64, 128, tl.float32, True), num_stages=2, **small)
        chosen["gemm_fp8_plain"] = matmul(kind, "fp32", tile(64, 64, 128, tl.float32, False), num_stages=1, **square)
    if arch == "gfx950":
        for left, right in (("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e5m2", "e4m3")):
            constants = {"K": 256, "KIND_A": left, "KIND_B": right, "BM": 32, "BN": 64}
            types = ("*u8", "*u8", "*u8", "*u8", "*fp32")
            for name, shape in (("16x16", small), ("32x32", square)):
                chosen[f"mx_{left}_{right}_{name}"] = Kernel(scaled_gemm, types, constants, shape)
        chosen["mx_by_rows"] = Kernel(scaled_gemm_by_rows, types, {"K": 256, "BM": 32, "BN": 64}, small)
    return chosen


def compiled(arch: str) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    results = {}
    for name, kernel in kernels(arch).items():
        names = kernel.function.arg_names
        given = iter(kernel.types)
        signature = {n: "constexpr" if n in kernel.constants else next(given) for n in names}
        # What the JIT finds out about tensors: aligned, and smaller than 2 GiB.
        hints = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
        pointers = {(n,): hints for n, kind in enumerate(signature.values()) if kind.startswith("*")}
        source = ASTSource(
            kernel.function, signature, {(names.index(n),): v for n, v in kernel.constants.items()}, pointers
        )
        binary = triton.compile(source, target=GPUTarget("hip", arch, 64), options=kernel.options)
        results[name] = {
            "assembly": binary.asm["amdgcn"],
            "lds": binary.metadata.shared,
            "warps": binary.metadata.num_warps,
        }
    return results


if __name__ == "__main__":
    json.dump(compiled(sys.argv[1]), sys.stdout)
