# SPDX-License-Identifier: Apache-2.0
"""What the tuner must know of an operator."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llm_quant_rocm.hardware import Hardware

Calls = Sequence[Callable[[], Any]]


class Workload(Protocol):
    """One weight [N, K], several times, so that no call finds it in a cache, and x [M, K] for it."""

    def ours(self, config: Any) -> Calls:
        """Our kernel under a configuration."""

    def peers(self) -> Mapping[str, Calls]:
        """What else computes the same here, by name."""


@dataclass(frozen=True)
class Tuner:
    """How an operator is tuned.

    Attributes:
        ms: rows of x to measure.
        candidates: configurations worth trying for (hardware, m, n, k).
        compile: compiles a configuration for the cache on disk, and runs it; raises for one that does not fit. A
            function of a module, so that other processes can call it.
        weights: rotating weights [N, K].
        workload: of (those weights, m).
        backend: who serves a shape, of (m, microseconds of "ours" and of the peers).
    """

    operator: str
    ms: tuple[int, ...]
    candidates: Callable[[Hardware, int, int, int], Sequence[Any]]
    compile: Callable[[Any], None]
    weights: Callable[[int, int], Any]
    workload: Callable[[Any, int], Workload]
    backend: Callable[[int, Mapping[str, float]], str]
