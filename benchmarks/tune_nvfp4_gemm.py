# SPDX-License-Identifier: Apache-2.0
"""Measures configurations of the NVFP4 GEMM and writes what belongs into llm_quant_rocm/configs/nvfp4_gemm/.

    python benchmarks/tune_nvfp4_gemm.py [--layers PATTERN ...] [--ms M ...]

The file goes to $OUT, or /tmp. cuBLAS in bf16 is timed beside every winner, to see where it wins.
"""

import argparse
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from benchmarks import _tuner as tuner
from benchmarks.nvfp4_gemm import OTHER_LAYERS
from llm_quant_rocm.formats import nvfp4_wgmma
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels.nvfp4_hopper import gemm
from llm_quant_rocm.kernels.nvfp4_wgmma import Config
from llm_quant_rocm.kernels.nvfp4_wgmma_large import Config as Large

MS = (16, 32, 64, 128, 256, 512, 1024, 4096)
TUNED = ("qwen3-qkv", "qwen3-o", "deepseek-qkv_a", "deepseek-q_b", "deepseek-o", "deepseek-shared_down")


SHARED_BYTES = 227 * 1024


def candidates(m: int, n: int, k: int) -> list[Config | Large]:
    """Configurations worth trying on Hopper: enough programs to fill it, not so many that their parts cost more."""
    found = []
    if m <= (1024 if n * k < 2**24 else 128):
        # block_k, unroll, stages
        steps = ((128, 2, 2), (64, 2, 3), (64, 2, 5)) if m > 32 else ((128, 2, 2), (128, 2, 3), (128, 2, 5), (64, 4, 3))
        for block_m in (max(16, m),) if m <= 64 else {128, 256} - ({256} if m == 128 else set()):
            for block_n, warps in ((64, 4), (128, 8)) if m >= 64 else ((64, 4),):
                tiles = -(-n // block_n) * -(-m // block_m)
                for block_k, unroll, stages in steps:
                    group_bytes = unroll * block_k * (block_m * 2 + block_n * 9 // 16)
                    together = min(4 if warps == 4 else 2, SHARED_BYTES // (group_bytes * stages))
                    if block_m * block_n >= 256 * 128 or not together:
                        continue
                    for programs in (0, 2 * tiles, 3 * tiles, 4 * tiles, 132, 264, 396, 528):
                        if 60 <= (programs or tiles) <= (132 * together if programs else 10000):
                            found.append(Config(block_m, block_n, block_k, programs, unroll, stages, warps))
    if m >= 128:
        tiles = ((128, 128), (128, 256)) if m == 128 else ((128, 128), (256, 128)) if m <= 512 else ((256, 128),)
        found += [Large(*tile, cut) for tile in tiles for cut in (True, False)]
    return list(dict.fromkeys(found))


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A random packed weight."""
    (_, words), (_, scale_bytes) = nvfp4_wgmma.parts(n, k)
    return (
        torch.randint(-(2**31), 2**31 - 1, words, dtype=torch.int32, device="cuda"),
        torch.randint(60, 120, scale_bytes, dtype=torch.uint8, device="cuda"),
        torch.rand(n, device="cuda") * 1e-3,
    )


def compile_one(config: Config | Large) -> None:
    """Compiles for the cache on disk; how many programs there are does not matter, but for none."""
    x = torch.zeros(max(config.block_m, 16), 8192, dtype=torch.bfloat16, device="cuda")
    gemm(x, *weight(512, 8192), None, 512, detect(x.device), config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="+", default=["*"])
    parser.add_argument("--ms", type=int, nargs="+", default=MS)
    args = parser.parse_args()
    shapes = {
        layer: shape
        for layer, shape in (harness.LAYERS | {name: OTHER_LAYERS[name] for name in TUNED}).items()
        if any(fnmatchcase(layer, pattern) for pattern in args.layers)
    }
    fit = tuner.compile_all((c for n, k in shapes.values() for m in args.ms for c in candidates(m, n, k)), compile_one)
    record = tuner.Record("nvfp4_gemm")
    device = detect(torch.device("cuda"))
    for layer, (n, k) in shapes.items():
        weights = [weight(n, k) for _ in range(harness.copies(n * k * 9 // 16))]
        dense = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(harness.copies(n * k * 2))]
        for m in args.ms:
            began = time.time()
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            calls = {
                config: [lambda w=w, x=x, c=config, n=n: gemm(x, *w, None, n, device, c) for w in weights]
                for config in candidates(m, n, k)
                if config in fit
            }
            winner, us = tuner.fastest(calls, {"bf16": [lambda w=w, x=x: x @ w.t() for w in dense]})
            record.add(n, k, m, "triton", winner)
            print(
                f"{layer:20} m={m:5} ours {us['ours']:8.1f} us, bf16 {us['bf16']:8.1f} us, "
                f"{us['bf16'] / us['ours']:.3f}x  {winner} ({len(calls)} tried, {time.time() - began:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
