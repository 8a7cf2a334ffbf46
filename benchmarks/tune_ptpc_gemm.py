# SPDX-License-Identifier: Apache-2.0
"""Measures configurations of the Triton PTPC GEMM and writes llm_quant_rocm/configs/ptpc_gemm/<architecture>.json.

    python benchmarks/tune_ptpc_gemm.py [--layers qkv,o] [--ms 1,16]

Every candidate runs on every shape; the best goes into the file, and beside it the name of the backend that won the
shape, torch._scaled_mm or ours. All candidates are compiled first, in parallel.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from benchmarks import _tuner as tuner
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig, ptpc_gemm

MS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def candidates(m: int) -> list[GemmConfig]:
    """Configurations worth trying for m rows on Hopper."""
    found = []
    if m <= 64:
        block_m = max(16, 1 << (m - 1).bit_length())
        for block_n, block_k, stages in itertools.product((64, 128), (128, 256), (3, 4, 5, 6, 8)):
            if 32 * 1024 <= (block_m + block_n) * block_k * stages <= 200 * 1024:
                found.append(GemmConfig(block_m, block_n, block_k, stages, 4, 1, 1, True, True))
        for block_n, block_k, stages in itertools.product((16, 32, 64), (128, 256), (4, 6)):
            if (64 + block_n) * block_k * stages <= 200 * 1024:
                found.append(GemmConfig(64, block_n, block_k, stages, 4, 1, 1, False, True))
    if 64 <= m <= 512:
        tiles = ((64, 128), (64, 256), (128, 128), (64, 64), (128, 64), (128, 256), (256, 128))
        for (block_m, block_n), stages in itertools.product(tiles, (3, 4, 5)):
            if (block_m + block_n) * 128 * stages > 220 * 1024:
                continue
            warps = 8 if block_m * block_n >= 128 * 256 else 4
            found.append(GemmConfig(block_m, block_n, 128, stages, warps, 8, 1, False, True))
            if block_m * block_n == 128 * 128:
                found.append(GemmConfig(block_m, block_n, 128, stages, 8, 8, 1, False, True))
            if block_m == 64 and m <= 128:
                found.append(GemmConfig(block_m, block_n, 128, stages, warps, 8, 1, True, True))
            if block_m * block_n >= 128 * 128:
                found.append(GemmConfig(block_m, block_n, 128, stages, warps, 8, 1, False, True, 1))
    if m >= 256:
        for (block_m, block_n), stages, group in itertools.product(
            ((128, 256), (256, 128), (128, 128)), (3, 4), (4, 8, 16)
        ):
            warps = 8 if block_m * block_n >= 128 * 256 else 4
            found.append(GemmConfig(block_m, block_n, 128, stages, warps, group, 1, False, True, 1))
            if m <= 1024 and group == 8:
                found.append(GemmConfig(block_m, block_n, 128, stages, warps, group, 1, False, True, 2))
                found.append(GemmConfig(block_m, block_n, 128, stages, 8, group, 1, False, True, 1))
    if m >= 128:
        for block_m, block_n, stages, warps in (
            (64, 128, 4, 4), (128, 128, 3, 4), (128, 128, 3, 8), (128, 256, 2, 8), (256, 128, 2, 8), (64, 256, 2, 4)
        ):  # fmt: skip
            found += [GemmConfig(block_m, block_n, 256, stages, warps, 8, 1, False, True, p) for p in (0, 1)]
    found = list(dict.fromkeys(found))
    return found


def operands(m: int, n: int, k: int, count: int) -> tuple:
    """xq, xscale and `count` weights with scales."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    xq, xscale = fp8.quantize_rows(x, fp8.OCP)
    weights = []
    for _ in range(count):
        wq = torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda")
        wq = torch.where((wq & 0x7F) == 0x7F, 0, wq).view(torch.float8_e4m3fn)
        weights.append((wq, torch.rand(n, 1, device="cuda") * 1e-3 + 1e-4))
    return xq, xscale, weights


def run(xq, xscale, wq, wscale, config):
    return ptpc_gemm(xq, xscale, wq, wscale, None, torch.bfloat16, detect(xq.device), config)


def compile_one(config: GemmConfig) -> None:
    """Compiles for the cache on disk; raises for a configuration that does not fit."""
    m, n, k = 4096 if config.programs else 256, 4096 * 2, 4096
    xq, xscale, weights = operands(m, n, k, 1)
    run(xq, xscale, *weights[0], config)
    if config.programs:  # the persistent and the plain variant are two kernels
        run(xq[:128], xscale[:128], *weights[0], config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default=",".join(harness.LAYERS))
    parser.add_argument("--ms", default=",".join(map(str, MS)))
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--keep", type=int, default=3, help="candidates that go on to the careful timing")
    args = parser.parse_args()
    ms = [int(m) for m in args.ms.split(",")]
    fit = tuner.compile_all((c for m in ms for c in candidates(m)), compile_one, args.workers)
    record = tuner.Record("ptpc_gemm")
    for layer in args.layers.split(","):
        n, k = harness.LAYERS[layer]
        count = harness.copies(n * k)
        for m in ms:
            began = time.time()
            xq, xscale, weights = operands(m, n, k, count)
            calls = {
                config: [lambda w=w, c=config, x=xq, s=xscale: run(x, s, *w, c) for w in weights]
                for config in candidates(m)
                if config in fit
            }
            torch_calls = [
                lambda w=w, xq=xq, xscale=xscale: torch._scaled_mm(
                    xq, w[0].t(), xscale, w[1].t(), out_dtype=torch.bfloat16, use_fast_accum=True
                )
                for w in weights
            ]
            winner, us = tuner.fastest(calls, {"torch": torch_calls}, args.keep)
            ours, theirs = us["ours"], us["torch"]
            # Long products run at the clock that their power allows, which moves by some percent from run to run.
            margin = 1.05 if m > 256 else 1.0
            record.add(n, k, m, "torch" if theirs < ours * margin else "triton", winner)
            print(
                f"{layer:8} m={m:5} triton {ours:8.1f} us, torch {theirs:8.1f} us, ratio {theirs / ours:.3f}  {winner} "
                f"({len(calls)} tried, {time.time() - began:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
