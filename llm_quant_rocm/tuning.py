# SPDX-License-Identifier: Apache-2.0
"""Measured launch configurations: configs/<operator>/<architecture>.json, and over them a file of the same form in the
user's cache, which `llm-quant-rocm tune` writes.

A file holds where it was measured and, for every shape, what won:

    {"measured_on": {"device": ..., "torch": ..., "triton": ..., "llm-quant-rocm": ..., "commit": ...},
     "shapes": [{"n": 8192, "k": 8192, "m": 16, "backend": "triton", "config": {"block_m": 16, ...}}, ...]}

Shapes of routed experts are {"experts": 128, "hidden": 2048, "inner": 768, "slots": 512, ...} instead.

A file of the cache serves the versions of Triton and of this package that it was measured with: under others its
configurations may not fit. Of everything else `measured_on` may say several values, as "2.11.0; 2.12.0", where what was
measured under the one was gone on with under the other.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from llm_quant_rocm import provenance
from llm_quant_rocm.environment import read

logger = logging.getLogger("llm_quant_rocm")

# What is kept of lookups, and of the choices made with them: one for each number of rows of each layer, of which a
# server meets tens of thousands. The last ones serve.
KEPT = 4096
# How far a weight may be from the one that was measured: all its sizes together larger or smaller by so much. A
# configuration is cut for how many tiles fill the GPU, of which a weight further off has too few or too many.
FARTHEST = 4
# Architectures on which the defaults were measured on many weights: they serve a weight that was not better than what
# won at another, and so a measurement counts for its own weight only.
OWN_WEIGHT = frozenset({"sm_90"})


@dataclass(frozen=True)
class Measured:
    """What won at one shape: the backend, and the best configuration of our own kernel whether or not it won."""

    n: int
    k: int
    m: int
    backend: str
    config: dict[str, Any]

    @property
    def weight(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.n, self.k

    @property
    def rows(self) -> float:
        """That the weight is multiplied by."""
        return self.m


@dataclass(frozen=True)
class MeasuredExperts:
    """The same of routed experts w13 [experts, 2 * inner, hidden] and w2 [experts, hidden, inner], by the number of
    slots, the experts of all tokens."""

    experts: int
    hidden: int
    inner: int
    slots: int
    backend: str
    config: dict[str, Any]

    @property
    def weight(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.experts, self.hidden, self.inner

    @property
    def rows(self) -> float:
        """That an expert is multiplied by on average."""
        return self.slots / self.experts


Shape = Measured | MeasuredExperts

# What a file of the cache must have been measured with.
_VERSIONS = ("llm-quant-rocm", "triton")


def cache_file(operator: str, arch: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Where what was measured of `operator` on this machine is kept."""
    folder = read("XDG_CACHE_HOME", environment) or os.path.expanduser("~/.cache")  # Path.home() wants a user to exist
    return Path(folder) / "llm-quant-rocm" / operator / f"{arch}.json"


@cache
def shapes(operator: str, arch: str) -> tuple[Shape, ...]:
    """Everything measured of `operator` on `arch`, the user's over the shipped; empty where nobody has.

    Raises:
        ValueError: the user's file is broken; the message names it.
    """
    shipped = resources.files("llm_quant_rocm") / "configs" / operator / f"{arch}.json"
    known = {(shape.weight, shape.rows): shape for shape in measured(operator, shipped)}
    mine = cache_file(operator, arch)
    found = measured(operator, mine, {"llm-quant-rocm": provenance.__version__, "triton": provenance.triton_version()})
    if found:
        logger.info("%s: %d shapes from %s", operator, len(found), mine)
    return tuple((known | {(shape.weight, shape.rows): shape for shape in found}).values())


