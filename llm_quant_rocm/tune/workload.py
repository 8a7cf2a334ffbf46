# SPDX-License-Identifier: Apache-2.0
"""What the tuner must know of an operator."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Calls = Sequence[Callable[[], Any]]


class Workload(Protocol):
    """One layer's weights, several times, so that no call finds them in a cache, and x for them."""

    def ours(self, config: Any) -> Calls:
        """Our kernel under a configuration."""

    def peers(self) -> Mapping[str, Calls]:
        """What else computes the same here, by name."""


@dataclass(frozen=True)
class Tuner:
    """How an operator is tuned. A shape is a weight's (N, K) or, of routed experts, (experts, top-k, hidden, inner).

    Attributes:
        ms: rows of x to measure: tokens.
        candidates: configurations worth trying for (hardware, m, *shape).
        compile: compiles a configuration for the cache on disk, and runs it; raises for one that does not fit. A
            function of a module, so that other processes can call it.
        weights: rotating weights of (*shape).
        workload: of (those weights, m).
        backend: who serves a shape, of (m, microseconds of "ours" and of the peers).
        experts: whether shapes are those of experts.
    """

    operator: str
    ms: tuple[int, ...]
    candidates: Callable[..., Sequence[Any]]
    compile: Callable[[Any], None]
    weights: Callable[..., Any]
    workload: Callable[[Any, int], Workload]
    backend: Callable[[int, Mapping[str, float]], str]
    experts: bool = False

    def key(self, shape: tuple[int, ...], m: int) -> dict[str, int]:
        """The shape under m rows as a file of measured configurations names it."""
        if not self.experts:
            n, k = shape
            return {"n": n, "k": k, "m": m}
        experts, topk, hidden, inner = shape
        return {"experts": experts, "hidden": hidden, "inner": inner, "slots": m * topk}
