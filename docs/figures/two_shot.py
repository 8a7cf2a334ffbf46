# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/two_shot.png: the two shots of the quantized all-reduce, and what a program does meanwhile.

`python docs/figures/two_shot.py`
"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

RANKS = 4
_COLOURS = plt.get_cmap("tab10").colors[:RANKS]
_WIDTH, _GAP, _HEIGHT = 4.0, 1.6, 0.7  # of a rank's buffer, between two of them, and of a row


def left_of(rank: int, segment: int = 0) -> float:
    """The left edge of a rank's segment."""
    return rank * (_WIDTH + _GAP) + segment * _WIDTH / RANKS


def segments(axis: Axes, rank: int, y: float, texts: list[str], owned_only: bool = False) -> None:
    """A rank's buffer, one colour an owner."""
    for segment in range(RANKS):
        shown = not owned_only or segment == rank
        face = _COLOURS[segment] if shown else "white"
        box = Rectangle((left_of(rank, segment), y), _WIDTH / RANKS, _HEIGHT, facecolor=face, edgecolor="lightgrey")
        axis.add_patch(box)
        if shown:
            x = left_of(rank, segment) + _WIDTH / RANKS / 2
            axis.text(x, y + _HEIGHT / 2, texts[segment], ha="center", va="center", color="white", fontsize=8)


def arrows(axis: Axes, y_from: float, y_to: float, to_owner: bool) -> None:
    """From every rank to every owner, or from every owner to every rank."""
    middle = _WIDTH / RANKS / 2
    for rank in range(RANKS):
        for owner in range(RANKS):
            at_rank, at_owner = left_of(rank, owner) + middle, left_of(owner, owner) + middle
            ends = (at_rank, at_owner) if to_owner else (at_owner, at_rank)
            axis.add_patch(
                FancyArrowPatch(
                    (ends[0], y_from), (ends[1], y_to), arrowstyle="-|>", mutation_scale=7, shrinkA=0, shrinkB=0,
                    color=_COLOURS[owner], linewidth=0.9, linestyle="--" if rank == owner else "-",
                )
            )  # fmt: skip


def draw_messages(axis: Axes) -> None:
    rows = (
        (8.4, "values of each rank,\n16 bits, one segment\nan owner"),
        (5.9, "shot 1: encoded,\nto the owners"),
        (4.2, "owners decode,\nadd in fp32 in the\norder of ranks,\nencode the sum"),
        (2.2, "shot 2: the same\nbytes to all"),
        (0.2, "all decode: the same\nbits on every rank"),
    )
    for y, text in rows:
        axis.text(-0.5, y + 0.35, text, ha="right", va="center", fontsize=8.5)
    for rank in range(RANKS):
        axis.text(left_of(rank) + _WIDTH / 2, 9.45, f"rank {rank}", ha="center", fontsize=10)
        segments(axis, rank, 8.4, [f"$x_{{{rank},{segment}}}$" for segment in range(RANKS)])
        segments(axis, rank, 4.2, [f"$\\Sigma_{segment}$" for segment in range(RANKS)], owned_only=True)
        segments(axis, rank, 0.2, [f"$y_{segment}$" for segment in range(RANKS)])
    arrows(axis, 8.35, 4.95, to_owner=True)
    arrows(axis, 4.15, 0.95, to_owner=False)
    axis.set(xlim=(-5.2, left_of(RANKS) - _GAP + 0.2), ylim=(-0.1, 10))
    axis.axis("off")


def draw_pipeline(axis: Axes) -> None:
    tiles = 4
    steps = ("send: encode and store to the owners", "own: await, add, encode, store to all", "receive: await, decode")
    shades = plt.get_cmap("Greys")
    for tile in range(tiles):
        for offset in range(len(steps)):
            axis.add_patch(Rectangle((tile + offset, -offset), 0.96, 0.8, facecolor=shades(0.5 + 0.12 * tile)))
            axis.text(
                tile + offset + 0.48, 0.4 - offset, f"tile {tile}", ha="center", va="center", color="white", fontsize=8
            )
    for offset, text in enumerate(steps):
        axis.text(-0.15, 0.4 - offset, text, ha="right", va="center", fontsize=8.5)
    axis.annotate("", (tiles + 2, -2.45), (0, -2.45), arrowprops={"arrowstyle": "->", "color": "grey"})
    axis.text(
        0, -2.75, "turns of one program: links carry one tile while others are worked on", fontsize=8, color="grey"
    )
    axis.set(xlim=(-3.6, tiles + 2.2), ylim=(-2.9, 1))
    axis.axis("off")


def main(folder: Path) -> None:
    """Draw two_shot.png in `folder`."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 7.6), height_ratios=[2.6, 1])
    draw_messages(above)
    draw_pipeline(below)
    figure.suptitle("The two shots of the quantized all-reduce (dashed: to oneself, encoded all the same)", fontsize=11)
    figure.tight_layout()
    figure.savefig(folder / "two_shot.png", dpi=110)


if __name__ == "__main__":
    main(Path(__file__).parent)
