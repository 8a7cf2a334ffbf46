# SPDX-License-Identifier: Apache-2.0
"""What the tuners of routed experts share: calls whose tokens choose their experts anew every time."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from llm_quant_rocm.measure.experts import choose
from llm_quant_rocm.tune.workload import Calls

# Every call of a graph has a choice of its own: what it reads then differs from what the one before has left in L2.
ROUTINGS = 8

# (weights, x [T, H], router weights fp32 [T, k], ids int32 [T, k], configuration) -> [T, H]
Run = Callable[..., torch.Tensor]


def heights_for(slots: int, experts: int) -> list[int]:
    """Rows of tiles worth trying: half to twice of what an expert has on average, rounded up to a power of two."""
    covering = min(128, max(16, 1 << (-(-slots // experts) - 1).bit_length()))
    return [height for height in (16, 32, 64, 128) if covering // 2 <= height <= covering * 2]


class RoutedWorkload:
    """x [T, H] in bf16, a fair router's choices, and experts in sets that take turns.

    Args:
        weights: (experts, top-k, hidden, sets of weights).
        run: what multiplies them.
    """

    def __init__(self, run: Run, weights: tuple[int, int, int, list[Any]], tokens: int) -> None:
        experts, topk, hidden, self._sets = weights
        self._run = run
        self._x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        self._routings = [choose(experts, topk, tokens) for _ in range(ROUTINGS)]

    def ours(self, config: Any) -> Calls:
        return [
            partial(self._run, self._sets[number % len(self._sets)], self._x, *routing, config)
            for number, routing in enumerate(self._routings)
        ]

    def peers(self) -> Mapping[str, Calls]:
        return {}


def backend(m: int, us: Mapping[str, float]) -> str:
    """Who serves the shape: nobody else does."""
    return "triton"
