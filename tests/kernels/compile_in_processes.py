# SPDX-License-Identifier: Apache-2.0
"""Kernels that other processes compile, as tests/kernels/test_compile_processes.py asks in a process of its own, since
Triton has one driver."""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from llm_quant_rocm import ops, reference
from llm_quant_rocm.formats.fp8 import FNUZ
from llm_quant_rocm.kernels import compile_ahead, compile_processes
from tests.amd.virtual_gpu import activate
from tests.inputs import assert_same, nasty_rows
from tests.kernels.compile_hopper import Driver


@triton.jit
def twice(x):
    return x + x


@triton.jit
def fill_kernel(x_ptr, N: tl.constexpr, function: tl.constexpr, dtype: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), function(tl.full((N,), 1, dtype)))


@triton.jit
def wrong_kernel(x_ptr, N: tl.constexpr):
    tl.static_assert(N == 0, "N is not 0")


def launch(n: int) -> None:
    fill_kernel[(1,)](torch.zeros(64), n, twice, tl.float32)


def compiled_here() -> list[str]:
    """Names of the kernels that this process compiles from now on."""
    names: list[str] = []
    compilation: Any = knobs.compilation
    compilation.listener = lambda *, src, **facts: names.append(src.name)
    return names


def compiled(folder: str, numbers: tuple[int, ...], always: bool = False) -> dict[str, int]:
    """How many processes were started, how many kernels this process compiled, and how many it has in the end, where
    Triton's files move while the others compile."""
    driver.set_active(Driver(GPUTarget("hip", "gfx942", 64)))
    os.environ["TRITON_CACHE_DIR"], os.environ["TRITON_ALWAYS_COMPILE"] = folder, str(int(always))
    here, started = compiled_here(), []

    class Counted(compile_processes.Processes):
        def __init__(self, count: int) -> None:
            started.append(count)
            super().__init__(count)

    module: Any = compile_ahead
    module.Processes = Counted
    with compile_ahead.compile_ahead():
        for n in numbers:
            launch(n)
    os.environ["TRITON_CACHE_DIR"] = f"{folder}-moved"
    compile_ahead.finish()
    (kernels, *_) = fill_kernel.device_caches[0]
    there = sum(len(kernel.asm["hsaco"]) > 0 for kernel in kernels.values())
    return {"started": len(started), "compiled here": len(here), "kernels": there}


def not_compiled(folder: str) -> str:
    """The error of a kernel that cannot be compiled."""
    driver.set_active(Driver(GPUTarget("hip", "gfx942", 64)))
    os.environ["TRITON_CACHE_DIR"] = folder
    with compile_ahead.compile_ahead():
        wrong_kernel[(1,)](torch.zeros(64), 16)
        launch(16)
    try:
        compile_ahead.finish()
    except Exception as error:
        return str(error)
    return ""


def executed(folder: str) -> None:
    """An operator computes on a simulated gfx942 what the reference does, by a kernel that another process compiled."""
    os.environ["TRITON_CACHE_DIR"] = folder
    here, gpu, rows = compiled_here(), activate("gfx942"), nasty_rows(1000, torch.bfloat16)
    with compile_ahead.compile_ahead():
        ops.per_token_quant_fp8(rows)
    assert not gpu.launches
    found = ops.per_token_quant_fp8(rows)
    assert [launch.kernel for launch in gpu.launches] == ["per_token_quant_kernel"]
    assert not here
    for part, expected in zip(found, reference.per_token_quant_fp8(rows, FNUZ), strict=True):
        assert_same(part, expected)
