# SPDX-License-Identifier: Apache-2.0
"""What stops a command: one sentence for the user, with the cure."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape


class CommandError(Exception):
    """A condition that the user can mend; its message says how."""


@contextmanager
def reported(command: str, messages: Console) -> Iterator[None]:
    """A `CommandError` becomes the command's last line, and exit status 1."""
    try:
        yield
    except CommandError as error:
        messages.print(f"[red]{command}: FAILED[/red]. {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None
