# SPDX-License-Identifier: Apache-2.0
"""Compiling kernels before they are launched. Triton compiles one at its first launch, for some seconds, and whoever
waits for that launch waits for it: in a server, every request."""

import functools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from triton import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

from llm_quant_rocm.kernels.compile_processes import Processes, job_of

# More would only begin what another rank may have ended by then.
_MOST_AT_ONCE = 8

logger = logging.getLogger("llm_quant_rocm")


@dataclass
class Ahead:
    """How many launches there were, and how many kernels these had to be compiled for."""

    launches: int = 0
    kernels: int = 0


@dataclass
class _Work:
    """The compilation of one kernel, which goes by `key`."""

    key: str
    compile_fn: Callable[[], Any]
    kernel: Future[Any] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.job = job_of(self.key, self.compile_fn)

    def read(self) -> bool:
        """Whether the kernel is on disk, and so had."""
        kernel = self.job and self.job.kernel()
        if kernel is not None:
            self.kernel.set_result(kernel)
        return kernel is not None

    def do(self) -> None:
        try:
            if not self.read():
                self.kernel.set_result(self.compile_fn())
        except BaseException as error:
            self.kernel.set_exception(error)


class _Background:
    """Kernels that are being compiled, in other processes where that is possible."""

    def __init__(self) -> None:
        self._kernels: list[FutureKernel] = []
        self._processes: Processes | None = None
        self._lock = threading.Lock()

    def begin(self, kernels: Iterable[FutureKernel], work: list[_Work]) -> None:
        # Ranks on one host have the same kernels to compile at the same time, and one that is on disk when its turn
        # comes is read. So each process takes an order of its own, and they share the work.
        random.SystemRandom().shuffle(work)
        with self._lock:
            self._kernels += kernels
            for one in work:
                if one.read():
                    continue
                if one.job:
                    self._processes = self._processes or Processes(_at_once())
                    self._processes.submit(one.job.told, functools.partial(_in_a_thread, one))
                else:
                    _in_a_thread(one)

    def finish(self) -> None:
        """Waits until all kernels that are being compiled are.

        The error of one that cannot be compiled is raised then, and again where that one is launched.
        """
        with self._lock:
            kernels, self._kernels = self._kernels, []
            if not kernels:
                return
            left, start = sum(not kernel.future.done() for kernel in kernels), time.monotonic()
            if left:
                logger.info("waiting for %d of %d kernels to be compiled; later starts read them", left, len(kernels))
            try:
                for kernel in kernels:
                    FutureKernel.result(kernel)
            finally:
                if self._processes:
                    self._processes.close()
                    self._processes = None
        logger.info("%d kernels are ready, waited %.1f s for them", len(kernels), time.monotonic() - start)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_at_once())


def _in_a_thread(work: _Work) -> None:
    with suppress(RuntimeError):  # Python is about to end
        _threads().submit(work.do)


def _at_once() -> int:
    ranks = max(1, torch.cuda.device_count())
    return min(_MOST_AT_ONCE, max(1, len(os.sched_getaffinity(0)) // ranks))


_background = _Background()
finish = _background.finish
# What one thread replaces for a while, another may not take for the original.
_one_thread = threading.RLock()


class _Awaited(FutureKernel):
    """A kernel that is being compiled. Its first launch waits for all that are, so that a server waits once."""

    def result(self, ignore_errors: bool = False) -> Any:
        finish()
        return super().result(ignore_errors)


class _Recording(AsyncCompileMode):
    """Has Triton give a launch a kernel that is not compiled yet, and keeps what would compile it."""

    def __init__(self) -> None:
        super().__init__(cast(Executor, None))
        self.work: list[_Work] = []

    def submit(self, key: Any, compile_fn: Any, finalize_fn: Any, *cleanup_fn: Any) -> Any:
        if key not in self.future_kernels:
            self.work.append(_Work(key, compile_fn))
            kernel = self.future_kernels[key] = _Awaited(finalize_fn, *cleanup_fn, self.work[-1].kernel)
            # Triton itself remembers it for the next launch that is alike from 3.9 on. Before, such a launch goes
            # through all but the compilation again, and of ours there are thousands.
            if not cleanup_fn:
                finalize_fn(kernel)
        return self.future_kernels[key]


@contextmanager
def compile_ahead() -> Iterator[Ahead]:
    """Within, kernels that this thread launches do not run, nor do the vendor's products that it calls. At its end the
    kernels that are not compiled yet begin to be, several at once; the first launch of one waits for all (`finish`).

    One thread is within at a time; another that enters waits until it has left.

    Raises:
        RuntimeError: this thread is within already.
    """
    thread, ahead = threading.get_ident(), Ahead()

    def only_compile(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        ahead.launches += 1
        return run(kernel, *args, warmup=True, **options)

    def here(mine: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
        """`mine` in this thread, `others` in all others."""
        return lambda *args, **options: (mine if threading.get_ident() == thread else others)(*args, **options)

    with _one_thread, _Recording() as mode:
        run, scaled_mm, addmm = JITFunction.run, torch._scaled_mm, torch.addmm
        JITFunction.run = here(only_compile, run)
        torch._scaled_mm, torch.addmm = here(no_scaled_mm, scaled_mm), here(no_addmm, addmm)
        try:
            yield ahead
        finally:
            JITFunction.run, torch._scaled_mm, torch.addmm = run, scaled_mm, addmm
            ahead.kernels = len(mode.future_kernels)
            _background.begin(mode.future_kernels.values(), mode.work)


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
