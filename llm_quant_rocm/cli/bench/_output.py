# SPDX-License-Identifier: Apache-2.0
"""How the figures of operators and collectives leave `bench`: a table or JSON, a plot, and where they were measured."""

import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from llm_quant_rocm.cli._errors import CommandError
from llm_quant_rocm.cli._json import print_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLE_POINTS = 8


@dataclass
class Panel:
    """Curves over sizes, of a number that a title names.

    Attributes:
        lines: by name, points (size, number).
        level: what a horizontal line marks, or None.
        log: whether numbers, like sizes, stand on a logarithmic scale.
    """

    title: str
    sizes: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    level: float | None = None
    log: bool = False


def check_plot(plot: Path | None) -> None:
    """Before anything is measured.

    Raises:
        CommandError: a plot is wanted that could not be drawn.
    """
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'llm-quant-rocm[tools]'")
    if plot.suffix.lower() != ".png" or not plot.absolute().parent.is_dir():
        raise CommandError(f"--plot {plot}: it must be a file's name that ends in .png, in a folder that is there.")


def draw(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Write a PNG with the panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 5 * len(panels), 4.6), layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, points in panel.lines.items():
            axis.plot(*zip(*points, strict=True), marker=".", linewidth=1.4, label=name)
        if panel.level is not None:
            axis.axhline(panel.level, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        if panel.log:
            axis.set_yscale("log")
        axis.set_xlabel(panel.sizes)
        axis.set_title(panel.title, fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    head(figure, title)
    figure.savefig(path, dpi=110)


def head(figure: "Figure", title: str) -> None:
    """Give a figure its title, broken into as many lines as its width asks for: the last line says where it was
    measured, and nothing of that may be cut off."""
    characters = int(figure.get_figwidth() * 72 / (0.6 * _TITLE_POINTS))
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, characters)]
    figure.suptitle("\n".join(lines), fontsize=_TITLE_POINTS, parse_math=False)


def times(title: str, keys: Mapping[str, str], rows: Sequence[Mapping[str, Any]], base: str) -> Table:
    """Microseconds and, in brackets, how many times as fast as `base`; `keys` are the first columns, headings by
    field."""
    rendered = Table(title=f"{title}: microseconds a call (times as fast as {base})")
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    for heading in (*keys.values(), *names):
        rendered.add_column(heading, justify="right")
    for row in rows:
        us = row["us"]
        cells = []
        for name in names:
            ratio = f" ({us[base] / us[name]:.2f})" if name in us and name != base and base in us else ""
            cells.append(f"{us[name]:.1f}{ratio}" if name in us else "")
        rendered.add_row(*(str(row[key]) for key in keys), *cells)
    return rendered


def show(
    output: Console,
    table: Table,
    panels: Sequence[Panel],
    facts: Mapping[str, Any],
    environment: Mapping[str, str],
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print the figures, and draw them where `plot` says."""
    from llm_quant_rocm import provenance

    line = provenance.line(dict(environment))
    if as_json:
        print_json(output, {"environment": dict(environment), **facts})
    else:
        _print(output, table, facts, line)
    if plot:  # last: a disk that refuses it costs no figure
        draw(panels, plot, f"{str(table.title).split(':')[0]}\n{line}")


def _print(output: Console, table: Table, facts: Mapping[str, Any], line: str) -> None:
    output.print(table)
    for name, reason in facts.get("absent", {}).items():
        output.print(f"{name} is left out: {reason}", markup=False, highlight=False, soft_wrap=True)
    for row in facts["rows"]:
        where = ", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, dict))
        for name, reason in row.get("failed", {}).items():
            output.print(
                f"{where}: {name} failed: {reason}", style="red", markup=False, highlight=False, soft_wrap=True
            )
    output.print(line, style="dim", highlight=False, soft_wrap=True)
