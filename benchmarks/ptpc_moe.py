# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8 against bf16, on the shapes of Qwen3-30B-A3B and of DeepSeek-V3 cut in eight.

    python benchmarks/ptpc_moe.py [--models PATTERN ...] [--tokens T ...]

The peer is torch's grouped product in bf16 (CUTLASS) with the same sorting, activation and weighting around it, given
its groups already sorted: what is timed of it is a lower bound.
"""

import argparse
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm import hardware, timing
from llm_quant_rocm.measure.experts import choose, grouped_bf16, ptpc
from llm_quant_rocm.tune.shapes import WELL_KNOWN_EXPERTS

MODELS = ("qwen3-30b-a3b", "deepseek-v3/8")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


def variants(experts: int, topk: int, hidden: int, inner: int, tokens: int) -> dict[str, list[Callable[[], object]]]:
    """The calls to time. A layer's experts exceed the L2 cache; two sets rotate all the same."""
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    routing = choose(experts, topk, tokens)
    calls: dict[str, list[Callable[[], object]]] = {"ptpc_moe": [], "bf16_grouped": []}
    for _ in range(2):
        w13 = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
        w2 = torch.randn(experts, hidden, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
        calls["bf16_grouped"].append(grouped_bf16(w13, w2)(x, *routing))
        calls["ptpc_moe"].append(ptpc(w13, w2)(x, *routing))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["*"], help="patterns of the models' names")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    args = parser.parse_args()
    models = [name for name in MODELS if any(fnmatchcase(name, pattern) for pattern in args.models)]
    if not models:
        parser.error(f"--models names none of {', '.join(MODELS)}")
    rows = []
    for name in models:
        for tokens in args.tokens:
            times = timing.time_variants(variants(*WELL_KNOWN_EXPERTS[name], tokens))
            rows.append({"model": name, "tokens": tokens, "us": {key: round(t, 1) for key, t in times.items()}})
            print(f"{name:14} T={tokens:5} " + "  ".join(f"{key} {t:.1f}" for key, t in times.items()), flush=True)
            torch.cuda.empty_cache()
    arch = hardware.detect(torch.device("cuda")).arch
    print("written to", harness.write(f"ptpc_moe_{arch}", {"unit": "microseconds a call", "rows": rows}))


if __name__ == "__main__":
    main()
