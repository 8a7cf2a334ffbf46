# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for Hopper without a GPU, as their launches ask for it: those written in Gluon, the GEMM of few rows
in FP8, and the norm of many wide rows.

    python -m tests.kernels.compile_hopper CASE

prints how many bytes of registers spill, how many instructions of the innermost loops of products move them, how many
permutations of bytes these have for each product at most and how many waits at least, whether ptxas says that it did
not leave products in flight (C7510 and its neighbours), and what can be asked for before the kernel before is waited
for: whether anything in the L2 cache, tiles of how many tensors, and whether one of these is the first argument, x. A
case that says so is compiled for Blackwell. A process of its own, as Triton has one driver.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.driver import driver

from llm_quant_rocm import hardware
from llm_quant_rocm.formats.fp8 import OCP
from llm_quant_rocm.kernels import (
    flags,
    nvfp4_expand,
    nvfp4_hopper,
    nvfp4_wgmma,
    nvfp4_wgmma_large,
    nvfp4_wgmma_split,
    ptpc_gemm,
    ptpc_wgmma,
    ptpc_wgmma_few,
    ptpc_wgmma_grouped,
    rms_norm_walk,
)
from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config as Large
from llm_quant_rocm.kernels.nvfp4_wgmma_split_tiles import Config as Split
from llm_quant_rocm.kernels.routing import Schedule
from tests import engine_habits

