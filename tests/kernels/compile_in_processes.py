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

from llm_quant_rocm.kernels import compile_ahead, compile_processes
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


def compiled(folder: str, numbers: tuple[int, ...]) -> tuple[int, list[bool]]:
    """How many processes were started, and of each kernel whether this process found it on disk."""
    driver.set_active(Driver(GPUTarget("hip", "gfx942", 64)))
    os.environ["TRITON_CACHE_DIR"] = folder
    hits: list[bool] = []
    listener: Any = knobs.compilation
    listener.listener = lambda *, cache_hit, **facts: hits.append(cache_hit)
    started = []

    class Counted(compile_processes.Processes):
        def __init__(self, count: int) -> None:
            started.append(count)
            super().__init__(count)

    module: Any = compile_ahead
    module.Processes = Counted
    with compile_ahead.compile_ahead():
        for n in numbers:
            launch(n)
    compile_ahead.finish()
    return len(started), hits


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
