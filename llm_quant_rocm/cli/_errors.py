# SPDX-License-Identifier: Apache-2.0
"""What stops a command: one sentence for the user, with the cure."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape


class CommandError(Exception):
    """A condition that the user can mend; its message says how."""


@contextmanager
def reported(command: str, messages: Console, goes_on: bool = False) -> Iterator[None]:
    """A `CommandError` becomes the command's last line, and exit status 1; Ctrl-C another, and 130, as shells have it.

    Args:
        goes_on: whether the command goes on where it was stopped.
    """
    try:
        yield
    except CommandError as error:
        line = f"[red]{command}: FAILED[/red]. {escape(str(error))}"
        messages.print(line, markup=True, soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        messages.print(f"{command}: stopped" + ("; the same command goes on." if goes_on else "."), highlight=False)
        raise typer.Exit(130) from None


@contextmanager
def understood(model: Path) -> Iterator[None]:
    """What reading a model's description raises becomes a `CommandError`: its values may be anything."""
    try:
        yield
    except OSError as error:
        raise CommandError(
            f"{error.filename or model} cannot be read ({error.strerror or error}): give this user the right to, or "
            "download the checkpoint again."
        ) from error
    except ValueError as error:
        raise CommandError(f"{error}.") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, RecursionError, re.error) as error:
        raise CommandError(
            f"{model} describes itself in a way that cannot be understood ({error!r}): download the checkpoint again, "
            "or correct its config.json."
        ) from error


@contextmanager
def ranks_reported() -> Iterator[None]:
    """What ends the processes of a measurement between GPUs becomes a `CommandError`."""
    import torch.multiprocessing as processes

    try:
        yield
    except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise CommandError(f"a rank failed: {reason}; see that the GPUs are free and reach each other.") from error
