# SPDX-License-Identifier: Apache-2.0
"""What memory of its own a process takes, in MiB of RssAnon: a mapped checkpoint does not count."""

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")

# Of <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def taken_by(make: Callable[[], Made]) -> tuple[Made, float, float]:
    """What `make` gives, and the peak and the final memory above that before it."""
    # What the C library keeps of freed memory differs from run to run by half a checkpoint. With these, every tensor is
    # mapped by itself and given back at once, so that the figures are what is needed, the same to 3 MiB.
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    library.mallopt(M_TRIM_THRESHOLD, 0)
    gc.collect()
    before, peak, done = anonymous_mib(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_mib())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        made = make()
    finally:
        done.set()
        watcher.join()
    gc.collect()
    return made, peak - before, anonymous_mib() - before
