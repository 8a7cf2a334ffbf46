# SPDX-License-Identifier: Apache-2.0
"""Every configuration of the NVFP4 GEMM that its estimate (kernels/nvfp4_estimate.py) chooses from, on 31 weights.

    python benchmarks/nvfp4_configs.py [--layers PATTERN ...]

`python -m benchmarks._estimate_fit` fits the estimate to the figures. Beside them stands cuBLAS in bf16. Figures are
written after every weight.
"""

import argparse
import sys
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm import hardware, timing
from llm_quant_rocm.kernels import nvfp4_estimate
from llm_quant_rocm.kernels.nvfp4_wgmma_large import Config as Large
from llm_quant_rocm.tune.nvfp4_gemm import NvFp4Workload, compile_one, weights
from llm_quant_rocm.tune.search import Compiler
from llm_quant_rocm.tune.shapes import WELL_KNOWN

MS = (8, 16, 32, 64, 128, 256, 512, 1024, 4096)
# Beside the well-known ones; tpN is one of N ranks.
LAYERS = WELL_KNOWN | {
    "llama-8b-qkv": (6144, 4096),
    "llama-8b-o": (4096, 4096),
    "llama-8b-gate_up": (28672, 4096),
    "llama-8b-down": (4096, 14336),
    "llama-70b-tp2-gate_up": (28672, 8192),
    "llama-70b-tp2-down": (8192, 14336),
    "llama-70b-tp4-qkv": (2560, 8192),
    "llama-70b-tp4-o": (8192, 2048),
    "llama-70b-tp8-qkv": (1280, 8192),
    "llama-70b-tp8-o": (8192, 1024),
    "llama-70b-tp8-gate_up": (7168, 8192),
    "llama-70b-tp8-down": (8192, 3584),
    "qwen3-32b-o": (5120, 8192),
    "qwen3-32b-gate_up": (51200, 5120),
    "qwen3-32b-down": (5120, 25600),
    "phi-4-qkv": (7680, 5120),
    "phi-4-down": (5120, 17920),
}


def compiled(config: nvfp4_estimate.Config) -> nvfp4_estimate.Config:
    """One that is compiled to the same code."""
    if isinstance(config, Large):
        return replace(config, cut=min(config.cut, 1))
    return replace(config, programs=min(config.programs, 1))


def described(config: nvfp4_estimate.Config) -> list[Any]:
    """As the file holds it: large or split, and the fields."""
    if isinstance(config, Large):
        return ["large", config.block_m, config.block_n, config.cut, config.shares]
    return ["split", config.block_m, config.split_k, config.programs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=["*"], help="patterns of the layers' names")
    args = parser.parse_args()
    chosen = {name: LAYERS[name] for name in LAYERS if any(fnmatchcase(name, pattern) for pattern in args.layers)}
    if not chosen:
        parser.error(f"--layers matches none of {', '.join(LAYERS)}")
    every = {config for shape in chosen.values() for m in MS for config in nvfp4_estimate.configs(m, *shape)}
    rows: list[dict[str, Any]] = []
    with Compiler(compile_one) as compiler:
        began = time.monotonic()
        fitting = set(compiler.fit(list({compiled(config) for config in every})))
        print(f"{len(fitting)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
        for title, (n, k) in chosen.items():
            began = time.monotonic()
            operands = weights(n, k)
            for m in MS:
                configs = [config for config in nvfp4_estimate.configs(m, n, k) if compiled(config) in fitting]
                load = NvFp4Workload(operands, m)
                calls = {str(i): load.ours(config) for i, config in enumerate(configs)}
                us = timing.time_variants(calls | {"bf16": load.peers()["bf16"]}, repeats=5, budget_ms=6)
                found = [[*described(config), round(us[str(i)], 2)] for i, config in enumerate(configs)]
                rows.append({"layer": title, "n": n, "k": k, "m": m, "bf16": round(us["bf16"], 2), "us": found})
            name = f"nvfp4_configs_{hardware.detect(torch.device('cuda')).arch}"
            path = harness.write(name, {"unit": "microseconds a call", "rows": rows}, indent=None)
            print(f"{title:24} {time.monotonic() - began:.0f} s", flush=True)
            del operands, load, calls
            torch.cuda.empty_cache()
    print("written to", path)


if __name__ == "__main__":
    main()
