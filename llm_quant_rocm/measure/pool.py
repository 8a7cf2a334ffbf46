# SPDX-License-Identifier: Apache-2.0
"""Processes that compile kernels for the one that asks them."""

import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def compile_pool(workers: int) -> ProcessPoolExecutor:
    """A pool of fresh processes. Ctrl-C reaches them too, and is for the one that asks them: they pass over it, as an
    idle one that it ended would keep the pool's lock, and the pool would wait for ever."""
    return ProcessPoolExecutor(workers, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
