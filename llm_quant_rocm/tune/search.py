# SPDX-License-Identifier: Apache-2.0
"""The search for the best configuration: compile all in parallel, time each roughly, the best few carefully."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self

import torch

from llm_quant_rocm import timing
from llm_quant_rocm.kernels import keys
from llm_quant_rocm.measure.pool import compile_pool
from llm_quant_rocm.tune.workload import Calls

# Rough timing of a candidate: the median of so few replays within so little time.
_ROUGH_REPEATS, _ROUGH_MS = 3, 6.0
KEEP = 3  # candidates that go on to the careful timing


class Compiler:
    """Compiles configurations in a process a core, each once. Use within `with`.

    Attributes:
        reasons: of every configuration that was tried, why it does not compile or run; None where it does.

    Args:
        compile_one: a function of a module; raises for a configuration that does not fit.
    """

    def __init__(self, compile_one: Callable[[Any], None]) -> None:
        keys.settle()  # here and in the pool, so that what is compiled there is found here
        self._attempt = _Attempt(compile_one)
        self._workers = max(1, (os.cpu_count() or 2) - 2)
        self._pool = compile_pool(self._workers)
        self.reasons: dict[Any, str | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def fit(self, configs: Sequence[Any]) -> list[Any]:
        """Those that compile and run."""
        crashed = self._try([config for config in configs if config not in self.reasons])
        if crashed:
            # One of them took the pool with it: each again, by itself.
            for config in crashed:
                self._pool = compile_pool(1)
                if self._try([config]):
                    self.reasons[config] = "it ends the process that compiles it"
            self._pool = compile_pool(self._workers)
        return [config for config in configs if self.reasons[config] is None]

    def _try(self, configs: Sequence[Any]) -> list[Any]:
        """Takes the reasons of `configs`, but for those whose process ended."""
        attempts = [(config, self._pool.submit(self._attempt, config)) for config in configs]
        crashed = []
        for config, attempt in attempts:
            try:
                self.reasons[config] = attempt.result()
            except BrokenProcessPool:
                crashed.append(config)
        return crashed


class _Attempt:
    """`compile_one` that returns why it raised; a class, because other processes cannot take a closure."""

    def __init__(self, compile_one: Callable[[Any], None]) -> None:
        self.compile_one = compile_one

    def __call__(self, config: Any) -> str | None:
        try:
            keys.settle()
            self.compile_one(config)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            return f"{type(error).__name__} {str(error)[-160:]}"
        return None


def fastest(candidates: Mapping[Any, Calls], peers: Mapping[str, Calls]) -> tuple[Any, dict[str, float]]:
    """The best configuration, and the microseconds of "ours" and of the peers, timed in turns."""
    rough = {
        config: timing.time_variants({"": calls}, repeats=_ROUGH_REPEATS, budget_ms=_ROUGH_MS)[""]
        for config, calls in candidates.items()
    }
    best = sorted(rough, key=rough.__getitem__)[:KEEP]
    careful = timing.time_variants({str(config): candidates[config] for config in best} | dict(peers))
    winner = min(best, key=lambda config: careful[str(config)])
    return winner, {"ours": careful[str(winner)]} | {name: careful[name] for name in peers}
