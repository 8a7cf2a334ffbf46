# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm doctor`: what this machine can do, and what would not work.

One module a table, each with a function `examine` that gives a `table.Part`; `render` shows them.
"""

from typing import Annotated

import typer
from rich.console import Console

from llm_quant_rocm.cli.doctor import render
from llm_quant_rocm.cli.doctor.table import Part


def doctor(
    engines: Annotated[
        bool, typer.Option("--engines", help="Import each engine, and load the plugin into it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
) -> None:
    """Examine this machine. Exit status 1 where something would not work."""
    parts = _of_machine(engines)
    (render.print_json if as_json else render.print_tables)(parts, Console())
    if any(part.problems for part in parts):
        raise typer.Exit(1)


def _of_machine(load_engines: bool) -> list[Part]:
    import torch

    from llm_quant_rocm.cli.doctor import engines, environment, machine, operators, packages

    gpu = torch.cuda.is_available()
    return [
        machine.examine(),
        packages.examine(gpu),
        operators.examine(torch.device("cuda" if gpu else "cpu")),
        engines.examine(load_engines),
        environment.examine(),
    ]
