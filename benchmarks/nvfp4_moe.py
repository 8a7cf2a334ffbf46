# SPDX-License-Identifier: Apache-2.0
"""Routed experts in NVFP4 against vLLM's own, on the shapes of Qwen3-30B-A3B, DeepSeek-V3 (at TP 8) and Mixtral.

    python benchmarks/nvfp4_moe.py [--vllm FOLDER] [--models PATTERN ...] [--tokens T ...]

FOLDER is where `pip install --target` put vLLM, where it is not installed.
Peers, both of vLLM: its fused Marlin experts, which serve NVFP4 on Hopper, given the workspace that vLLM makes at
every call, and its Triton experts in bf16 on the decoded weights. A router that is fair and one that is skewed (its
experts are drawn by Zipf's law) choose the experts; every call of a graph has its own choice. Results are compared with
fp32 before they are timed. `limit` is the larger of reading the chosen experts once at the bandwidth of a large copy
and of the operations at the rate of a large bf16 product. Figures are written after every model.
"""

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from benchmarks._nvfp4_peers import reading_bytes
from llm_quant_rocm import hardware, timing
from llm_quant_rocm.cli.bench._peers import vllm_bf16, vllm_marlin
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.measure.experts import (
    ROUTERS,
    ROUTINGS,
    Bind,
    choose,
    expected,
    ours,
)
from llm_quant_rocm.tune.shapes import WELL_KNOWN_EXPERTS

TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
# The largest relative error that counts as right: bf16 rounds what is between the products, and each expert's share.
TOLERANCE = 0.012


def bf16(w13: nvfp4.NvFp4Weight, w2: nvfp4.NvFp4Weight) -> Bind:
    return vllm_bf16(w13.dequantize(torch.bfloat16), w2.dequantize(torch.bfloat16))


EVERYONE = {"bf16": bf16, "marlin": vllm_marlin, "nvfp4_moe": ours}


class Layer:
    """A model's experts, in two sets that take turns, arranged for everyone who runs them."""

    def __init__(self, experts: int, topk: int, hidden: int, inner: int) -> None:
        self.shape = experts, topk, hidden, inner
        self.runners: dict[str, list[Bind]] = {name: [] for name in EVERYONE}
        self.failed: dict[str, str] = {}
        for number in range(2):
            w13, w2 = (
                nvfp4.quantize(torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) / k**0.5)
                for n, k in ((2 * inner, hidden), (hidden, inner))
            )
            if number == 0:
                self.decoded = w13.dequantize(), w2.dequantize()
            for name, prepare in EVERYONE.items():
                if name in self.failed:
                    continue
                try:
                    self.runners[name].append(prepare(w13, w2))
                except Exception as error:
                    self.failed[name] = timing.first_line(error)

    def measure(self, tokens: int, router: str, bandwidth: float, rate: float) -> dict[str, Any]:
        experts, topk, hidden, inner = self.shape
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        routings = [choose(experts, topk, tokens, router) for _ in range(ROUTINGS)]
        variants = {
            name: [runners[i % 2](x, *routing) for i, routing in enumerate(routings)]
            for name, runners in self.runners.items()
            if name not in self.failed
        }
        row = timing.measure(variants, expected(x, *self.decoded, *routings[0]), dict.fromkeys(variants, TOLERANCE))
        if self.failed:
            row["failed"] = self.failed | row.get("failed", {})
        chosen = sum(len(ids.unique()) for _, ids in routings) / ROUTINGS
        reading = chosen * (reading_bytes(2 * inner, hidden, 0) + reading_bytes(hidden, inner, 0))
        limit = max((reading + 4 * tokens * hidden) / bandwidth, 6 * tokens * topk * hidden * inner / rate)
        return {"experts_chosen": round(chosen, 1), "limit_us": round(limit * 1e6, 2), **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder that holds the package vllm, if it is not installed")
    parser.add_argument("--models", nargs="+", default=["*"], help="patterns of the models' names")
    parser.add_argument("--tokens", nargs="+", type=int)
    args = parser.parse_args()
    if args.vllm:
        sys.path.insert(0, str(args.vllm))
    bandwidth, rate = timing.copy_bandwidth(), timing.bf16_rate()
    print(f"copy {bandwidth / 1e9:.0f} GB/s, bf16 {rate / 1e12:.0f} TFLOP/s", flush=True)
    name = f"nvfp4_moe_{hardware.detect(torch.device('cuda')).arch}"
    rows: list[dict[str, Any]] = []
    result = {
        "unit": "microseconds a call", "copy_gb_s": round(bandwidth / 1e9), "bf16_tflop_s": round(rate / 1e12),
        "rows": rows,
    }  # fmt: skip
    for model, shape in WELL_KNOWN_EXPERTS.items():
        if not any(fnmatchcase(model, pattern) for pattern in args.models):
            continue
        layer = Layer(*shape)
        for router in ROUTERS:
            for tokens in args.tokens or TOKENS:
                row = {"model": model, "router": router, "tokens": tokens}
                row |= layer.measure(tokens, router, bandwidth, rate)
                rows.append(row)
                shown = harness.show(row, "bf16")
                print(f"{model:14} {router:6} T={tokens:5}  {shown}  limit {row['limit_us']:.1f}", flush=True)
        del layer
        torch.cuda.empty_cache()
        print("written to", harness.write(name, result))
    for reason in dict.fromkeys(f"{who}: {why}" for row in rows for who, why in row.get("failed", {}).items()):
        print("FAILED", reason)


if __name__ == "__main__":
    main()
