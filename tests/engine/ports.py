# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that bind them long after they were chosen.

An engine imports for half a minute before it binds, and a port that was probed with bind(0) and freed may by then be
another's who asked the system for any. These are below the range from which the system gives ports, and every process
of tests has its own.
"""

import itertools
import os
import socket
from pathlib import Path

COUNT = 32  # of one process of tests


def _own() -> range:
    """This process's ports; processes whose ids are close to one another have different ones."""
    setting = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(setting.read_text().split()[0]) if setting.exists() else 0
    end = lowest if lowest >= 8192 else 32768  # Linux's own lowest
    start = end - COUNT * (1 + os.getpid() % (end // 2 // COUNT))
    return range(start, start + COUNT)


_turn = itertools.cycle(_own())


def free() -> int:
    """A port that is free. The next call gives another one, which may be bound before this one is."""
    for port in itertools.islice(_turn, COUNT):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"none of the ports {_own()} is free")
