# SPDX-License-Identifier: Apache-2.0
"""What the tuners of routed experts share: calls whose tokens choose their experts anew every time."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from llm_quant_rocm.measure.experts import choose
from llm_quant_rocm.tune.workload import Calls, Tuner

# Every call of a graph has a choice of its own: what it reads then differs from what the one before has left in L2.
ROUTINGS = 8
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
# Experts, top-k, hidden and inner size of what is run once to compile.
_COMPILED = (4, 2, 1024, 512)

# Experts, top-k, hidden size, and sets of weights that take turns.
Weights = tuple[int, int, int, list[Any]]

# (weights, x [T, H], router weights fp32 [T, k], ids int32 [T, k], configuration) -> [T, H]
Run = Callable[..., torch.Tensor]


def heights_for(slots: int, experts: int) -> list[int]:
    """Rows of tiles worth trying: half to twice of what an expert has on average, rounded up to a power of two."""
    covering = min(128, max(16, 1 << (-(-slots // experts) - 1).bit_length()))
    return [height for height in (16, 32, 64, 128) if covering // 2 <= height <= covering * 2]


class RoutedWorkload:
    """x [T, H] in bf16, a fair router's choices, and experts in sets that take turns.

    Args:
        run: what multiplies them.
    """

    def __init__(self, run: Run, weights: Weights, tokens: int) -> None:
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


def tuner(operator: str, candidates: Callable[..., Sequence[Any]], weights: Callable[..., Weights], run: Run) -> Tuner:
    """How an operator of routed experts is tuned. All are functions of a module, so that processes can be sent them.

    Args:
        candidates: as `Tuner` takes it; configurations have `block_m`.
        weights: of (experts, top-k, hidden, inner).
    """
    return Tuner(
        operator, _TOKENS, candidates, partial(_compile, weights, run), weights, partial(RoutedWorkload, run), _backend,
        experts=True,
    )  # fmt: skip


def _compile(weights: Callable[..., Weights], run: Run, config: Any) -> None:
    """Compiles for the cache on disk, and runs."""
    RoutedWorkload(run, weights(*_COMPILED), 4 * config.block_m).ours(config)[0]()


def _backend(m: int, us: Mapping[str, float]) -> str:
    """Who serves the shape: nobody else does."""
    return "triton"
