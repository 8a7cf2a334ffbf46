# SPDX-License-Identifier: Apache-2.0
"""Whole Triton kernels, compiled for each architecture and run against numpy: softmax, GEMMs, histogram, sort.

And what is wrong with some of them: out of bounds, a rank that never signals, spilled registers.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gcnsim
import ml_dtypes
import numpy as np
import pytest

from tests.gcnsim.harness import ARCHS

pytest.importorskip("triton")
HERE = Path(__file__).parent
OUTPUT = object()  # in place of an argument: memory that nobody wrote yet
arch_by_arch = pytest.mark.parametrize("arch", ARCHS)


@dataclass(frozen=True)
class Compiled:
    program: gcnsim.Program
    lds: int
    warps: int

    def launch(self, grid, arguments, name=""):
        return gcnsim.Launch(self.program, grid, self.warps, arguments, self.lds, name)


@functools.cache
def compile_all(arch):
    """All kernels of triton_kernels.py, by one process, which a crash of the compiler would end instead of this one."""
    cache = os.environ.get("TRITON_CACHE_DIR", str(HERE.parents[1] / ".pytest_cache" / "triton"))
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", str(HERE / "triton_kernels.py"), arch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@functools.cache
def compiled(arch, name):
    entry = compile_all(arch)[name]
    return Compiled(gcnsim.parse(entry["assembly"]), entry["lds"], entry["warps"])


def run(arch, name, grid, arguments, results, **options):
    """Runs a kernel on arrays and integers; `results` maps the place of an OUTPUT to what is read back there."""
    memory, values = gcnsim.Memory(), []
    for n, argument in enumerate(arguments):
        if argument is OUTPUT:
            kind, shape = results[n]
            argument = memory.allocate_empty(int(np.prod(shape)) * np.dtype(kind).itemsize, f"output {n}")
        elif isinstance(argument, np.ndarray):
            argument = memory.allocate(argument, f"argument {n}")
        values.append(argument)
    gcnsim.run([compiled(arch, name).launch(grid, values)], memory, **options)
    found = [memory.read(values[n], kind, shape, require_written=True) for n, (kind, shape) in results.items()]
    return found[0] if len(found) == 1 else found


@pytest.fixture
def random():
    return np.random.default_rng(1)


# --- right ones


@arch_by_arch
@pytest.mark.parametrize("n", [1, 255, 1000])
def test_vadd(arch, n, random):
    x, y = random.standard_normal((2, n)).astype(np.float32)
    result = run(arch, "vadd", (-(-n // 256), 1, 1), [x, y, OUTPUT, n], {2: (np.float32, n)})
    assert np.array_equal(result, x + y)


@arch_by_arch
@pytest.mark.parametrize("columns", [2048, 1777, 3])
def test_softmax(arch, columns, random):
    x = (random.standard_normal((5, columns)) * 10).astype(np.float32)
    result = run(arch, "softmax", (5, 1, 1), [x, OUTPUT, columns], {1: (np.float32, x.shape)})
    powers = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(result, powers / powers.sum(axis=1, keepdims=True), rtol=3e-5, atol=1e-30)


@arch_by_arch
def test_softmax_in_half_precision(arch, random):
    x = (random.standard_normal((7, 300)) * 3).astype(np.float16)
    result = run(arch, "softmax_fp16", (7, 1, 1), [x, OUTPUT, 300], {1: (np.float16, x.shape)})
    powers = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True).astype(np.float64))
    np.testing.assert_allclose(result, powers / powers.sum(axis=1, keepdims=True), rtol=1e-3, atol=6e-8)


@arch_by_arch
@pytest.mark.parametrize("n", [1024, 5000])
def test_histogram(arch, n, random):
    x = random.integers(0, 64, n).astype(np.int32)
    total = np.zeros(64, np.int32)
    result = run(arch, "histogram", (-(-n // 1024), 1, 1), [x, total, n], {1: (np.int32, 64)})
    assert np.array_equal(result, np.bincount(x, minlength=64))


@arch_by_arch
def test_scatter_by_atomics(arch, random):
    x = random.integers(-50, 50, 1000).astype(np.float32)  # whose sums are exact in any order
    where = random.integers(0, 37, 1000).astype(np.int32)
    result = run(arch, "scatter_add", (4, 1, 1), [x, where, np.zeros(37, np.float32), 1000], {2: (np.float32, 37)})
    assert np.array_equal(result, np.bincount(where, x, minlength=37))


@arch_by_arch
def test_sort_and_scan(arch, random):
    x = random.integers(-(2**31), 2**31, (3, 512)).astype(np.int32)
    results = {1: (np.int32, x.shape), 2: (np.int32, x.shape)}
    ordered, sums = run(arch, "sort_and_scan", (3, 1, 1), [x, OUTPUT, OUTPUT], results)
    assert np.array_equal(ordered, np.sort(x, axis=1))
    assert np.array_equal(sums, np.cumsum(x, axis=1, dtype=np.int32))


FP8 = {"gfx942": ml_dtypes.float8_e4m3fnuz, "gfx950": ml_dtypes.float8_e4m3fn}
# name: type of the elements, tile of m and n, is b [n, k]
GEMMS = {
    "gemm_fp16": (np.float16, 64, 64, True),
    "gemm_fp16_plain": (np.float16, 64, 64, False),
    "gemm_bf16": (ml_dtypes.bfloat16, 64, 128, False),
    "gemm_fp32": (np.float32, 32, 32, False),
    "gemm_int8": (np.int8, 64, 64, True),
    "gemm_int8_plain": (np.int8, 128, 64, False),
    "gemm_fp8": (FP8, 64, 64, True),
    "gemm_fp8_plain": (FP8, 64, 64, False),
    "gemm_that_spills": (np.float16, 256, 256, True),
}
GEMM_CASES = [(arch, name) for name, (kind, *_) in GEMMS.items() for arch in ARCHS if kind is not FP8 or arch in FP8]


@pytest.mark.parametrize("arch, name", GEMM_CASES, ids=["-".join(case) for case in GEMM_CASES])
def test_gemm(arch, name, random):
    """Of ragged sizes. Integers are exact; floats are sums of exact products, in fp32."""
    kind, block_m, block_n, transposed = GEMMS[name]
    kind = kind[arch] if kind is FP8 else kind
    m, n, k = 200, 176, 208
    if kind is np.int8:
        a, b = (random.integers(-128, 128, shape).astype(np.int8) for shape in ((m, k), (k, n)))
    else:
        a, b = (random.standard_normal(shape).astype(kind) for shape in ((m, k), (k, n)))
    stored = np.ascontiguousarray(b.T) if transposed else b
    result_kind = np.int32 if kind is np.int8 else np.float32
    grid = (-(-m // block_m), -(-n // block_n), 1)
    result = run(arch, name, grid, [a, stored, OUTPUT, m, n, k], {2: (result_kind, (m, n))})
    exact = a.astype(np.float64) @ b.astype(np.float64)
    if kind is np.int8:
        assert np.array_equal(result, exact)
    else:
        bound = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) * k * 2.0**-24
        assert (np.abs(result - exact) <= bound).all()


MX = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 16),
    "e4m3": (ml_dtypes.float8_e4m3fn, 256),
    "e5m2": (ml_dtypes.float8_e5m2, 256),
}


def mx_matrix(random, kind, count, k):
    """Codes, scales that differ from block to block, and the numbers they mean."""
    dtype, codes_of = MX[kind]
    codes = random.integers(0, codes_of, (count, k)).astype(np.uint8)
    codes = np.where(np.isfinite(codes.view(dtype).astype(np.float32)), codes, 1).astype(np.uint8)
    scales = random.integers(118, 136, (count, k // 32)).astype(np.uint8)
    return codes, scales, codes.view(dtype).astype(np.float64) * np.repeat(2.0 ** (scales - 127.0), 32, axis=1)


def in_pairs(codes):
    """FP4 codes two a byte, the first one low."""
    return np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4)


def assert_product(result, a, b):
    bound = np.abs(a) @ np.abs(b).T * 2.0**-20
    assert (np.abs(result - a @ b.T) <= bound).all()


@pytest.mark.parametrize("shape", ["16x16", "32x32"])
@pytest.mark.parametrize("kinds", [("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e5m2", "e4m3")], ids="-".join)
def test_scaled_gemm(kinds, shape, random):
    """gfx950's scaled matrix instructions."""
    inputs, values = [], []
    for kind, count in zip(kinds, (32, 64), strict=True):
        codes, scales, numbers = mx_matrix(random, kind, count, 256)
        inputs += [in_pairs(codes) if kind == "e2m1" else codes, scales]
        values.append(numbers)
    name = f"mx_{kinds[0]}_{kinds[1]}_{shape}"
    assert "v_mfma_scale_f32" in compile_all("gfx950")[name]["assembly"]
    result = run("gfx950", name, (1, 1, 1), [*inputs, OUTPUT], {4: (np.float32, (32, 64))})
    assert_product(result, *values)


