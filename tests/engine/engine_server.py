# SPDX-License-Identifier: Apache-2.0
"""Runs engines in children of one process that has imported vLLM already: the import costs twice what a start costs
after it. Started by engines.py.

Each line on stdin is a request in JSON: `arguments` of engine_process.main, the child's `environment`, its `log` file
and the seconds it may take (`limit`). Each line on stdout is the exit status of one, negative for a signal.
"""

import atexit
import gc
import json
import os
import signal
import sys
import time
from typing import Any


def wait(pid: int, limit: float) -> int:
    """The exit status of a child, which is killed with all its processes when its time is over."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def child(request: dict[str, Any]) -> None:
    """One engine, as `python engine_process.py` in that environment would run it: what it raises ends the process."""
    os.setsid()
    atexit.register(gc.unfreeze)  # nanobind looks for what is left at the end
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(descriptor, stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    torch._dynamo.config.disable = "TORCH_COMPILE_DISABLE" in os.environ  # which PyTorch reads when it is imported
    engine_process.main(*request["arguments"])


def main() -> None:
    """Ends when stdin does, and in each child when its engine has answered."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.freeze()  # vLLM collects garbage eight times an engine, and all of the imports stays
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(request)
            return
        print(wait(pid, request["limit"]), file=replies, flush=True)


if __name__ == "__main__":
    # Not in the workers of an engine, which import this file as well.
    import engine_process
    import torch
    import torch._dynamo.config
    import vllm.model_executor.model_loader.weight_utils
    import vllm.v1.worker.cpu_worker  # noqa: F401

    torch.set_num_threads(1)  # a child of fork has none of its parent's threads
    main()
