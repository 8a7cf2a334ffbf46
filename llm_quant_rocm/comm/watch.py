# SPDX-License-Identifier: Apache-2.0
"""Ends a process whose all-reduces have lost a rank, also where it replays graphs and calls nothing of ours."""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger("llm_quant_rocm")

INTERVAL_SECONDS = 1.0
GRACE_SECONDS = 10.0


class Watch:
    """Calls a check in a thread of its own until it fails.

    Results after a lost rank are not valid, so nothing may go on with them: the next `raise_if_lost` raises what the
    check raised, and a process in which nobody calls that is terminated (SIGTERM) after `grace` seconds.
    """

    def __init__(
        self, check: Callable[[], None], interval: float = INTERVAL_SECONDS, grace: float = GRACE_SECONDS
    ) -> None:
        """
        Args:
            check: raises RuntimeError once a rank is lost. It is called from another thread, also while this one
                captures a graph, so it may neither synchronise nor call the device's driver.
            interval: seconds between two calls of it.
        """
        self._check, self._interval, self._grace = check, interval, grace
        self._lost: RuntimeError | None = None
        self._stopped = threading.Event()
        atexit.register(self.stop)  # before the interpreter takes away what the check needs
        self._thread = threading.Thread(target=self._run, name="llm-quant-rocm-watch", daemon=True)
        self._thread.start()

    def raise_if_lost(self) -> None:
        """Raises what the check raised."""
        if self._lost is not None:
            raise self._lost

    def stop(self) -> None:
        """No more checks, and no end."""
        self._stopped.set()
        atexit.unregister(self.stop)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._check()
            except RuntimeError as error:
                self._lost = error
                logger.error("%s. No result is valid from there on: this process ends", error)
                if not self._stopped.wait(self._grace):
                    os.kill(os.getpid(), signal.SIGTERM)
                return
