# SPDX-License-Identifier: Apache-2.0
"""What the tuning scripts share: compile all candidates in parallel, time each roughly, the best few carefully."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import _harness as harness
from llm_quant_rocm.hardware import detect

Calls = Sequence[Callable[[], Any]]


def compile_all(configs: Iterable[Any], compile_one: Callable[[Any], None], workers: int = 14) -> set[Any]:
    """The configurations that compile and run. `compile_one`, a function of a module, raises for one that does not."""
    every, began = sorted(set(configs), key=str), time.time()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        fits = list(pool.map(_Attempt(compile_one), every, chunksize=4))
    print(f"compiled {len(every)} configurations in {time.time() - began:.0f} s; {sum(fits)} fit", flush=True)
    return {config for config, fit in zip(every, fits, strict=True) if fit}


class _Attempt:
    """`compile_one` that returns whether it raised; a class, because worker processes cannot take a closure."""

    def __init__(self, compile_one: Callable[[Any], None]) -> None:
        self.compile_one = compile_one

    def __call__(self, config: Any) -> bool:
        try:
            self.compile_one(config)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"   {config}: {type(error).__name__} {str(error)[-160:]}", flush=True)
            return False
        return True


def fastest(candidates: dict[Any, Calls], peers: dict[str, Calls], keep: int = 3) -> tuple[Any, dict[str, float]]:
    """The best configuration, and the microseconds of "ours" and of the peers, timed in turns.

    Every candidate is timed for a moment; the best `keep` go on to the careful timing.
    """
    rough = {
        config: harness.time_variants({"": calls}, repeats=3, budget_ms=6)[""] for config, calls in candidates.items()
    }
    best = sorted(rough, key=rough.__getitem__)[:keep]
    careful = harness.time_variants({str(config): candidates[config] for config in best} | peers)
    winner = min(best, key=lambda config: careful[str(config)])
    return winner, {"ours": careful[str(winner)]} | {name: careful[name] for name in peers}


class Record:
    """configs/<operator>/<architecture>.json in the making, in $OUT, written after every shape."""

    def __init__(self, operator: str) -> None:
        arch = detect(torch.device("cuda")).arch
        self.path = Path(os.environ.get("OUT", "/tmp")) / f"{operator}_{arch}.json"
        self.shapes: list[dict[str, Any]] = []

    def add(self, n: int, k: int, m: int, backend: str, config: Any) -> None:
        self.shapes.append({"n": n, "k": k, "m": m, "backend": backend, "config": asdict(config)})
        self.path.write_text(json.dumps({"measured_on": harness.environment(), "shapes": self.shapes}, indent=1) + "\n")
