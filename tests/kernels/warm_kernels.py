# SPDX-License-Identifier: Apache-2.0
"""Warms operators up as if this machine had a GPU, then calls each with every number of rows.

    python -m tests.kernels.warm_kernels ARCH ROWS

prints for each how many kernels were compiled and launched by that, for which of the numbers up to ROWS one was
compiled all the same, and how many were launched in the end. Nothing is compiled in truth. A process of its own, as
Triton has one driver.
"""

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton.compiler
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.kernels import compile_ahead
from llm_quant_rocm.ops.nvfp4_weight import LAYOUTS, PACKINGS, PreparedNvFp4Weight
from llm_quant_rocm.ops.warm_up import warm_up
from tests import engine_habits
from tests.kernels.compile_hopper import Driver, ask_no_gpu

HIDDEN, INNER, EXPERTS, TOPK = 2048, 768, 128, 8
DENSE = {"qkv": (10240, 8192), "down": (8192, 28672), "small": (1280, 2048)}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def nvfp4(arch: str, n: int, k: int, gate_up: bool = False, experts: int = 0) -> PreparedNvFp4Weight:
    layout, leading = PACKINGS[arch].layout(arch, gate_up), (experts,) * bool(experts)
    (codes, codes_shape), (scales, scales_shape) = LAYOUTS[layout](n, k)
    tensors = zeros(*leading, *codes_shape, dtype=codes), zeros(*leading, *scales_shape, dtype=scales)
    return PreparedNvFp4Weight(*tensors, zeros(*leading, n), layout, n, k)


def routed(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    return zeros(m, TOPK), zeros(m, TOPK, dtype=torch.int32)


def x(m: int, k: int) -> torch.Tensor:
    return torch.empty((m, k), dtype=torch.bfloat16)


def call_of(case: str, arch: str, fp8: torch.dtype) -> Callable[[int], object]:
    kind, _, name = case.partition(" ")
    if kind == "ptpc_linear":
        n, k = DENSE[name]
        wq, wscale = zeros(n, k, dtype=fp8), zeros(n, 1)
        return lambda m: ops.ptpc_linear(x(m, k), wq, wscale)
    if kind.startswith("nvfp4_gemm"):
        n, k = DENSE[name]
        weight, prefill = nvfp4(arch, n, k), "fp8" if kind.endswith("fp8") else "exact"
        return lambda m: ops.nvfp4_gemm(x(m, k), weight, prefill=prefill)
    if kind == "nvfp4_moe":
        up, down = nvfp4(arch, 2 * INNER, HIDDEN, True, EXPERTS), nvfp4(arch, HIDDEN, INNER, False, EXPERTS)
        return lambda m: ops.nvfp4_moe(x(m, HIDDEN), up, down, *routed(m))
    w13, w2 = zeros(EXPERTS, 2 * INNER, HIDDEN, dtype=fp8), zeros(EXPERTS, HIDDEN, INNER, dtype=fp8)
    scales = zeros(EXPERTS, 2 * INNER, 1), zeros(EXPERTS, HIDDEN, 1)
    return lambda m: ops.ptpc_moe(x(m, HIDDEN), w13, scales[0], w2, scales[1], *routed(m))


CASES = [
    *(f"{kind} {name}" for kind in ("ptpc_linear", "nvfp4_gemm", "nvfp4_gemm_fp8") for name in DENSE),
    "nvfp4_moe", "ptpc_moe",
]  # fmt: skip


def pretend(arch: str) -> torch.dtype:
    """Makes the CPU a GPU to the library and to Triton; FP8's dtype there."""
    facts: Any = hardware.nvidia(9, 0) if arch == "sm_90" else hardware.amd(arch)
    hardware.CPU = facts
    driver.set_active(Driver(GPUTarget("cuda", 90, 32) if arch == "sm_90" else GPUTarget("hip", arch, 64)))
    cuda: Any = torch.cuda
    cuda.device = nullcontext
    cuda.is_current_stream_capturing = lambda: False
    of_nvfp4 = ("nvfp4_wgmma", "nvfp4_wgmma_split", "nvfp4_wgmma_large")
    for name in (*of_nvfp4, "ptpc_gemm", "ptpc_wgmma", "ptpc_wgmma_few", "ptpc_wgmma_grouped"):
        ask_no_gpu(importlib.import_module(f"llm_quant_rocm.kernels.{name}"))
    torch_: Any = torch
    torch_._scaled_mm, torch_.addmm = compile_ahead.no_scaled_mm, compile_ahead.no_addmm
    ahead: Any = compile_ahead
    ahead.job_of = lambda key, compile_fn: None  # nothing is compiled in truth
    return facts.fp8_dtype


class Kernel:
    """What a kernel is compiled to here."""

    function = None
    packed_metadata = (4, 1, 0)
    launched = 0

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        Kernel.launched += 1


def said_of_all(arch: str, rows: int) -> list[dict[str, Any]]:
    """What is printed, a case each."""
    compiler: Any = triton.compiler
    compiler.compile = lambda source, **options: Kernel()
    fp8 = pretend(arch)
    compiled: list[str] = []
    engine_habits.take_on(lambda *, fn, **facts: compiled.append(fn.name))
    every = []
    for case in CASES:
        call = call_of(case, arch, fp8)
        del compiled[:]
        Kernel.launched = 0
        for _ in range(2):  # the second time nothing is left to do
            warm_up(call, rows, torch.device("cpu"), case, case)
        compile_ahead.finish()
        said: dict[str, Any] = {"case": case, "warm": len(compiled), "launched": Kernel.launched, "missed": {}}
        for m in range(1, rows + 1):
            del compiled[:]
            call(m)
            for name in compiled:
                said["missed"].setdefault(name, []).append(m)
        every.append({**said, "launched_then": Kernel.launched})
    return every


@triton.jit
def fill_kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 0.0)