def test_scaled_gemm_with_transposing_reads(random):
    (a, a_scales, left), (b, b_scales, right) = (mx_matrix(random, "e2m1", count, 256) for count in (32, 64))
    assert "ds_read_b64_tr_b4" in compile_all("gfx950")["mx_by_rows"]["assembly"]
    inputs = [in_pairs(a), a_scales, in_pairs(np.ascontiguousarray(b.T)), b_scales]
    result = run("gfx950", "mx_by_rows", (1, 1, 1), [*inputs, OUTPUT], {4: (np.float32, (32, 64))})
    assert_product(result, left, right)


@arch_by_arch
def test_number_of_programs(arch):
    """The grid reaches a kernel through arguments that the runtime fills in."""
    result = run(arch, "programs", (2, 3, 4), [OUTPUT], {0: (np.int32, 24)})
    assert (result == 234).all()


def exchange_of_two(arch, name):
    """Two ranks on one memory: each buffer has its flag, 16 words on what the other sends, behind it what it sends."""
    memory = gcnsim.Memory()
    sent = np.random.default_rng(2).integers(0, 1000, (2, 512)).astype(np.int32)
    buffers, outputs = [], []
    for rank in range(2):
        buffers.append(memory.allocate_empty(4 * (16 + 1024), f"buffer of rank {rank}"))
        memory.write(buffers[rank], np.zeros(16, np.int32))
        memory.write(buffers[rank] + 4 * (16 + 512), sent[rank])
        outputs.append(memory.allocate_empty(4 * 512, f"output of rank {rank}"))
    kernel = compiled(arch, name)
    arguments = [[buffers[rank], buffers[1 - rank], outputs[rank]] for rank in range(2)]
    launches = [kernel.launch((1, 1, 1), given, f"rank {rank}") for rank, given in enumerate(arguments)]
    gcnsim.run(launches, memory)
    for output in outputs:
        assert np.array_equal(memory.read(output, np.int32, 512, require_written=True), sent.sum(axis=0))


