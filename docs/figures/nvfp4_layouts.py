# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/nvfp4_layouts.png: where the codes of an NVFP4 weight stand for the kernels of each architecture.

Nothing is drawn from memory: codes with a single bit set are packed by `llm_quant_rocm.formats`, and the picture shows
where the bit came out. `python docs/figures/nvfp4_layouts.py`
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from llm_quant_rocm.formats import nvfp4_mfma, nvfp4_wgmma

Place = tuple[int, int]  # row and column of a code
Pack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_BITS = ("0", "1", "2", "s")  # of a code: the places of its magnitude, and its sign
_COLOURS = plt.get_cmap("tab10").colors[:8]


def packed(module: ModuleType, layout: str) -> Pack:
    """The words of a matrix in `layout`, as int64."""
    return lambda codes, scales: module.pack(codes, scales, layout)[0].flatten().to(torch.int64) & 0xFFFFFFFF


def in_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The words of a checkpoint's own order."""
    return codes.flatten().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def words(pack: Pack, shape: Place, place: Place, value: int) -> torch.Tensor:
    """The words of a matrix of zeros with one code."""
    codes = torch.zeros(shape[0], shape[1] // 2, dtype=torch.uint8)
    row, column = place
    codes[row, column // 2] = value << (4 * (column % 2))
    return pack(codes, torch.ones(shape[0], shape[1] // 16).to(torch.float8_e4m3fn))


def first_word(pack: Pack, shape: Place) -> dict[int, tuple[Place, str]]:
    """Of every bit of word 0 the code that it belongs to, and which bit of that code it is."""
    found = {}
    for row in range(shape[0]):
        for column in range(shape[1]):
            if not words(pack, shape, (row, column), 7)[0]:
                continue
            for bit, label in enumerate(_BITS):
                # A sign alone would be -0, which some layouts drop.
                value = 9 if label == "s" else 1 << bit
                word = int(words(pack, shape, (row, column), value)[0])
                if label == "s":
                    word &= ~int(words(pack, shape, (row, column), 1)[0])
                found[word.bit_length() - 1] = ((row, column), label)
    return found


def lanes(pack: Pack, shape: Place, lane_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The lane that multiplies each code of a piece, [rows, columns]."""
    found = torch.empty(shape, dtype=torch.int64)
    for row in range(shape[0]):
        for column in range(shape[1]):
            found[row, column] = lane_of(words(pack, shape, (row, column), 7).nonzero()[0, 0])
    return found


def draw_word(axis: Axes, title: str, bits: dict[int, tuple[Place, str]]) -> None:
    """One word, bit 31 on the left, and whose codes it holds."""
    places = sorted({place for place, _ in bits.values()})
    for bit in range(32):
        place, label = bits[bit]
        axis.add_patch(Rectangle((31 - bit, 0), 1, 1, facecolor=_COLOURS[places.index(place)], edgecolor="white"))
        axis.text(31.5 - bit, 0.5, label, ha="center", va="center", fontsize=8, color="white", fontweight="bold")
    for bit in (31, 24, 16, 8, 0):
        axis.text(31.5 - bit, -0.35, str(bit), ha="center", va="center", fontsize=7, color="grey")
    for number, (row, column) in enumerate(places):
        left = 33 + 1.9 * number
        axis.add_patch(Rectangle((left, 0.1), 1.8, 0.8, facecolor=_COLOURS[number]))
        axis.text(left + 0.9, 0.5, f"{row}, {column}", ha="center", va="center", fontsize=7.5, color="white")
    axis.text(0, 1.25, title, fontsize=9, va="bottom")
    axis.set(xlim=(0, 48.5), ylim=(-0.7, 1.9))
    axis.axis("off")


def draw_lanes(axis: Axes, title: str, owner: torch.Tensor, marked: int) -> None:
    """Which lane has which code of a piece: shades, and one lane's codes in red."""
    axis.imshow(owner.numpy(), aspect="auto", cmap="Blues", vmin=-int(owner.max()) // 2, interpolation="nearest")
    for row, column in (owner == marked).nonzero().tolist():
        axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="crimson"))
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel("column", fontsize=8)
    axis.set_ylabel("row", fontsize=8)
    axis.tick_params(labelsize=7)


def main(folder: Path) -> None:
    """Draw nvfp4_layouts.png in `folder`."""
    mfma, fp4 = (packed(nvfp4_mfma, layout) for layout in (nvfp4_mfma.LAYOUT, nvfp4_mfma.LAYOUT_FP4))
    wgmma = packed(nvfp4_wgmma, nvfp4_wgmma.LAYOUT)
    strips = (
        ("checkpoint: eight neighbouring codes, in order", first_word(in_rows, (1, 16))),
        (
            'Hopper, layout "wgmma": a lane\'s codes of two rows, where they become fp16 with the fewest instructions',
            first_word(wgmma, (16, 64)),
        ),
        (
            'gfx90a and gfx942, layout "mfma": a code in every byte, and four more in the word reversed',
            first_word(mfma, (1, 128)),
        ),
        (
            'gfx950, layout "mfma_fp4": codes side by side, for the instruction that converts them',
            first_word(fp4, (1, 128)),
        ),
    )
    figure, axes = plt.subplot_mosaic(
        [[0, 0], [1, 1], [2, 2], [3, 3], ["wgmma", "mfma"]], figsize=(10, 7.6), height_ratios=[1, 1, 1, 1, 3.4]
    )
    for number, (title, bits) in enumerate(strips):
        draw_word(axes[number], title, bits)
    axes[0].text(33, 1.25, "whose codes: row, column", fontsize=8, va="bottom", color="grey")
    hopper, cdna = lanes(wgmma, (16, 64), lambda word: word // 4), lanes(mfma, (32, 128), lambda word: word % 256 // 4)
    draw_lanes(axes["wgmma"], '"wgmma": 16 rows and 64 columns for a warp; in red, lane 5 of 32', hopper, 5)
    draw_lanes(axes["mfma"], '"mfma": 32 rows and 128 columns for a wave; in red, lane 21 of 64', cdna, 21)
    figure.suptitle("NVFP4 weights as the kernels read them: 0 1 2 are a code's magnitude, s its sign", fontsize=11)
    figure.tight_layout()
    figure.savefig(folder / "nvfp4_layouts.png", dpi=110)


if __name__ == "__main__":
    main(Path(__file__).parent)
