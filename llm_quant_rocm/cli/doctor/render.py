# SPDX-License-Identifier: Apache-2.0
"""The doctor's report, for people and for programs."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llm_quant_rocm.cli import _json
from llm_quant_rocm.cli.doctor.table import Part


def print_tables(parts: Sequence[Part], console: Console) -> None:
    """Every part as a table, then all problems with their cures."""
    for part in parts:
        console.print(_table(part))
        for note in part.notes:
            console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
        _print_below(part, console)
        console.print()
    problems = [problem for part in parts for problem in part.problems]
    for number, problem in enumerate(problems, 1):
        console.print(f"[red]{number}. {escape(problem.what)}[/red]", highlight=False)
        if problem.cure:
            console.print(f"   cure: {escape(problem.cure)}", highlight=False)
    if problems:
        console.print(f"[red]doctor: {len(problems)} problem{'s' * (len(problems) > 1)} found[/red]", highlight=False)
    else:
        console.print("doctor: no problem found", highlight=False)


def print_json(parts: Sequence[Part], console: Console) -> None:
    """The same as one JSON object: the parts by name, and whether all would work."""
    report: dict[str, Any] = {part.name: part.data() for part in parts}
    report["passed"] = not any(part.problems for part in parts)
    _json.print_json(console, report)


def _table(part: Part) -> Table:
    table = Table(title=part.title, title_justify="left", title_style="bold")
    shown = [name for name in part.headings() if any(_cell(getattr(row, name)) for row in part.rows)]
    for name in shown:
        is_number = all(isinstance(getattr(row, name), int | float | None) for row in part.rows)
        table.add_column(part.headings()[name], overflow="fold", justify="right" if is_number else "left")
    for row in part.rows:
        table.add_row(*(escape(_cell(getattr(row, name))) for name in shown))
    return table


def _print_below(part: Part, console: Console) -> None:
    """What does not stand in the table, by the first cell of its row."""
    for row in part.rows:
        lines = [line for name in part.below() for line in _cell(getattr(row, name)).splitlines()]
        if lines:
            console.print(f"\n{escape(_cell(getattr(row, next(iter(part.headings())))))}:", highlight=False)
        for line in lines:
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_cell(entry)}" for key, entry in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
