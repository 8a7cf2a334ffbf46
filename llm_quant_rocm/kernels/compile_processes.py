# SPDX-License-Identifier: Apache-2.0
"""Compiling kernels in other processes, onto Triton's disk.

A compilation is Python for a quarter of its time, of which a process runs one at once: threads that compile hold each
other up, and whoever loads a model beside them. What is started here forks children, each of which compiles a kernel
after another; all that they leave are Triton's files, which whoever wants the kernel then reads.
"""

import hashlib
import inspect
import io
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from typing import IO, Any, cast

import torch  # noqa: F401  once, and not by each child
import triton
from triton.compiler import CompiledKernel
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITCallable


class Processes:
    """Processes that compile, `count` at a time, until they are closed or this process ends."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._then: dict[int, Callable[[], object]] | None = None  # where there are none, or no longer
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(count)]
        try:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError:  # this process may start no other
            return
        self._jobs, self._then = cast(IO[bytes], process.stdin), {}
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def submit(self, told: bytes, then: Callable[[], object]) -> None:
        """Has done what a job told and calls `then` after it, whether it succeeded or not."""
        with self._lock:
            if self._then is not None:
                number = next(self._numbers)
                self._then[number] = then
                with suppress(OSError):  # they are ending, of which `_listen` hears
                    pickle.dump((number, told), self._jobs)
                    self._jobs.flush()
                return
        then()

    def close(self) -> None:
        if self._then is not None:
            with suppress(OSError):
                self._jobs.close()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        for number in cast(IO[bytes], process.stdout):
            with self._lock:
                then = (self._then or {}).pop(int(number))
            then()
        with self._lock:
            left, self._then = self._then or {}, None
        for then in left.values():
            then()
        process.wait()


class Job:
    """One kernel for other processes to compile.

    Args:
        key: what the kernel goes by, as Triton has it.
        source, target, options, variables: what Triton compiles it from.
    """

    def __init__(self, key: str, source: Any, target: Any, options: dict[str, Any], variables: dict[str, str]) -> None:
        self._source, self._hash = source, hashlib.sha256(key.encode()).hexdigest()
        # Where Triton's files are now: Inductor moves TRITON_CACHE_DIR when it first compiles something.
        self._files = get_cache_manager(self._hash)
        told = io.BytesIO()
        _Pickler(told).dump((source, target, options, variables))
        self.told = told.getvalue()

    def kernel(self) -> CompiledKernel | None:
        """The kernel, if it is on disk."""
        files = self._files.get_group(f"{self._source.name[:150]}.json")
        return CompiledKernel(self._source, files, self._hash) if files else None


def job_of(key: str, compile_fn: Callable[[], Any]) -> Job | None:
    """What Triton's `compile_fn` does, whose kernel goes by `key`; None where that cannot be told, or is to be done
    whatever is on disk (TRITON_ALWAYS_COMPILE).
    """
    if triton.knobs.compilation.always_compile:
        return None
    try:
        facts = inspect.getclosurevars(compile_fn).nonlocals
        return Job(key, facts["src"], facts["target"], facts["options"].__dict__, facts["env_vars"])
    except (KeyError, AttributeError, TypeError, pickle.PicklingError):  # of another Triton, or of a kernel's arguments
        return None


class _Pickler(pickle.Pickler):
    """Tells functions of kernels by their names."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, JITCallable):
            return thing.fn.__qualname__
        return NotImplemented


def _compile(told: bytes) -> None:
    source, target, options, variables = pickle.loads(told)
    triton.compile(source, target=target, options=options, _env_vars=variables)


def _attend(parent: int, said: int) -> None:
    """Has this child end with its parent, which alone says what is done: whoever listens to it hears its end."""
    os.close(said)

    def attend() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=attend, daemon=True).start()


def _serve(count: int) -> None:
    """Does the jobs that come on stdin, and says each one's number on stdout when it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all its processes; this one ends with its stdin
    said = os.dup(1)
    os.dup2(2, 1)  # what compilers print

    def say(number: int, future: Future[None]) -> None:
        os.write(said, f"{number}\n".encode())

    triton_key()  # reads all of Triton's files, and is kept
    pool = ProcessPoolExecutor(count, get_context("fork"), _attend, (os.getpid(), said))
    while True:
        try:
            number, told = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):  # at a job's end, or within
            os._exit(0)  # what is being compiled ends by `_attend`
        pool.submit(_compile, told).add_done_callback(partial(say, number))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
