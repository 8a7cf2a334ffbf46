# SPDX-License-Identifier: Apache-2.0
"""The search for the best configuration: compile all in parallel, time each roughly, the best few carefully."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from llm_quant_rocm import timing
from llm_quant_rocm.tune.workload import Calls

# Rough timing of a candidate: the median of so few replays within so little time.
_ROUGH_REPEATS, _ROUGH_MS = 3, 6.0
KEEP = 3  # candidates that go on to the careful timing


def compiled(configs: Iterable[Any], compile_one: Callable[[Any], None]) -> Iterator[tuple[Any, str | None]]:
    """Every configuration, and why it does not compile or run, None where it does; compiled by a process a core."""
    every = sorted(set(configs), key=str)
    workers = max(1, min(len(every), (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from zip(every, pool.map(_Attempt(compile_one), every, chunksize=4), strict=True)


class _Attempt:
    """`compile_one` that returns why it raised; a class, because other processes cannot take a closure."""

    def __init__(self, compile_one: Callable[[Any], None]) -> None:
        self.compile_one = compile_one

    def __call__(self, config: Any) -> str | None:
        try:
            self.compile_one(config)
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
