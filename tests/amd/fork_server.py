# SPDX-License-Identifier: Apache-2.0
"""Calls functions in children of one process that has imported Triton already. Started by isolated.py.

LLVM aborts the process on what it cannot compile, a Triton version is chosen by the search path, and the virtual GPU
is a global of Triton: all three want a process of their own. Starting one costs seconds, forking one milliseconds.
Requests come on stdin and replies go to stdout, both pickled.
"""

import faulthandler
import gc
import importlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Request:
    """A module-level function as "module:name", its pickled (args, kwargs), and the seconds it may take."""

    function: str
    arguments: bytes
    limit: int


@dataclass(frozen=True)
class Reply:
    """How the child ended (waitpid's status), what it printed, and the pickled (ok, result or exception)."""

    status: int
    output: str
    result: bytes


def resolve(function: str) -> Callable[..., Any]:
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)


def picklable(error: BaseException) -> BaseException:
    """`error` with its traceback as a note, or where it cannot travel, a RuntimeError that quotes it."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    error.add_note(f"In the child process:\n{text}")
    return error


def child(request: Request, result: BinaryIO, output: BinaryIO) -> None:
    """Never returns."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.dump_traceback_later(request.limit, exit=True, file=2)
    try:
        args, kwargs = pickle.loads(request.arguments)
        reply = (True, resolve(request.function)(*args, **kwargs))
    except BaseException as error:
        reply = (False, picklable(error))
    pickle.dump(reply, result)
    result.flush()
    os._exit(0)


def answer(request: Request) -> Reply:
    with TemporaryFile() as result, TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            child(request, result, output)
        status = os.waitpid(pid, 0)[1]
        result.seek(0)
        output.seek(0)
        return Reply(status, output.read().decode(errors="replace"), result.read())


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)  # a child of fork has none of its parent's threads
    from triton.runtime.cache import triton_key

    triton_key()  # reads all of Triton, once
    from tests.amd import operators

    # What children would import each for itself.
    ours = [f"{operators.__name__}.{name}" for name in operators.NAMES]
    for module in ("torch._dynamo", "triton.experimental.gluon", "tests.amd.launcher", "tests.amd.kernels", *ours):
        importlib.import_module(module)
    # All of the above stays, and compilers and the simulator make many objects that live long: with the collector's own
    # thresholds the children spend a third of their time in it.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            gc.unfreeze()  # nanobind looks for what is left at the end
            return
        pickle.dump(answer(request), replies)
        replies.flush()
