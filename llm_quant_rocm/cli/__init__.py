# SPDX-License-Identifier: Apache-2.0
"""The command `llm-quant-rocm`."""

import os
import signal
from types import FrameType

# For an import to come to its end, after which the command can end what it has started; torch's takes longer.
_PATIENCE_SECONDS = 0.2
_STOPPED = 130  # as shells have it


def main() -> None:
    """Run the command line; the console script of the distribution. Ctrl-C ends it with exit status 130."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started it wants it to go on
            signal.signal(signal.SIGINT, _interrupt)
            signal.signal(signal.SIGALRM, _interrupt)
        from llm_quant_rocm.cli._app import app  # which imports much

        app()
    except KeyboardInterrupt:  # before there is a command
        raise SystemExit(_STOPPED) from None
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would say where it was interrupted at its end
            if signal.setitimer(signal.ITIMER_REAL, 0)[0]:
                raise SystemExit(_STOPPED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt, but not while a module is imported: torch, numpy and others swallow it then, or make another
    error of it. The process ends where the import takes long, or at the next Ctrl-C."""
    if not _is_importing(frame):
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt
    if number == signal.SIGALRM or signal.getitimer(signal.ITIMER_REAL)[0]:
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")  # the cursor, which a progress bar hides
        os._exit(_STOPPED)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_SECONDS)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
