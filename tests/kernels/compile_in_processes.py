# SPDX-License-Identifier: Apache-2.0
"""Kernels that other processes compile, as tests/kernels/test_compile_processes.py asks in a process of its own, since
Triton has one driver."""

import os
import subprocess
import threading
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from llm_quant_rocm.kernels import compile_ahead, compile_processes
from llm_quant_rocm.kernels.sizes import next_power_of_2
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


def after_death(jobs: list[bytes]) -> int:
    """How many jobs are said to have ended of those that come after their processes were killed, before and after this
    process knows of it."""
    started: list[subprocess.Popen[bytes]] = []

    class Kept(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    with patch("subprocess.Popen", Kept):
        processes = compile_processes.Processes(2)
    ended = threading.Semaphore(0)
    processes.submit(jobs[0], ended.release)
    assert ended.acquire(timeout=60)
    started[0].kill()
    for told in jobs:
        processes.submit(told, ended.release)
    started[0].wait()
    for told in jobs:
        processes.submit(told, ended.release)
    processes.close()
    return sum(ended.acquire(timeout=60) for _ in range(2 * len(jobs)))


def without_processes() -> int:
    """How many of two jobs are said to have ended where no process can be started."""
    ended: list[int] = []
    with patch("subprocess.Popen", side_effect=PermissionError):
        processes = compile_processes.Processes(2)
    for number in range(2):
        processes.submit(b"", partial(ended.append, number))
    processes.close()
    return len(ended)


def untold() -> bytes | None:
    """What is told of a compilation that is not as Triton has it."""
    return compile_processes.job("key", next_power_of_2)