HOPPER, BLACKWELL = hardware.nvidia(9, 0), hardware.nvidia(10, 0)
WAIT = "griddepcontrol.wait"
# Of four warps together (HGMMA, QGMMA) or of one (HMMA).
PRODUCT = "MMA."
# Of a tile, into shared memory; the group is the register of the descriptor.
LOAD = r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\S* \[%\w+\], \[(%\w+),"


class Driver:
    """As much of a driver as compiling asks for."""

    launcher_cls = SimpleNamespace

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cpu")


def nvfp4(n: int, k: int, experts: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight as `formats.nvfp4_wgmma.pack` has it."""
    leading, pieces, tiles = [experts] * bool(experts), -(-k // 128) * 2, -(-n // 128) * 8
    words = zeros(*leading, pieces, tiles, 128, dtype=torch.int32)
    return words, zeros(*leading, pieces, tiles, 64, dtype=torch.uint8), zeros(*leading, n, dtype=torch.float32)


def dense(config: nvfp4_hopper.Config, dtype: torch.dtype, k: int = 8192, m: int = 64) -> None:
    nvfp4_hopper.gemm(zeros(m, k, dtype=dtype), *nvfp4(512, k), None, 512, HOPPER, config)


def fp8(config: Large, m: int = 300) -> None:
    codes, out = zeros(m, 8192, dtype=torch.float8_e4m3fn), zeros(m, 512, dtype=torch.bfloat16)
    scale = zeros(m, 1, dtype=torch.float32)
    nvfp4_wgmma_large.gemm_large_fp8(codes, scale, *nvfp4(512, 8192), None, out, HOPPER, config)


def four_tiles(block_m: int) -> Schedule:
    rows, numbers = 4 * block_m, partial(zeros, dtype=torch.int32)
    tiles, weights = (numbers(4), numbers(4), numbers(1)), zeros(rows, dtype=torch.float32)
    return Schedule(numbers(rows), *tiles, weights, numbers(rows))


def routed(config: nvfp4_hopper.Config, **epilogue: Any) -> None:
    routing, rows = four_tiles(config.block_m), 4 * config.block_m
    if not epilogue:
        out = zeros(rows, 512, dtype=torch.bfloat16)
        row_map = None if isinstance(config, MANY) else routing.row_map
        epilogue = {"row_map": row_map, "row_weight": routing.row_weight, "out": out}
    x = zeros(rows, 1024, dtype=torch.bfloat16)
    nvfp4_hopper.grouped_gemm(x, nvfp4(512, 1024, experts=4), 512, HOPPER, config, routing, **epilogue)


def ptpc(config: ptpc_wgmma.Config) -> None:
    xq, wq = (zeros(rows, 1024, dtype=torch.float8_e4m3fn) for rows in (300, 512))
    scales = (zeros(rows, 1, dtype=torch.float32) for rows in (300, 512))
    ptpc_wgmma.ptpc_wgmma(xq, next(scales), wq, next(scales), None, torch.bfloat16, HOPPER, config)


def ptpc_on_blackwell() -> None:
    xq, wq = (zeros(rows, 2048, dtype=torch.float8_e4m3fn) for rows in (16, 16384))
    scales = (zeros(rows, 1, dtype=torch.float32) for rows in (16, 16384))
    config = ptpc_gemm.default_config(BLACKWELL, 16, 16384, 2048)
    ptpc_gemm.ptpc_gemm(xq, next(scales), wq, next(scales), None, torch.bfloat16, BLACKWELL, config)


def ptpc_few(config: ptpc_wgmma_few.Config, m: int, n: int) -> None:
    xq, wq = (zeros(rows, 8192, dtype=torch.float8_e4m3fn) for rows in (m, n))
    scales = (zeros(rows, 1, dtype=torch.float32) for rows in (m, n))
    ptpc_wgmma_few.ptpc_wgmma_few(xq, next(scales), wq, next(scales), None, torch.bfloat16, HOPPER, config)


def ptpc_experts(config: ptpc_wgmma_grouped.Config, activation: str | None = None) -> None:
    routing = four_tiles(config.block_m)
    x, w = (zeros(*shape, 1024, dtype=torch.float8_e4m3fn) for shape in ((routing.row_map.numel(),), (4, 512)))
    scales = (zeros(*rows.shape[:-1], 1, dtype=torch.float32) for rows in (x, w))
    ptpc_wgmma_grouped.grouped_gemm(
        x, next(scales), w, next(scales), routing, None if activation else routing.row_weight, activation,
        torch.bfloat16, HOPPER, config,
    )  # fmt: skip


def norm(columns: int) -> None:
    x, weight = zeros(300, columns, dtype=torch.bfloat16), zeros(columns, dtype=torch.bfloat16)
    assert rms_norm_walk.serves(x, weight, HOPPER)
    codes, scale = zeros(300, columns, dtype=OCP.dtype), zeros(300, 1, dtype=torch.float32)
    rms_norm_walk.rms_norm_walk(x, weight, 1e-6, codes, scale, OCP, HOPPER)


FEW, SPLIT, MANY = nvfp4_wgmma.Config, Split, Large
CASES: dict[str, Callable[[], None]] = {
    "few rows": lambda: dense(FEW(16, 64, 128, programs=528), torch.bfloat16),
    "few rows, a tile a program": lambda: dense(FEW(16, 64, 128), torch.bfloat16),
    "few rows of experts": lambda: routed(FEW(8, 64, 128, programs=528), activation="silu"),
    "few rows of experts, a tile a program": lambda: routed(FEW(8, 64, 64, unroll=4, stages=2), activation="silu"),
    "few rows of experts, tiles shared": lambda: routed(FEW(16, 128, 64, programs=528)),
    "few rows of experts to their slots": lambda: routed(FEW(64, 128, 64, warps=8)),
    "K split in four": lambda: dense(SPLIT(64, 4), torch.float16),
    "K split in two": lambda: dense(SPLIT(128, 2), torch.bfloat16),
    "K split, tiles of two accumulators": lambda: dense(SPLIT(96, 2), torch.bfloat16, m=300),
    "K split, programs sharing tiles": lambda: dense(SPLIT(128, 2, programs=132), torch.bfloat16),
    "K split, two consumers": lambda: dense(SPLIT(64, 2, consumers=2), torch.float16),
    "K split, two consumers sharing tiles": lambda: dense(SPLIT(64, 2, 264, consumers=2), torch.bfloat16),
    "K split, a cluster": lambda: dense(SPLIT(128, 4, cluster=4), torch.bfloat16),
    "K split, a cluster, tiles of 128 x 128": lambda: dense(SPLIT(128, 2, cluster=2), torch.bfloat16),
    "K split, a cluster with two consumers": lambda: dense(SPLIT(64, 2, consumers=2, cluster=3), torch.bfloat16),
    "K split, 8 rows": lambda: dense(SPLIT(8, 4), torch.bfloat16, m=8, k=2048),
    "K split, 8 rows, long steps": lambda: dense(SPLIT(8, 4), torch.float16, m=8, k=28672),
    "K split, 8 rows, long steps of 128 rows": lambda: dense(SPLIT(8, 2), torch.bfloat16, m=8, k=28672),
    "K split, 8 rows, programs sharing tiles": lambda: dense(SPLIT(8, 4, programs=264), torch.bfloat16, m=8),
    "K split, 8 rows, a cluster": lambda: dense(SPLIT(8, 4, cluster=4), torch.bfloat16, m=8),
    "K split, 8 rows, two consumers": lambda: dense(SPLIT(8, 2, consumers=2, cluster=2), torch.float16, m=8),
    "K split, 8 rows, one program": lambda: dense(SPLIT(8, 4, programs=132), torch.bfloat16, m=8),
    "K split, 8 rows, experts": lambda: routed(SPLIT(8, 2, programs=264)),
    "K split, experts": lambda: routed(SPLIT(8, 4, programs=132), activation="silu"),
    "K split, experts' rows to their slots": lambda: routed(SPLIT(16, 2, programs=132)),
    "many rows": lambda: dense(MANY(64, 256, 2), torch.float16),
    "whole tiles": lambda: dense(MANY(256, 128, 0), torch.bfloat16, k=512, m=4096),
    "whole tiles and a tail": lambda: dense(MANY(256, 128, 0, tail_m=64), torch.bfloat16, m=18000),
    "whole tiles and a shared tail": lambda: dense(MANY(256, 128, 0, 8, tail_m=128), torch.float16, m=8704),
    "whole tiles and a tail in FP8": lambda: fp8(MANY(256, 128, 0, tail_m=128), m=18000),
    "whole tiles and a shared tail in FP8": lambda: fp8(MANY(256, 128, 0, 3, tail_m=64), m=8704),
    "shared tiles": lambda: dense(MANY(64, 128, 2, shares=3), torch.bfloat16),
    "tiles that two programs share": lambda: dense(MANY(256, 128, 2, shares=2), torch.bfloat16, m=256),
    "tiles of two accumulators": lambda: dense(MANY(320, 128, 0), torch.bfloat16, m=300),
    "shared tiles of two accumulators": lambda: dense(MANY(192, 128, 0, shares=4), torch.float16, m=300),
    "shared tiles of two accumulators in FP8": lambda: fp8(MANY(192, 128, 0, shares=4), m=384),
    "tiles of 160 rows": lambda: dense(MANY(160, 128, 0), torch.float16, m=300),
    "shared tiles of 288 rows": lambda: dense(MANY(288, 128, 0, shares=8), torch.bfloat16, m=300),
    "tiles of few rows of the weight": lambda: dense(MANY(256, 64, 0), torch.bfloat16, m=1024),
    "many rows of experts": lambda: routed(MANY(128, 256, 0), activation="silu"),
    "many rows of experts, weighted": lambda: routed(MANY(128, 128, 0)),
    "FP8": lambda: fp8(MANY(128, 128, 2)),
    "FP8, whole tiles": lambda: fp8(MANY(256, 128, 0)),
    "FP8, tiles of few rows of the weight": lambda: fp8(MANY(256, 64, 0)),
    "FP8, tiles of two accumulators": lambda: fp8(MANY(192, 128, 0)),
    "FP8, tiles of 160 rows": lambda: fp8(MANY(160, 128, 0)),
    "FP8, tiles of 288 rows": lambda: fp8(MANY(288, 128, 0)),
    "FP8, a weight expanded": lambda: nvfp4_expand.expand_fp8(*nvfp4(512, 1024)[:2], 0, 512, 512, 1024, HOPPER),
    "PTPC, few rows, on Blackwell": ptpc_on_blackwell,
    "PTPC, few rows": lambda: ptpc_few(ptpc_wgmma_few.Config(64, 256), 64, 8192),
    "PTPC, few rows, tiles of two accumulators": lambda: ptpc_few(ptpc_wgmma_few.Config(96, 128), 128, 10240),
    "PTPC": lambda: ptpc(ptpc_wgmma.Config(128, 256, 16)),
    "PTPC, few rows of experts": lambda: ptpc_experts(ptpc_wgmma_grouped.Config(8, 128)),
    "PTPC, experts": lambda: ptpc_experts(ptpc_wgmma_grouped.Config(128, 256)),
    "norm of wide rows": lambda: norm(rms_norm_walk.COLUMNS[-1]),
    "PTPC, experts with an activation": lambda: ptpc_experts(ptpc_wgmma_grouped.Config(128, 256), "silu"),
}


def ask_no_gpu(module: Any) -> None:
    """Gives a module of kernels what its launches would ask an H100 for."""
    module.multiprocessors = lambda device: 132
    flags.flags_of = lambda device: zeros(8192, dtype=torch.int32)


def compiled(case: str) -> list[str]:
    """The words that are printed of a case."""
    capability = 100 if case.endswith("on Blackwell") else 90
    driver.set_active(Driver(GPUTarget("cuda", capability, 32)))
    engine_habits.take_on()
    kernels = []

    def only_compile(kernel: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            kernels.append(type(kernel).run(kernel, *arguments, **options | {"warmup": True}))

        return run

    module: Any
    for module in (
        nvfp4_expand, nvfp4_wgmma, nvfp4_wgmma_split, nvfp4_wgmma_large, ptpc_gemm, ptpc_wgmma, ptpc_wgmma_few,
        ptpc_wgmma_grouped, rms_norm_walk,
    ):  # fmt: skip
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernel = getattr(module, name)
            kernel.run = only_compile(kernel)
        ask_no_gpu(module)
    CASES[case]()
    (found,) = kernels
    ptx = found.asm["ptx"]
    before = "\n".join(before_wait(ptx))
    x = re.search(r"mov\.b64\s+(%\w+), \w+_param_0;", ptx)
    x = x and re.search(rf"cvta\.param\.u64\s+(%\w+), {x[1]};", ptx)
    loads = set(re.findall(LOAD, before))
    early = ["cp.async.bulk.prefetch" in before, len(loads), bool(x) and x[1] in loads]
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        ptxas = get_ptxas(capability).path
        said = output(ptxas, f"-arch={sm_arch_from_capability(capability)}", "-v", source, "-o", binary)
        sass = output(Path(ptxas).with_name("cuobjdump"), "-sass", binary)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    loops = loops_of_products(sass)
    in_loops = sum("LDL" in what or "STL" in what for loop in loops for what in loop)
    permutations = max((count("PRMT", loop) / count(PRODUCT, loop) for loop in loops), default=0)
    waits = min((count("PHASECHK", loop) / count(PRODUCT, loop) for loop in loops), default=0)
    # What PTX declares comes beside what Triton asks for at launch, at a multiple of 1024 bytes.
    shared = found.metadata.shared + -(-sum(map(int, re.findall(r"(\d+) bytes smem", said))) // 1024) * 1024
    facts = (spilled, in_loops, permutations, waits, decoded_between_waits(ptx), shared, "C75" in said, *early)
    return [str(fact) for fact in facts]


def decoded_between_waits(ptx: str) -> int:
    """How many times products come behind two waits with values decoded to 16 bits between these, in a kernel's order:
    a wait for the weight, and for x."""
    events = re.findall(r"mbarrier\.(try_wait)|\b(mul)\.b?f16x2|wgmma\.(mma)_async", ptx)
    return len(re.findall("w(?:d+)w+p", "".join("w" * bool(w) + "d" * bool(d) + "p" * bool(p) for w, d, p in events)))


def count(name: str, loop: list[str]) -> int:
    return sum(name in what for what in loop)


def output(*command: str | Path) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return found.stdout + found.stderr


def before_wait(ptx: str) -> list[str]:
    """The lines that some way from a kernel's entry reaches without a wait for the kernel before: blocks of PTX do not
    stand in the order in which they run. Of inline assembly, whose labels are not unique, every line counts."""
    lines = [line.partition("//")[0].strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    tables = dict(re.findall(r"(\$\w+): \.branchtargets([^;]*);", " ".join(lines)))
    reached, ahead = set(), [0]
    while ahead:
        at = ahead.pop()
        if at in reached or WAIT in lines[at]:
            continue
        reached.add(at)
        if branch := re.search(r"\b(?:bra(?:\.uni)?|brx\.idx\s+%\w+,)\s+(\$\w+);", lines[at]):
            ahead += [labels[name] for name in re.findall(r"\$\w+", tables.get(branch[1], branch[1]))]
        if not re.match(r"bra(\.uni)?\s+\$|brx|ret|exit", lines[at]):
            ahead.append(at + 1)
    return [lines[at] for at in sorted(reached)]


def loops_of_products(sass: str) -> list[list[str]]:
    """The instructions of each loop with products that contains no other such loop.

    A loop ends with a branch back, but not with one right behind another branch: such ones come from waits that stand
    behind the kernel.
    """
    code = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,5})\*/ +([^;]*);", sass)]
    products = [at for at, what in code if PRODUCT in what]
    branches = [(at, re.match(r"(@.*)?\bBRA\b.* 0x([0-9a-f]+)", what)) for at, what in code]
    ends = [(at, to) for (_, before), (at, to) in pairwise(branches) if to and (to[1] or not before)]
    loops = [range(int(to[2], 16), at) for at, to in ends if int(to[2], 16) < at]
    loops = [loop for loop in loops if any(at in loop for at in products)]
    inner = [loop for loop in loops if not any(o != loop and o[0] in loop and o[-1] in loop for o in loops)]
    assert inner or not products, "the loops of products are not recognized"
    return [[what for at, what in code if at in loop] for loop in inner]


if __name__ == "__main__":
    print(*compiled(sys.argv[1]))
