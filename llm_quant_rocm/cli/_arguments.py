# SPDX-License-Identifier: Apache-2.0
"""What commands read alike from their arguments."""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from llm_quant_rocm.cli._errors import CommandError, understood
from llm_quant_rocm.json_files import json_object

Layers = dict[str, tuple[int, int]]  # by name, a weight's [N, K]
Experts = dict[str, tuple[int, int, int, int]]  # by name, experts, top-k, hidden and inner size
Shape = TypeVar("Shape", tuple[int, int], tuple[int, int, int, int])


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a list with commas, rising, each once.

    Raises:
        CommandError: no positive whole numbers.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise CommandError(f"{option} {text}: it must be positive whole numbers with commas, for example 16,64.")
    return tuple(sorted({int(part) for part in parts}))


def listed(text: str) -> list[str]:
    """The names of a list with commas, in order, without blanks around them."""
    return [name for part in text.split(",") if (name := part.strip())]


def name_of(folder: Path) -> str:
    """What a folder is called that may be given as `.` or `..`."""
    return os.path.basename(os.path.abspath(folder))


def layers(model: Path | None, ranks: int, patterns: Sequence[str] | None) -> Layers:
    """One rank's weights of a model, or of well-known models; the same weight once.

    Args:
        model: a checkpoint's folder, or its config.json.
        patterns: names to choose, `*` for anything; all where left out.

    Raises:
        CommandError: the model has no config that can be read, or no layer of such a name.
    """
    from llm_quant_rocm.tune.shapes import WELL_KNOWN, of_model

    return _chosen(WELL_KNOWN if model is None else _of(model, ranks, of_model), model, ranks, patterns)


def experts(model: Path | None, ranks: int, patterns: Sequence[str] | None) -> Experts:
    """One rank's routed experts of a model, or of well-known models. Args and Raises: those of `layers`, and a
    CommandError for a model without."""
    from llm_quant_rocm.tune.shapes import WELL_KNOWN_EXPERTS, experts_of_model

    known = WELL_KNOWN_EXPERTS if model is None else _of(model, ranks, experts_of_model)
    if not known:
        raise CommandError(f"{model} has no routed experts: name the operators of its dense layers.")
    return _chosen(known, model, ranks, patterns)


def _of(model: Path, ranks: int, shapes: Callable[[Any, int], dict[str, Shape]]) -> dict[str, Shape]:
    """What `shapes` finds in a model's config.json."""
    config = config_at(model)
    with understood(model):
        return shapes(config, ranks)


def config_at(model: Path) -> dict[str, Any]:
    """What a model's config.json says; `model` is its folder, or the file.

    Raises:
        CommandError: there is none, or it cannot be read.
    """
    with understood(model):
        file = model / "config.json" if model.is_dir() else model
        if not file.is_file():
            raise CommandError(f"{model} has no config.json: name a checkpoint's folder.")
        return json_object(file)


def _chosen(
    known: Mapping[str, Shape], model: Path | None, ranks: int, patterns: Sequence[str] | None
) -> dict[str, Shape]:
    """Those whose names match a pattern, each shape once."""
    if model is None and ranks != 1:
        raise CommandError("--tp cuts a model's layers: name the model by --model.")
    first: dict[Shape, str] = {}
    for layer, shape in known.items():
        if any(fnmatchcase(layer, pattern) for pattern in patterns or ["*"]):
            first.setdefault(shape, layer)
    if not first:
        raise CommandError(f"--layers matches none of {', '.join(known)}.")
    return {layer: shape for shape, layer in first.items()}


def require_gpu(count: int = 1) -> None:
    """Make sure that there are GPUs to measure on, and Triton.

    Raises:
        CommandError: there are not.
    """
    import torch

    if not torch.cuda.is_available():
        raise CommandError("no GPU is here, or torch cannot use it: measure on the machine that will serve the model.")
    if torch.cuda.device_count() < count:
        raise CommandError(f"{torch.cuda.device_count()} GPUs are here, and {count} are needed: lower --tp.")
    require_triton()


def require_triton() -> None:
    """Make sure that Triton is here.

    Raises:
        CommandError: it is not.
    """
    if importlib.util.find_spec("triton") is None:
        raise CommandError("Triton is not installed, and the kernels are written in it: pip install triton.")
