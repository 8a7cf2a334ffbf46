# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: Llama-3-70B's layers, and how rows are shown and written. llm_quant_rocm/timing.py checks
results and times them."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._markdown import RESULTS, gpu_model
from llm_quant_rocm import hardware, provenance

# Llama-3-70B's layers as [N, K].
LAYERS = {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)}
# Of models for whose sizes nothing was tuned, and no default chosen; tp4 is one of four ranks.
UNTUNED = {
    "mistral-24b-qkv": (6144, 5120),
    "mistral-24b-o": (5120, 4096),
    "mistral-24b-gate_up": (65536, 5120),
    "mistral-24b-down": (5120, 32768),
    "qwen2.5-7b-qkv": (4608, 3584),
    "qwen2.5-7b-o": (3584, 3584),
    "qwen2.5-7b-gate_up": (37888, 3584),
    "qwen2.5-7b-down": (3584, 18944),
    "gemma-3-27b-qkv": (8192, 5376),
    "gemma-3-27b-o": (5376, 4096),
    "gemma-3-27b-gate_up": (43008, 5376),
    "gemma-3-27b-down": (5376, 21504),
    "qwen3-32b-tp4-qkv": (2560, 5120),
    "qwen3-32b-tp4-o": (5120, 2048),
    "qwen3-32b-tp4-gate_up": (12800, 5120),
    "qwen3-32b-tp4-down": (5120, 6400),
}
# Some of them fill no tile.
UNTUNED_MS = (1, 16, 48, 64, 100, 128, 256, 300, 700, 1000, 1024, 3000, 4096)
# Experts for which nothing was tuned, (experts, top-k, hidden, inner); /2 is one of two ranks. NVFP4's defaults were
# chosen by these and by the well-known ones.
UNTUNED_EXPERTS = {
    "qwen3-235b/2": (128, 8, 4096, 768),
    "glm-4.5/4": (160, 8, 5120, 384),
    "llama-4-scout/2": (16, 1, 5120, 4096),
    "mixtral-8x22b/4": (8, 2, 6144, 4096),
}


def environment(gpus: int | None = None) -> dict[str, str]:
    """The device, versions and commit that belong beside every figure; `gpus` is how many of them were used."""
    return {"commit": "unknown", **provenance.environment(gpus)}


def arch() -> str:
    """How the names of files about several GPUs of this machine end: their architecture; "cpu" without a GPU."""
    import torch

    return hardware.detect(torch.device("cuda" if torch.cuda.is_available() else "cpu")).arch


def gpu() -> str:
    """How the names of files about one GPU of this machine end: its architecture, and before that its model, but for
    the H100, which came first; "cpu" without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return arch()
    name = gpu_model(torch.cuda.get_device_name())
    return arch() if name == "H100" else f"{name.lower()}_{arch()}"


def vllm_library(folder: Path, name: str = "_C_stable_libtorch") -> Path:
    """vLLM's library of operators at any depth of `folder`, which needs no other part of vLLM.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(folder.glob(f"**/{name}.abi3.so"))
    if not found:
        raise FileNotFoundError(f"no {name}.abi3.so under {folder}")
    return found[0]


def show(row: dict[str, Any], base: str) -> str:
    """The figures of a row of `timing.measure`: microseconds and, in brackets, `base`'s over them."""
    us = row["us"]
    cells = [f"{name} {t:.1f}" + (f" ({us[base] / t:.2f})" if base in us else "") for name, t in us.items()]
    return "  ".join(cells + [f"{name} FAILED" for name in row.get("failed", {})])


def mean_ratios(rows: Sequence[dict[str, Any]], base: str) -> dict[str, float]:
    """By name, the mean over `rows` of `base`'s time over its own; names that lack a row's time are left out."""
    names = [name for name in rows[0]["us"] if all(name in row["us"] for row in rows)]
    return {name: statistics.mean(row["us"][base] / row["us"][name] for row in rows) for name in names}


def write(name: str, result: dict[str, Any], indent: int | None = 1, **versions: str) -> Path:
    """results/NAME.json, or $OUT/NAME.json on the device machine, with the environment, of as many GPUs as the result
    says ("world" or "ranks"), and `versions` of what is not installed. `indent` None: on one line, for much."""
    folder = Path(os.environ.get("OUT", RESULTS))
    path = folder / f"{name}.json"
    here = environment(result.get("world", result.get("ranks"))) | versions
    path.write_text(json.dumps({"environment": here, **result}, indent=indent) + "\n")
    return path
