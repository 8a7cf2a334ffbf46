# SPDX-License-Identifier: Apache-2.0
"""Measured launch configurations: configs/<operator>/<architecture>.json, and over them a file of the same form in the
user's cache, which `llm-quant-rocm tune` writes.

A file holds where it was measured and, for every shape, what won:

    {"measured_on": {"device": ..., "torch": ..., "triton": ..., "llm-quant-rocm": ..., "commit": ...},
     "shapes": [{"n": 8192, "k": 8192, "m": 16, "backend": "triton", "config": {"block_m": 16, ...}}, ...]}

A file of the cache serves the versions of Triton and of this package that it was measured with: under others its
configurations may not fit.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from llm_quant_rocm import provenance

logger = logging.getLogger("llm_quant_rocm")

# What is kept of lookups, and of the choices made with them: one for each number of rows of each layer, of which a
# server meets tens of thousands. The last ones serve.
KEPT = 4096
_SAME = ("llm-quant-rocm", "triton")


@dataclass(frozen=True)
class Measured:
    """What won at one shape: the backend, and the best configuration of our own kernel whether or not it won."""

    n: int
    k: int
    m: int
    backend: str
    config: dict[str, Any]


def cache_file(operator: str, arch: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Where what was measured of `operator` on this machine is kept."""
    folder = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "llm-quant-rocm" / operator / f"{arch}.json"


@cache
def shapes(operator: str, arch: str) -> tuple[Measured, ...]:
    """Everything measured of `operator` on `arch`, the user's over the shipped; empty where nobody has.

    Raises:
        ValueError: the user's file is broken; the message names it.
    """
    shipped = resources.files("llm_quant_rocm") / "configs" / operator / f"{arch}.json"
    known = {(shape.n, shape.k, shape.m): shape for shape in _read(shipped)[1]}
    mine = cache_file(operator, arch)
    measured_on, found = _read(mine)
    if found:
        here = {"llm-quant-rocm": provenance.__version__, "triton": provenance.triton_version()}
        other = [f"{name} {measured_on.get(name)}" for name in _SAME if measured_on.get(name) != here[name]]
        if other:
            logger.warning("%s was measured with %s: run llm-quant-rocm tune again", mine, " and ".join(other))
        else:
            logger.info("%s: %d shapes from %s", operator, len(found), mine)
            known |= {(shape.n, shape.k, shape.m): shape for shape in found}
    return tuple(known.values())


@lru_cache(KEPT)
def lookup(operator: str, arch: str, m: int, n: int, k: int) -> Measured | None:
    """The measurement nearest to the shape: the weight nearest in log size, then the smallest m that covers it.

    The next larger m, because a configuration's tiles are cut for the rows it was measured with; beyond the largest,
    the largest.
    """
    known = shapes(operator, arch)
    if not known:
        return None

    def distance(shape: Measured) -> float:
        return abs(math.log(shape.n / n)) + abs(math.log(shape.k / k))

    nearest = min(known, key=distance)
    same_weight = sorted((shape for shape in known if (shape.n, shape.k) == (nearest.n, nearest.k)), key=lambda s: s.m)
    return next((shape for shape in same_weight if shape.m >= m), same_weight[-1])


def _read(file: Traversable) -> tuple[dict[str, str], list[Measured]]:
    """Where a file was measured, and its shapes; nothing where there is none."""
    if not file.is_file():
        return {}, []
    try:
        content = json.loads(file.read_text())
        return content["measured_on"], [Measured(**shape) for shape in content["shapes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is no file of measured configurations ({error!r}): delete it, and run llm-quant-rocm tune again"
        ) from error
