# SPDX-License-Identifier: Apache-2.0
"""Compiling kernels before they are launched. Triton compiles one at its first launch, for some seconds, and whoever
waits for that launch waits for it: in a server, every request."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

# A compilation is Python for a quarter of its time, of which one runs at once: a few threads keep that busy. More would
# only begin what another rank may have ended by then.
_MOST_THREADS = 8


@dataclass
class Ahead:
    """How many launches there were, and how many kernels these had to be compiled for."""

    launches: int = 0
    kernels: int = 0


class _Held(Executor):
    """Holds what is submitted back until `begin`.

    Ranks on one host have the same kernels to compile at the same time, and one that is on disk when its turn comes is
    read. So each process takes an order of its own, and they share the work.
    """

    def __init__(self) -> None:
        self._work: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.append((future, partial(function, *args, **kwargs)))
        return future

    def begin(self, pool: Executor) -> None:
        random.SystemRandom().shuffle(self._work)
        for future, work in self._work:
            pool.submit(_do, work, future)


class _Remembering(AsyncCompileMode):
    """Puts a kernel that is to be compiled among those of the next launch, as Triton itself does from 3.9 on.

    Before, a launch that is like another goes through all but the compilation again, and of ours there are thousands.
    """

    def submit(self, key: Any, compile_fn: Any, finalize_fn: Any, *cleanup_fn: Any) -> Any:
        kernel = super().submit(key, compile_fn, finalize_fn, *cleanup_fn)
        if not cleanup_fn:  # an older Triton
            finalize_fn(kernel)
        return kernel


def _do(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


@contextmanager
def compile_ahead() -> Iterator[Ahead]:
    """Within, kernels that this thread launches do not run, nor do the vendor's products that it calls. At its end the
    kernels that are not compiled yet are compiled, several at once.

    The errors of a compilation are raised then.
    """
    thread, ahead = threading.get_ident(), Ahead()
    run, scaled_mm, addmm = JITFunction.run, torch._scaled_mm, torch.addmm

    def only_compile(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        ahead.launches += 1
        return run(kernel, *args, warmup=True, **options)

    def here(mine: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
        """`mine` in this thread, `others` in all others."""
        return lambda *args, **options: (mine if threading.get_ident() == thread else others)(*args, **options)

    # Ranks on one host compile at the same time.
    threads = len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count())
    held = _Held()
    with ThreadPoolExecutor(min(_MOST_THREADS, max(1, threads))) as pool, _Remembering(held) as mode:
        JITFunction.run = here(only_compile, run)
        torch._scaled_mm, torch.addmm = here(no_scaled_mm, scaled_mm), here(no_addmm, addmm)
        try:
            yield ahead
        finally:
            JITFunction.run, torch._scaled_mm, torch.addmm = run, scaled_mm, addmm
            ahead.kernels = len(mode.raw_futures)
            held.begin(pool)


def no_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *scales: Any, out_dtype: torch.dtype, out: torch.Tensor | None = None, **rest: Any
) -> torch.Tensor:
    """Where `torch._scaled_mm` would leave the product."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype) if out is None else out


def no_addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, **rest: Any
) -> torch.Tensor:
    """Where `torch.addmm` would leave the sum."""
    return no_scaled_mm(a, b, out_dtype=a.dtype, out=out)
