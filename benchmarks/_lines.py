# SPDX-License-Identifier: Apache-2.0
"""The report's plain plots: curves over sizes, a panel a case."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt

from benchmarks._markdown import RESULTS

Points = list[tuple[float, float]]


def speed_up(rows: Sequence[Mapping[str, Any]], size: str, base: str) -> dict[str, Points]:
    """By name, `base`'s time over its own, for the rows that have both."""
    names = dict.fromkeys(name for row in rows for name in row["us"] if name != base)
    found = {
        name: [(row[size], row["us"][base] / row["us"][name]) for row in rows if {name, base} <= row["us"].keys()]
        for name in names
    }
    return {name: points for name, points in found.items() if points}


def by_size(axis: Any, sizes: Sequence[float], text: Callable[[Any], str] = "{:g}".format) -> None:
    """Gives an axis a logarithmic x with those of `sizes`, ascending, that leave each other room, written by `text`."""
    apart = (sizes[-1] / sizes[0]) ** (1 / 10)
    shown: list[float] = []
    for size in sizes:
        if not shown or size / shown[-1] >= apart:
            shown.append(size)
    axis.set_xscale("log", base=2)
    axis.set_xticks(shown, [text(size) for size in shown], rotation=30, fontsize=8)
    axis.minorticks_off()


def grid(
    panels: int, most: int, panel: tuple[float, float], margin: tuple[float, float] = (0, 0), least: float = 0
) -> tuple[Any, Sequence[Any]]:
    """A figure with the axes of so many panels, at most `most` in a row: width and height of a panel and of what is
    around all, and the least width, in inches."""
    columns = min(most, panels)
    rows = -(-panels // columns)
    size = max(least, margin[0] + panel[0] * columns), margin[1] + panel[1] * rows
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[panels:]:
        axis.set_visible(False)
    return figure, axes.flat[:panels]


def save(figure: Any, name: str) -> None:
    """results/NAME.png."""
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)


def curves(
    axis: Any, drawn: Mapping[str, Points], colours: Mapping[str, str], text: Callable[[Any], str] = "{:g}".format
) -> dict[str, Any]:
    """Draws curves over sizes, which `text` writes, with a grey line at 1, from 0 on; returns the lines by name."""
    found = {}
    for who, points in drawn.items():
        xs, ys = zip(*points, strict=True)
        (found[who],) = axis.plot(xs, ys, color=colours[who], marker=".", linewidth=1.4)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_ylim(bottom=0)
    by_size(axis, sorted({x for points in drawn.values() for x, _ in points}), text)
    axis.grid(alpha=0.3)
    return found


def plot(name: str, title: str, panels: Mapping[str, Mapping[str, Points]], sizes: str, numbers: str) -> None:
    """results/NAME.png, with a grey line at 1; numbers begin at 0."""
    figure, axes = grid(len(panels), 3, (4.2, 3.4), (2.2, 0.8))
    names = dict.fromkeys(who for curves in panels.values() for who in curves)
    colours = {who: f"C{place}" for place, who in enumerate(names)}
    legend: dict[str, Any] = {}
    for axis, (label, drawn) in zip(axes, panels.items(), strict=True):
        legend |= curves(axis, drawn, colours)
        axis.set_title(label, fontsize=9)
    figure.legend(legend.values(), legend, loc="outside right upper", fontsize=8)
    figure.supxlabel(sizes)
    figure.supylabel(numbers)
    figure.suptitle(title, fontsize=10)
    save(figure, name)


def bars(name: str, title: str, panels: Mapping[str, Mapping[str, float]]) -> None:
    """results/NAME.png: a bar a case, a panel a number; as wide as a title with a device and versions at least."""
    figure, axes = grid(len(panels), 4 if len(panels) < 5 else 3, (3.6, 3.2), (1, 0.4), least=8)
    for axis, (label, values) in zip(axes, panels.items(), strict=True):
        drawn = axis.bar(range(len(values)), list(values.values()))
        axis.bar_label(drawn, fmt="%.4g", fontsize=7)
        axis.margins(y=0.12)
        axis.set_xticks(range(len(values)), list(values), rotation=40, ha="right", fontsize=7)
        axis.set_title(label, fontsize=9)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(title, fontsize=10)
    save(figure, name)
