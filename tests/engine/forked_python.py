# SPDX-License-Identifier: Apache-2.0
"""Runs `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS` as a fork of fork_server.py, whose socket is beside this
file. Its streams, environment, working directory and exit status are those of this process, which passes signals on;
if this is killed, so is that, with all that it started."""

import json
import os
import signal
import socket
import sys
from pathlib import Path


def main() -> None:
    if sys.argv[1].startswith("-") and sys.argv[1] != "-m":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(Path(sys.argv[0]).with_name("socket")))
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(8)], [0, 1, 2])
    connection.sendall(data)
    for number in (signal.SIGINT, signal.SIGTERM):  # behind the request, within which no other byte may stand
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    status = int(connection.recv(16) or 1)
    if status < 0:
        if -status in (signal.SIGINT, signal.SIGTERM):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


main()
