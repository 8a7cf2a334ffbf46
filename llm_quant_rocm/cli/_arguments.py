# SPDX-License-Identifier: Apache-2.0
"""What tune and bench read alike from their arguments."""

import importlib.util
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from llm_quant_rocm.cli._errors import CommandError

Layers = dict[str, tuple[int, int]]  # by name, a weight's [N, K]


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a list with commas, rising, each once.

    Raises:
        CommandError: no positive whole numbers.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise CommandError(f"{option} {text}: it must be positive whole numbers with commas, for example 16,64.")
    return tuple(sorted({int(part) for part in parts}))


def layers(model: Path | None, ranks: int, patterns: Sequence[str] | None) -> Layers:
    """One rank's weights of a model, or of well-known models; the same weight once.

    Args:
        model: a checkpoint's folder, or its config.json.
        patterns: names to choose, `*` for anything; all where left out.

    Raises:
        CommandError: the model has no config that can be read, or no layer of such a name.
    """
    from llm_quant_rocm.tune.shapes import WELL_KNOWN, of_model

    known: Layers = WELL_KNOWN
    if model is not None:
        file = model / "config.json" if model.is_dir() else model
        if not file.is_file():
            raise CommandError(f"{model} has no config.json: name a checkpoint's folder.")
        try:
            known = of_model(json.loads(file.read_text()), ranks)
        except ValueError as error:
            raise CommandError(f"{error}.") from error
    elif ranks != 1:
        raise CommandError("--tp cuts a model's layers: name the model by --model.")
    chosen = {
        layer: shape
        for layer, shape in known.items()
        if any(fnmatchcase(layer, pattern) for pattern in patterns or ["*"])
    }
    if not chosen:
        raise CommandError(f"--layers matches none of {', '.join(known)}.")
    first: dict[tuple[int, int], str] = {}
    for layer, shape in chosen.items():
        first.setdefault(shape, layer)
    return {layer: shape for shape, layer in first.items()}


def require_gpu() -> None:
    """Make sure that there is a GPU to measure on, and Triton.

    Raises:
        CommandError: there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise CommandError("no GPU is here, or torch cannot use it: measure on the machine that will serve the model.")
    if importlib.util.find_spec("triton") is None:
        raise CommandError("Triton is not installed, and the kernels are written in it: pip install triton.")
