# SPDX-License-Identifier: Apache-2.0
"""Measured launch configurations: configs/<operator>/<architecture>.json.

A file holds where it was measured and, for every shape, what won:

    {"measured_on": {"device": ..., "torch": ..., "triton": ..., "commit": ...},
     "shapes": [{"n": 8192, "k": 8192, "m": 16, "backend": "triton", "config": {"block_m": 16, ...}}, ...]}
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Measured:
    """What won at one shape: the backend, and the best configuration of our own kernel whether or not it won."""

    n: int
    k: int
    m: int
    backend: str
    config: dict[str, Any]


@cache
def shapes(operator: str, arch: str) -> tuple[Measured, ...]:
    """Everything measured of `operator` on `arch`; empty where nobody has."""
    file = resources.files("llm_quant_rocm") / "configs" / operator / f"{arch}.json"
    if not file.is_file():
        return ()
    return tuple(Measured(**shape) for shape in json.loads(file.read_text())["shapes"])


@cache
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
