# SPDX-License-Identifier: Apache-2.0
"""Why vLLM does not serve, once more, as the last line that its user reads.

What is wrong with a checkpoint shows in a worker, which logs the error and ends. The engine's process then logs that a
worker failed, and the front end that the engine did: the sentence that matters stands a hundred lines above the end.
Here the process in which it was raised leaves it in a file, and the front end repeats it below its own traceback.

A program may catch what an engine raises, start another and fail of something else. So an error is left with vLLM's id
of its engine, and repeated below what came through that engine alone.

Python's own hooks serve for both: the factory of logging's records, as vLLM logs what ends a process, and
`sys.excepthook`. A handler would not do: where ranks are forks of the engine, vLLM configures its logging once more,
which takes the handlers from all of its loggers, and loads no plugin again.
"""

import atexit
import logging
import multiprocessing
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from traceback import format_exception_only, walk_tb
from types import TracebackType
from typing import Any

from llm_quant_rocm.environment import ERRORS, read

# The parent of the loggers of vLLM's processes.
_PROCESSES = "vllm.v1."
_PACKAGES = ("llm_quant_rocm", "llm_quant_rocm_vllm")


def install() -> None:
    """Let this process leave or repeat what our code raises. May be called any number of times."""
    if not isinstance(logging.getLogRecordFactory(), _Leave):
        logging.setLogRecordFactory(_Leave(logging.getLogRecordFactory()))
    if multiprocessing.parent_process() is None and not isinstance(sys.excepthook, _Repeat):
        # A name alone: there is a file where something went wrong.
        file = Path(tempfile.gettempdir(), f"llm-quant-rocm-{os.getpid()}-{secrets.token_hex(8)}.errors")
        os.environ[ERRORS] = str(file)
        atexit.register(file.unlink, missing_ok=True)
        sys.excepthook = _Repeat(file, sys.excepthook)


class _Leave:
    """A factory of records that leaves the errors that vLLM logs and our code raised in the file of `ERRORS`, one a
    line behind the id of its engine."""

    def __init__(self, before: Callable[..., logging.LogRecord]) -> None:
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._before(*args, **kwargs)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.levelno >= logging.ERROR and record.name.startswith(_PROCESSES):
            _leave(error)
        return record


def _leave(error: BaseException) -> None:
    file, engine = read(ERRORS), _engine(error)
    if file and engine and _is_ours(error):
        with suppress(OSError), open(file, "a", encoding="utf-8") as stream:
            stream.write(f"{engine} {_in_a_line(error)}\n")


class _Repeat:
    """A `sys.excepthook` that repeats what processes of an error's engine left in `file`, below what the one before
    prints."""

    def __init__(self, file: Path, before: Callable[..., object]) -> None:
        self._file, self._before = file, before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.is_file() else []
        engines = {_engine(one) for one in _shown(error)}
        left = [line for engine, _, line in (text.partition(" ") for text in lines) if engine in engines]
        for line in dict.fromkeys([*left, *_wrapped(error)]):  # ranks say the same
            print(f"\nllm-quant-rocm: {line}", file=sys.stderr)


def _shown(error: BaseException | None) -> Iterator[BaseException]:
    """The errors of a traceback as Python prints it, the last first, each once: an error may be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _engine(error: BaseException) -> str | None:
    """vLLM's id of the engine whose code the error came through, in whichever process, or None."""
    for frame, _ in walk_tb(error.__traceback__):
        for names in (frame.f_locals, getattr(frame.f_locals.get("self"), "__dict__", {})):
            engine = getattr(names.get("vllm_config"), "instance_id", None)
            if engine:
                return str(engine).partition("_")[0]  # behind it, the rank of data parallelism
    return None


def _wrapped(error: BaseException) -> list[str]:
    """What our code raised while vLLM checked its configuration, which pydantic wraps into a text of its own."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return []
    causes = [detail.get("ctx", {}).get("error") for detail in error.errors()]
    return [_in_a_line(cause) for cause in causes if isinstance(cause, Exception) and _is_ours(cause)]


def _is_ours(error: BaseException) -> bool:
    """Whether the error came through code of ours."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(module.partition(".")[0] in _PACKAGES for module in modules)


def _in_a_line(error: BaseException) -> str:
    return " ".join("".join(format_exception_only(error)).split())
