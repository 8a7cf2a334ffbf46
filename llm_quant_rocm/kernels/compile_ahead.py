# SPDX-License-Identifier: Apache-2.0
"""Compiling kernels before they are launched. Triton compiles one at its first launch, for some seconds, and whoever
waits for that launch waits for it: in a server, every request."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

# A compilation is Python for a quarter of its time, of which one runs at once: more threads would wait.
_MOST_THREADS = 16


@dataclass
class Ahead:
    """How many launches there were, and how many kernels these had to be compiled for."""

    launches: int = 0
    kernels: int = 0


@contextmanager
def compile_ahead() -> Iterator[Ahead]:
    """Within, kernels that this thread launches do not run. Those that are not compiled yet are, several at once, and
    all are when it ends.

    The errors of a compilation are raised then.
    """
    thread, run, ahead = threading.get_ident(), JITFunction.run, Ahead()

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() == thread:
            ahead.launches += 1
            warmup = True
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    # Ranks on one host compile at the same time.
    threads = len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count())
    with ThreadPoolExecutor(min(_MOST_THREADS, max(1, threads))) as pool, AsyncCompileMode(pool) as mode:
        JITFunction.run = only_compile
        try:
            yield ahead
        finally:
            JITFunction.run = run
            ahead.kernels = len(mode.raw_futures)
