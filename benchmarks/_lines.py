# SPDX-License-Identifier: Apache-2.0
"""The report's plain plots: curves over sizes, a panel a case."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt

from benchmarks._markdown import RESULTS

Points = list[tuple[float, float]]


def speed_up(rows: Sequence[Mapping[str, Any]], size: str, base: str) -> dict[str, Points]:
    """By name, `base`'s time over its own, for the rows that have both."""
    names = dict.fromkeys(name for row in rows for name in row["us"] if name != base)
    return {
        name: [(row[size], row["us"][base] / row["us"][name]) for row in rows if {name, base} <= row["us"].keys()]
        for name in names
    }


def plot(name: str, title: str, panels: Mapping[str, Mapping[str, Points]], sizes: str, numbers: str) -> None:
    """results/NAME.png, with a grey line at 1."""
    columns = min(3, len(panels))
    count = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        count, columns, figsize=(1 + 4.2 * columns, 0.8 + 3.2 * count), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (label, curves) in zip(axes.flat, panels.items(), strict=False):
        for who, points in curves.items():
            axis.plot([x for x, _ in points], [y for _, y in points], marker=".", linewidth=1.4, label=who)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(label, fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.supxlabel(sizes)
    figure.supylabel(numbers)
    figure.suptitle(title, fontsize=10)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)


def bars(name: str, title: str, panels: Mapping[str, Mapping[str, float]]) -> None:
    """results/NAME.png: a bar a case, a panel a number; as wide as a title with a device and versions at least."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(max(8.0, 1 + 3.6 * len(panels)), 3.6), squeeze=False, layout="constrained"
    )
    for axis, (label, values) in zip(axes.flat, panels.items(), strict=True):
        drawn = axis.bar(range(len(values)), list(values.values()))
        axis.bar_label(drawn, fmt="%.4g", fontsize=7)
        axis.margins(y=0.12)
        axis.set_xticks(range(len(values)), list(values), rotation=40, ha="right", fontsize=7)
        axis.set_title(label, fontsize=9)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)
