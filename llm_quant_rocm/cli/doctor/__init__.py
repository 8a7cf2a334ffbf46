# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm doctor`: what this machine can do, what would not work, and what will happen to a checkpoint.

One module a table, each with a function `examine` that gives a `table.Part`; `render` shows them.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from llm_quant_rocm.cli._errors import CommandError, reported
from llm_quant_rocm.cli.doctor import render
from llm_quant_rocm.cli.doctor.table import Part


def doctor(
    model: Annotated[
        Path | None, typer.Argument(help="A checkpoint's folder; its config and headers are read, no weights.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="With MODEL: the number of tensor-parallel ranks.")] = 1,
    engines: Annotated[bool, typer.Option("--engines", help="Import each engine, and the plugin into it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
) -> None:
    """Examine this machine, or what will happen to a checkpoint. Exit status 1 where something would not work."""
    with reported("doctor", Console(stderr=True)):
        if tp > 1 and model is None:
            raise CommandError("--tp cuts a model's layers: name the model's folder.")
        parts = _of_checkpoint(model, tp) if model else _of_machine(engines)
        (render.print_json if as_json else render.print_tables)(parts, Console())
    if any(part.problems for part in parts):
        raise typer.Exit(1)


def _of_checkpoint(folder: Path, ranks: int) -> list[Part]:
    from llm_quant_rocm.cli.doctor import model

    return model.examine(folder, ranks)


def _of_machine(load_engines: bool) -> list[Part]:
    import torch

    from llm_quant_rocm.cli.doctor import engines, environment, machine, operators, packages

    devices = machine.examine()
    best = torch.device(devices.rows[0].device if devices.rows else "cpu")
    parts = [
        devices,
        packages.examine(gpu=best.type == "cuda"),
        operators.examine(best),
        engines.examine(load_engines),
    ]
    return [*parts, environment.examine(said=[problem.what for part in parts for problem in part.problems])]
