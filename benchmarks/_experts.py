# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of routed experts share, in FP8 and in NVFP4, on the shapes of Qwen3-30B-A3B, DeepSeek-V3 (at TP
8) and Mixtral, or of models for which nothing was tuned.

A router that is fair and one that is skewed (its experts are drawn by Zipf's law) choose the experts; every call of a
graph has its own choice, and a model's weights are in two sets that take turns. Results are compared with fp32 before
they are timed. `limit` is the larger of reading the chosen experts once at the bandwidth of a large copy and of the
operations at the rate of a large product. Who cannot run stands in "failed" with the reason. Figures are written after
every model.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from benchmarks import _harness as harness
from llm_quant_rocm import timing
from llm_quant_rocm.measure.experts import ROUTERS, ROUTINGS, Bind, choose, expected
from llm_quant_rocm.tune.shapes import WELL_KNOWN_EXPERTS

TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
RATES = {"bf16": timing.bf16_rate, "fp8": timing.fp8_rate}


@dataclass(frozen=True)
class Comparison:
    """Experts of one format against peers.

    Attributes:
        everyone: by name, what arranges a layer's weights w13 [E, 2I, H] and w2 [E, H, I], as `arrange` leaves them.
        tolerance: by name, the largest relative error that counts as right.
        nbytes: of one expert's weight [N, K], scales included.
        rate: the type whose products bound the operations, one of RATES.
        arrange: 16-bit weights as everyone takes them.
        exact: of what `arrange` made, the values that results are compared with.
    """

    everyone: Mapping[str, Callable[[Any, Any], Bind]]
    tolerance: Mapping[str, float]
    nbytes: Callable[[int, int], int]
    rate: str
    arrange: Callable[[torch.Tensor], Any] = lambda weight: weight
    exact: Callable[[Any], torch.Tensor] = lambda weight: weight


class Layer:
    """A model's experts, in two sets that take turns, arranged for everyone who runs them."""

    def __init__(
        self, compared: Comparison, experts: int, topk: int, hidden: int, inner: int, device: str = "cuda"
    ) -> None:
        self.compared, self.device = compared, device
        self.shape = experts, topk, hidden, inner
        self.runners: dict[str, list[Bind]] = {name: [] for name in compared.everyone}
        self.failed: dict[str, str] = {}
        for number in range(2):
            w13, w2 = (
                compared.arrange(torch.randn(experts, n, k, device=device, dtype=torch.bfloat16) / k**0.5)
                for n, k in ((2 * inner, hidden), (hidden, inner))
            )
            if number == 0:
                self.exact = compared.exact(w13), compared.exact(w2)
            for name, prepare in compared.everyone.items():
                if name in self.failed:
                    continue
                try:
                    self.runners[name].append(prepare(w13, w2))
                except Exception as error:
                    self.failed[name] = timing.in_a_cell(error)

    def measure(self, tokens: int, router: str, bandwidth: float, rate: float) -> dict[str, Any]:
        """A row's figures; `bandwidth` in bytes and `rate` in operations a second."""
        experts, topk, hidden, inner = self.shape
        x = torch.randn(tokens, hidden, device=self.device, dtype=torch.bfloat16)
        routings = [choose(experts, topk, tokens, router, self.device) for _ in range(ROUTINGS)]
        variants = {
            name: [runners[i % 2](x, *routing) for i, routing in enumerate(routings)]
            for name, runners in self.runners.items()
            if name not in self.failed
        }
        row = timing.measure(variants, expected(x, *self.exact, *routings[0]), self.compared.tolerance)
        if self.failed:
            row["failed"] = self.failed | row.get("failed", {})
        chosen = sum(len(ids.unique()) for _, ids in routings) / ROUTINGS
        reading = chosen * (self.compared.nbytes(2 * inner, hidden) + self.compared.nbytes(hidden, inner))
        limit = max((reading + 4 * tokens * hidden) / bandwidth, 6 * tokens * topk * hidden * inner / rate)
        return {"experts_chosen": round(chosen, 1), "limit_us": round(limit * 1e6, 2), **row}


def main(name: str, compared: Comparison, description: str | None) -> None:
    """Measure what the command line asks for, into NAME_GPU.json or NAME_untuned_GPU.json, as `harness.gpu` says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder that holds the package vllm, if it is not installed")
    parser.add_argument("--untuned", action="store_true", help="models for which nothing was tuned")
    parser.add_argument("--models", nargs="+", default=["*"], help="patterns of the models' names")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=ROUTERS)
    args = parser.parse_args()
    known = harness.UNTUNED_EXPERTS if args.untuned else WELL_KNOWN_EXPERTS
    models = {
        model: shape for model, shape in known.items() if any(fnmatchcase(model, pattern) for pattern in args.models)
    }
    if not models:
        parser.error(f"--models names none of {', '.join(known)}")
    name += f"{'_untuned' * args.untuned}_{harness.gpu()}"
    if args.vllm:
        sys.path.insert(0, str(args.vllm))
    bandwidth, rate = timing.copy_bandwidth(), RATES[compared.rate]()
    print(f"copy {bandwidth / 1e9:.0f} GB/s, {compared.rate} {rate / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    result = {
        "unit": "microseconds a call", "copy_gb_s": round(bandwidth / 1e9),
        f"{compared.rate}_tflop_s": round(rate / 1e12), "rows": rows,
    }  # fmt: skip
    for model, shape in models.items():
        layer = Layer(compared, *shape)
        for router in args.routers:
            for tokens in args.tokens:
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
