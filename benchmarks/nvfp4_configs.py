# SPDX-License-Identifier: Apache-2.0
"""Every configuration of the NVFP4 GEMM that its estimate (kernels/nvfp4_estimate.py) could choose from, on 31 weights;
with --fp8, of the product in FP8.

    python benchmarks/nvfp4_configs.py [--fp8] [--layers PATTERN ...] [--ms M ...]

`python -m benchmarks._estimate_fit` fits the estimate to the figures. Beside them stands cuBLAS in bf16. Figures are
written after every weight.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm import timing
from llm_quant_rocm.kernels import nvfp4_estimate
from llm_quant_rocm.kernels.hopper import SMS
from llm_quant_rocm.kernels.nvfp4_slices import Expanded
from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config as Large
from llm_quant_rocm.tune import nvfp4_gemm, nvfp4_gemm_fp8
from llm_quant_rocm.tune.nvfp4_gemm import weights
from llm_quant_rocm.tune.search import Compiler
from llm_quant_rocm.tune.shapes import WELL_KNOWN

MS = (8, 16, 32, 64, 96, 128, 160, 192, 256, 288, 300, 512, 700, 1024, 4096)
FP8_MS = (160, 192, 256, 288, 300, 512, 700, 1024, 4096, 8192, 16384)
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


Config = nvfp4_estimate.Config | Expanded


class Product(NamedTuple):
    """One of the two that are measured: the file's name, rows of x, configurations of (m, n, k), and how they run."""

    name: str
    ms: tuple[int, ...]
    configs: Callable[[int, int, int], Iterable[Config]]
    compile_one: Callable[[Any], None]
    workload: type[nvfp4_gemm.NvFp4Workload]


EXACT = Product("nvfp4_configs", MS, nvfp4_estimate.configs, nvfp4_gemm.compile_one, nvfp4_gemm.NvFp4Workload)
FP8 = Product(
    "nvfp4_configs_fp8", FP8_MS, lambda m, n, k: [*nvfp4_estimate.configs_fp8(m, n, k), Expanded()],
    nvfp4_gemm_fp8.compile_one, nvfp4_gemm_fp8.Fp8Workload,
)  # fmt: skip


def compiled(config: Config) -> Config:
    """One that is compiled to the same code."""
    if isinstance(config, Large):
        return replace(config, cut=min(config.cut, 1))
    if isinstance(config, Expanded):
        return config
    return replace(config, programs=SMS + 1 if config.programs > SMS else min(config.programs, 1))


def described(config: Config) -> list[Any]:
    """As the file holds it: large, split or expanded, and the fields."""
    if isinstance(config, Large):
        return ["large", config.block_m, config.block_n, config.cut, config.shares, config.tail_m]
    if isinstance(config, Expanded):
        return ["expanded", config.values]
    return ["split", config.block_m, config.split_k, config.programs, config.consumers, config.cluster]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8", action="store_true", help="the product in FP8")
    parser.add_argument("--layers", nargs="+", default=["*"], help="patterns of the layers' names")
    parser.add_argument("--ms", type=int, nargs="+", help="rows of x (default: of the file that is fitted)")
    args = parser.parse_args()
    chosen = {name: LAYERS[name] for name in LAYERS if any(fnmatchcase(name, pattern) for pattern in args.layers)}
    if not chosen:
        parser.error(f"--layers matches none of {', '.join(LAYERS)}")
    product = FP8 if args.fp8 else EXACT
    product = product._replace(ms=tuple(args.ms or product.ms))
    every = {config for shape in chosen.values() for m in product.ms for config in product.configs(m, *shape)}
    rows: list[dict[str, Any]] = []
    with Compiler(product.compile_one) as compiler:
        began = time.monotonic()
        fitting = set(compiler.fit(list({compiled(config) for config in every})))
        print(f"{len(fitting)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
        for title, (n, k) in chosen.items():
            began = time.monotonic()
            operands = weights(n, k)
            for m in product.ms:
                configs = [config for config in product.configs(m, n, k) if compiled(config) in fitting]
                load = product.workload(operands, m)
                calls = {str(i): load.ours(config) for i, config in enumerate(configs)}
                us = timing.time_variants(calls | {"bf16": load.peers()["bf16"]}, repeats=5, budget_ms=6)
                found = [[*described(config), round(us[str(i)], 2)] for i, config in enumerate(configs)]
                rows.append({"layer": title, "n": n, "k": k, "m": m, "bf16": round(us["bf16"], 2), "us": found})
            result = {"unit": "microseconds a call", "rows": rows}
            path = harness.write(f"{product.name}_{harness.gpu()}", result, indent=None)
            print(f"{title:24} {time.monotonic() - began:.0f} s", flush=True)
            del operands, load, calls
            torch.cuda.empty_cache()
    print("written to", path)


if __name__ == "__main__":
    main()
