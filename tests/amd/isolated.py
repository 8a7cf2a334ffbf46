# SPDX-License-Identifier: Apache-2.0
"""Functions called in a process of their own, with a Triton version of the caller's choice."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.amd import tritons
from tests.amd.fork_server import Reply, Request

ROOT = Path(__file__).parents[2]
LIMIT = 3600  # seconds: several ranks on one simulated GPU take minutes, and a machine may have more to do


class Crashed(Exception):
    """The process died: LLVM aborted, or it took too long. The message ends with what it printed."""


@cache
def _server(triton: str) -> subprocess.Popen[bytes]:
    """One server a Triton version; it ends when this process closes its stdin, by ending."""
    path = [*tritons.search_path(triton), str(ROOT), str(ROOT / "tools"), *sys.path]
    # Triton's own cache: its key holds the source of the kernel and of every function it calls, the signature, the
    # options and Triton's own files, and it is safe to share between processes.
    folder = os.environ.get("TRITON_CACHE_DIR", str(ROOT / ".pytest_cache" / "triton"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", "from tests.amd.fork_server import main; main()"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def call(triton: str, function: Callable[..., Any], *args: Any, limit: int = LIMIT, **kwargs: Any) -> Any:
    """function(*args, **kwargs), where `function` is a module's own and everything can be pickled.

    Raises what the function raises, and `Crashed`.
    """
    server = _server(triton)
    assert server.stdin and server.stdout
    name = f"{function.__module__}:{function.__qualname__}"
    pickle.dump(Request(name, pickle.dumps((args, kwargs)), limit), server.stdin)
    server.stdin.flush()
    reply: Reply = pickle.load(server.stdout)
    if reply.status:
        how = f"signal {os.WTERMSIG(reply.status)}" if os.WIFSIGNALED(reply.status) else f"its limit of {limit} s"
        raise Crashed(f"{name} with Triton {triton} was ended by {how}:\n{reply.output[-4000:]}")
    done, result = pickle.loads(reply.result)
    if not done:
        if reply.output:
            result.add_note(f"It printed:\n{reply.output[-4000:]}")
        raise result
    return result
