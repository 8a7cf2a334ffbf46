# SPDX-License-Identifier: Apache-2.0
"""The picture of a serving comparison."""

from pathlib import Path
from typing import TYPE_CHECKING

from llm_quant_rocm.cli.bench._output import head

if TYPE_CHECKING:
    from llm_quant_rocm.cli.bench.serve import Loads


def draw(found: "Loads", path: Path, title: str) -> None:
    """Write a PNG: time to the first token, time of a token and tokens a second, a bar a method, groups by load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = (("time to first token, ms", "ttft_ms"), ("time a token, ms", "tpot_ms"), ("tokens/s", "output_tokens_s"))
    counts = list(next(iter(found.values())))
    width = 0.8 / len(found)
    for axis, (label, field) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for place, (name, loads) in enumerate(found.items()):
            lefts = [group + (place + 0.5) * width - 0.4 for group in range(len(counts))]
            bars = axis.bar(lefts, [getattr(loads[count], field) for count in counts], width * 0.92, label=name)
            axis.bar_label(bars, fmt="%.4g", fontsize=7)
        axis.set_xticks(range(len(counts)), [f"{count} prompts" for count in counts])
        axis.set_title(label, fontsize=9)
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    head(figure, title)
    figure.savefig(path, dpi=110)