@arch_by_arch
def test_exchange_between_ranks(arch):
    exchange_of_two(arch, "exchange")


# --- wrong ones


@arch_by_arch
def test_a_rank_that_never_signals_is_a_deadlock(arch):
    with pytest.raises(gcnsim.Deadlock) as caught:
        exchange_of_two(arch, "exchange_without_signal")
    assert "rank 0: workgroup (0, 0, 0)" in str(caught.value)
    assert "triton_kernels.py:" in str(caught.value)


@arch_by_arch
def test_a_missing_wait_between_ranks_reads_what_nobody_wrote(arch):
    with pytest.raises(gcnsim.UninitializedRead, match="nobody wrote: byte 64 of 'buffer of rank 0'") as caught:
        exchange_of_two(arch, "exchange_without_wait")
    assert "triton_kernels.py:" in caught.value.source


@arch_by_arch
def test_a_missing_mask_is_out_of_bounds(arch, random):
    x, y = random.standard_normal((2, 1000)).astype(np.float32)
    with pytest.raises(gcnsim.MemoryFault) as caught:
        run(arch, "vadd_without_mask", (4, 1, 1), [x, y, OUTPUT, 1000], {2: (np.float32, 1000)})
    error = caught.value
    assert "0 bytes behind the end of 'argument 0' (4000 bytes" in error.what
    assert "load" in error.instruction
    line = int(error.source.split("triton_kernels.py:")[1].split(":")[0])
    text = (HERE / "triton_kernels.py").read_text().splitlines()[line - 1]
    assert "tl.load(x + i)" in text


@arch_by_arch
def test_an_input_that_nobody_wrote(arch, random):
    x = random.standard_normal(256).astype(np.float32)
    with pytest.raises(gcnsim.UninitializedRead, match="nobody wrote: byte 0 of 'output 1'"):
        run(arch, "vadd", (1, 1, 1), [x, OUTPUT, x, 256], {1: (np.float32, 256)})


@arch_by_arch
def test_spills_show_in_the_metadata(arch):
    """And the kernel that spills comes out right all the same: see test_gemm."""
    metadata = compiled(arch, "gemm_that_spills").program.metadata
    assert metadata.vgpr_spills > 0
    assert metadata.scratch > 0
    assert compiled(arch, "gemm_fp16").program.metadata.vgpr_spills == 0
    assert compiled(arch, "gemm_fp16").program.metadata.scratch == 0


@arch_by_arch
def test_a_barrier_that_the_compiler_forgot_is_a_race(arch, random):
    """The softmax of eight waves without the barriers between the steps of its reductions."""
    entry = compile_all(arch)["softmax"]
    program = gcnsim.parse(entry["assembly"].replace("s_barrier", "s_nop 0"))
    memory = gcnsim.Memory()
    x = random.standard_normal((5, 2048)).astype(np.float32)
    arguments = [memory.allocate(x), memory.allocate_empty(x.nbytes), 2048]
    with pytest.raises((gcnsim.LdsRace, gcnsim.UninitializedRead)) as caught:
        gcnsim.run([gcnsim.Launch(program, (5, 1, 1), entry["warps"], arguments, entry["lds"])], memory)
    assert caught.value.instruction.startswith("ds_")
    assert "triton" in caught.value.source or "standard.py" in caught.value.source


@arch_by_arch
def test_more_lds_than_the_chip_has(arch):
    entry = compiled(arch, "gemm_fp16")
    limit = 163840 if arch == "gfx950" else 65536
    gcnsim.Launch(entry.program, (1, 1, 1), entry.warps, [], limit)
    with pytest.raises(gcnsim.LdsOverflow, match=f"{limit + 1} bytes .* {arch} has {limit}"):
        gcnsim.Launch(entry.program, (1, 1, 1), entry.warps, [], limit + 1)


def test_more_waves_than_the_kernel_was_compiled_for():
    entry = compiled("gfx942", "vadd")
    with pytest.raises(ValueError, match="a workgroup of 512 lanes, but the kernel was compiled for 256"):
        gcnsim.Launch(entry.program, (1, 1, 1), 8, [])
