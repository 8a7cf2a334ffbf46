# SPDX-License-Identifier: Apache-2.0
"""The picture of what a quantization lost, layer by layer."""

import re
from collections.abc import Mapping
from pathlib import Path

_NUMBER = re.compile(r"\.(\d+)\.")


def series(errors: Mapping[str, float]) -> dict[str, dict[int, float]]:
    """The largest error of each kind of module in each layer: by the last part of the name, then by the first number
    in it. Experts are together; a module outside the layers is in layer 0."""
    found: dict[str, dict[int, float]] = {}
    for module, error in errors.items():
        number = _NUMBER.search(f".{module}.")
        layer = int(number.group(1)) if number else 0
        kind = module.rpartition(".")[2]
        if ".experts." in module:
            kind = f"experts {kind}, the worst"
        kinds = found.setdefault(kind, {})
        kinds[layer] = max(error, kinds.get(layer, 0.0))
    return {kind: dict(sorted(layers.items())) for kind, layers in sorted(found.items())}


def draw(errors: Mapping[str, float], path: Path, title: str) -> None:
    """Write a PNG: relative error in percent against the layer, a line a kind of module."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for kind, layers in series(errors).items():
        axis.plot(list(layers), [100 * error for error in layers.values()], marker=".", label=kind)
    axis.set_xlabel("layer")
    axis.set_ylabel("relative error of the weight, %")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    axis.set_title(title, fontsize=10, parse_math=False)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)