class Told:
    """Compiles `fill_kernel` when told to, for 32 elements at once, for more than 64 never."""

    def __init__(self) -> None:
        self.to, self.compiled = threading.Event(), list[int]()

    def __call__(self, source: Any, **options: Any) -> Kernel:
        (n,) = source.constants.values()
        assert self.to.wait(60)
        time.sleep(0 if n == 32 else 0.2)
        if n > 64:
            raise RuntimeError(f"{n} are too many")
        self.compiled.append(n)
        return Kernel()


def compiled_in_the_background() -> dict[str, Any]:
    """Launches that are compiled ahead, in two parts, while nothing is compiled until later; then one that runs."""
    pretend("sm_90")
    compiler: Any = triton.compiler
    told = compiler.compile = Told()
    asked: list[int] = []
    x, said = zeros(128), dict[str, Any]()
    for numbers in ((16, 32, 16, 16), (64, 16)):
        with compile_ahead.compile_ahead() as ahead:
            for n in numbers:
                fill_kernel[(1,)](x, n)
        asked.append(ahead.kernels)
    said["asked"], said["launched ahead"], said["compiled before"] = asked, Kernel.launched, len(told.compiled)
    threading.Timer(0.1, told.to.set).start()
    fill_kernel[(1,)](x, 32)
    said["launched"], said["compiled"] = Kernel.launched, sorted(told.compiled)
    return said


def not_compiled() -> list[str]:
    """Errors of launches, of which one kernel could not be compiled ahead."""
    pretend("sm_90")
    compiler: Any = triton.compiler
    told = compiler.compile = Told()
    told.to.set()
    with compile_ahead.compile_ahead():
        for n in (16, 128):
            fill_kernel[(1,)](zeros(128), n)
    errors = []
    for n in (16, 128, 16):
        try:
            fill_kernel[(1,)](zeros(128), n)
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


if __name__ == "__main__":
    for said in said_of_all(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(said))
