# SPDX-License-Identifier: Apache-2.0
"""What stops a command: one sentence for the user, with the cure."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from llm_quant_rocm import json_files

_LOG_LINES = 25


class CommandError(Exception):
    """A condition that the user can mend; its message says how."""


@contextmanager
def reported(command: str, messages: Console, goes_on: bool = False) -> Iterator[None]:
    """A `CommandError`, or what the system refuses, becomes the command's last line, and exit status 1; Ctrl-C another,
    and 130, as shells have it.

    Args:
        goes_on: whether the command goes on where it was stopped.
    """
    try:
        yield
    except (CommandError, OSError) as error:
        reason = f"{sentence(error)}." if isinstance(error, OSError) else str(error)
        line = f"[red]{command}: FAILED[/red]. {escape(reason)}"
        messages.print(line, markup=True, soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        messages.print(f"{command}: stopped" + ("; the same command goes on." if goes_on else "."), highlight=False)
        raise typer.Exit(130) from None


def sentence(error: Exception) -> str:
    """What went wrong, without its last stop: this project's own words, or the system's with the name and the cure."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    what = "the output" if error.filename is None else error.filename
    return f"{what} cannot be used ({error.strerror}): name another, make room there, or give this user the right to"


def end_of(log: str) -> str:
    """What an engine logged last, where its reason is."""
    return "\n".join(log.splitlines()[-_LOG_LINES:])


@contextmanager
def understood(model: Path) -> Iterator[None]:
    """What reading a model's description raises becomes a `CommandError`: its values may be anything."""
    try:
        with json_files.understood(str(model)):
            yield
    except OSError as error:
        raise CommandError(
            f"{error.filename or model} cannot be read ({error.strerror or error}): give this user the right to, name "
            "another, or download the checkpoint again."
        ) from error
    except ValueError as error:
        raise CommandError(f"{error}.") from error


@contextmanager
def ranks_reported() -> Iterator[None]:
    """What ends the processes of a measurement between GPUs becomes a `CommandError`."""
    import torch.multiprocessing as processes

    try:
        yield
    except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise CommandError(f"a rank failed: {reason}; see that the GPUs are free and reach each other.") from error
