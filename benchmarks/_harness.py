# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: Llama-3-70B's layers, and how rows are shown and written. llm_quant_rocm/timing.py checks
results and times them."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._markdown import RESULTS
from llm_quant_rocm import provenance

# Llama-3-70B's layers as [N, K].
LAYERS = {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)}


def environment(gpus: int | None = None) -> dict[str, str]:
    """The device, versions and commit that belong beside every figure; `gpus` is how many of them were used."""
    return {"commit": "unknown", **provenance.environment(gpus)}


def show(row: dict[str, Any], base: str) -> str:
    """The figures of a row of `timing.measure`: microseconds and, in brackets, `base`'s over them."""
    us = row["us"]
    cells = [f"{name} {t:.1f}" + (f" ({us[base] / t:.2f})" if base in us else "") for name, t in us.items()]
    return "  ".join(cells + [f"{name} FAILED" for name in row.get("failed", {})])


def mean_ratios(rows: Sequence[dict[str, Any]], base: str) -> dict[str, float]:
    """By name, the mean over `rows` of `base`'s time over its own; names that lack a row's time are left out."""
    names = [name for name in rows[0]["us"] if all(name in row["us"] for row in rows)]
    return {name: statistics.mean(row["us"][base] / row["us"][name] for row in rows) for name in names}


def write(name: str, result: dict[str, Any], **versions: str) -> Path:
    """results/NAME.json, or $OUT/NAME.json on the device machine, with the environment, of as many GPUs as the result
    says ("world" or "ranks"), and `versions` of what is not installed."""
    folder = Path(os.environ.get("OUT", RESULTS))
    path = folder / f"{name}.json"
    here = environment(result.get("world", result.get("ranks"))) | versions
    path.write_text(json.dumps({"environment": here, **result}, indent=1) + "\n")
    return path
