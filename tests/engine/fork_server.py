# SPDX-License-Identifier: Apache-2.0
"""Runs Python's command lines as forks of one process that has imported an engine: to import one takes longer than most
of what tests do with it, and an engine of several processes does so in each. Started by forks.py.

`python fork_server.py PROGRAM LISTENER NAME...` accepts what connects to the socket whose descriptor is LISTENER, and
ends with its stdin. When it is first asked, it imports each name: a module, or MODULE:FUNCTION, which it calls. Each
connection is one command; forked_python.py, as PROGRAM, is the other end.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import popen_fork, popen_spawn_posix
from pathlib import Path
from typing import Any

LEFT_S = 10  # what a command leaves behind may take so long to end


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A command and its three standard streams."""
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    data = connection.recv(int.from_bytes(length), socket.MSG_WAITALL)
    return json.loads(data), list(streams)


def supervise(connection: socket.socket) -> None:
    """Runs one command. It and all that it starts are of this process's session."""
    os.setsid()
    request, streams = receive(connection)
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(request, streams)
        os._exit(exit_status(request["arguments"]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are the command's
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, stream in enumerate(streams):
        os.close(stream)
        os.dup2(nothing, number)
    ended = os.pidfd_open(pid)
    while ended not in select.select([connection, ended], [], [])[0]:
        for number in connection.recv(16) or [signal.SIGKILL]:  # nobody waits for it any longer
            os.killpg(0, number)
    with suppress(OSError):
        connection.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    time.sleep(LEFT_S)
    os.killpg(0, signal.SIGKILL)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Makes this process like one that was started for the command."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # PyTorch read these when it was imported.
    torch._dynamo.config.disable = "TORCH_COMPILE_DISABLE" in os.environ
    torch._inductor.config.fx_graph_cache = os.environ.get("TORCHINDUCTOR_FX_GRAPH_CACHE") != "0"
    torch._functorch.config.enable_autograd_cache = os.environ.get("TORCHINDUCTOR_AUTOGRAD_CACHE") != "0"
    # Processes that an engine starts anew would import it.
    popen_spawn_posix.Popen = popen_fork.Popen


def exit_status(arguments: list[str]) -> int:
    """Runs a command up to where Python would take its objects apart: of all that is imported, that would make copies
    of memory that forks share, in seconds."""
    status: Any = None
    try:
        run(arguments)
    except SystemExit as error:
        status = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if not (status is None or isinstance(status, int)):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status or 0


def run(arguments: list[str]) -> None:
    """What `python ARGUMENTS` runs: a file, or the module behind -m."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def main(program: str, descriptor: str, *names: str) -> None:
    """Ends when stdin does; forks do not return."""
    listener = socket.socket(fileno=int(descriptor))
    # Programs that what is imported will start: vLLM looks at a model in one that imports vLLM.
    sys.executable = program
    imported = False
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        if not imported:
            import_all(names)
            imported = True
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            supervise(connection)
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)


def import_all(names: tuple[str, ...]) -> None:
    global torch
    import torch
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    for name in names:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    gc.collect()
    gc.freeze()  # engines collect garbage many times, and all of the imports stays


if __name__ == "__main__":
    main(*sys.argv[1:])