@lru_cache(KEPT)
def lookup(operator: str, arch: str, rows: float, *weight: int) -> Any:
    """The measurement nearest to the shape, a `Measured` or `MeasuredExperts`: the weight nearest in log size, then the
    smallest number of rows that covers `rows`. None where there is none within `FARTHEST`, or on `OWN_WEIGHT` of the
    weight itself.

    The next larger number, because a configuration's tiles are cut for the rows it was measured with; beyond the
    largest, the largest. A weight that was measured with fewer rows than its neighbours answers for no more than that:
    tiles of 64 rows took 1.8 times as long as cuBLAS at 4096.
    """

    def distance(shape: Shape) -> float:
        return sum(abs(math.log(theirs / ours)) for theirs, ours in zip(shape.weight, weight, strict=True))

    farthest = 1 if arch in OWN_WEIGHT else FARTHEST
    largest: dict[tuple[int, ...], Shape] = {}
    for shape in shapes(operator, arch):
        if distance(shape) <= math.log(farthest) and shape.rows >= largest.get(shape.weight, shape).rows:
            largest[shape.weight] = shape
    if not largest:
        return None
    covered = min(rows, max(shape.rows for shape in largest.values()))
    nearest = min((shape for shape in largest.values() if shape.rows >= covered), key=distance)
    same_weight = [shape for shape in shapes(operator, arch) if shape.weight == nearest.weight]
    return min((shape for shape in same_weight if shape.rows >= covered), key=lambda shape: shape.rows)


def counts(arch: str, shape: Measured, m: int) -> bool:
    """Whether what was measured of a weight with `shape.m` rows answers for m, as many or fewer. On `OWN_WEIGHT` for no
    more than 31 fewer: how empty the last tiles are decides who is fastest, and the defaults know that."""
    return arch not in OWN_WEIGHT or shape.m - m < 32


def lookup_product(operator: str, arch: str, m: int, n: int, k: int) -> Measured | None:
    """What `lookup` finds of a product of m rows and a weight [n, k], if that `counts`."""
    found: Measured | None = lookup(operator, arch, m, n, k)
    return found if found and counts(arch, found, m) else None


def text_of(file: Traversable) -> str | None:
    """What a file of measurements holds; None where there is none, and, with a warning, where it may not be read, as in
    containers whose user has no right to HOME.

    Raises:
        ValueError: it is no text.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s): nothing measured here is used", file, error)
        return None


def measured(operator: str, file: Traversable, here: Mapping[str, str | None] | None = None) -> list[Shape]:
    """The shapes of a file; none where there is no file, or it was measured with other versions than `here`.

    Raises:
        ValueError: the file is broken; the message names it.
    """
    try:
        text = text_of(file)
        if text is None:
            return []
        content = json.loads(text)
        measured_on, entries = dict(content["measured_on"]), content["shapes"]
        other = others(measured_on, here) if here else []
        if other:
            logger.warning("%s was measured with %s: run llm-quant-rocm tune again", file, " and ".join(other))
            return []
        kind: type[Shape] = MeasuredExperts if operator.endswith("_moe") else Measured
        found = [kind(**entry) for entry in entries]
        broken = next((shape for shape in found if not _is_sound(shape)), None)
        if broken is not None:
            raise ValueError(broken)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _broken(file, error) from error
    return found


def configured(operator: str, arch: str, shape: Shape, config_of: Callable[[Mapping[str, Any]], Any]) -> Any:
    """`config_of` the fields of a shape that was measured.

    Raises:
        ValueError: they are others than those of a configuration; the message names the user's file, for what ships is
            tested.
    """
    try:
        return config_of(shape.config)
    except (AttributeError, TypeError, ValueError) as error:
        raise _broken(cache_file(operator, arch), error) from error


def _broken(file: Traversable, error: Exception) -> ValueError:
    what = f"{file} is no file of measured configurations ({error!r})"
    return ValueError(f"{what}: delete it, and run llm-quant-rocm tune again")


def others(measured_on: Mapping[str, str | None], here: Mapping[str, str | None]) -> list[str]:
    """The versions for which measurements do not serve `here`, whose own are others; both as `provenance.environment`
    says them."""
    return [f"{name} {measured_on.get(name)}" for name in _VERSIONS if measured_on.get(name) != here.get(name)]


def _is_sound(shape: Shape) -> bool:
    sizes = [value for name, value in vars(shape).items() if name not in ("backend", "config")]
    # Not a bool, which is an int to Python; and no kernel counts further than in 32 bits.
    are_sizes = all(type(size) is int and 0 < size < 2**31 for size in sizes)
    return are_sizes and isinstance(shape.backend, str) and isinstance(shape.config, dict)
