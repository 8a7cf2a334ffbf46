# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8 against bf16, on the shapes of Qwen3-30B-A3B and of DeepSeek-V3 cut in eight.

    python benchmarks/ptpc_moe.py

The peer is torch's grouped product in bf16 (CUTLASS) with the same sorting, activation and weighting around it, given
its groups already sorted: what is timed of it is a lower bound.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm import hardware, ops

SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "deepseek-v3/8": (256, 8, 7168, 256)}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


def variants(experts: int, topk: int, hidden: int, inner: int, tokens: int) -> dict[str, list[Callable[[], object]]]:
    """The calls to time. A layer's experts exceed the L2 cache; two sets rotate all the same."""
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weights, ids = torch.randn(tokens, experts, device="cuda").softmax(-1).topk(topk)
    ids = ids.int()
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=experts).cumsum(0).int()
    calls: dict[str, list[Callable[[], object]]] = {"ptpc_moe": [], "bf16_grouped": []}
    for _ in range(2):
        w13 = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
        w2 = torch.randn(experts, hidden, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
        q13, s13 = ops.per_token_quant_fp8(w13)
        q2, s2 = ops.per_token_quant_fp8(w2)

        def bf16(w13: torch.Tensor = w13, w2: torch.Tensor = w2) -> torch.Tensor:
            h = torch._grouped_mm(x[order // topk], w13.transpose(1, 2), offs=ends)
            gate, up = h.chunk(2, dim=-1)
            y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=ends)
            y = y * weights.flatten()[order, None].to(y.dtype)
            return torch.zeros_like(x).index_add_(0, order // topk, y)

        calls["bf16_grouped"].append(bf16)
        calls["ptpc_moe"].append(lambda a=(q13, s13, q2, s2): ops.ptpc_moe(x, *a, weights, ids))
    return calls


def main() -> None:
    rows = []
    for name, shape in SHAPES.items():
        for tokens in TOKENS:
            times = harness.time_variants(variants(*shape, tokens))
            rows.append({"model": name, "tokens": tokens, "us": {key: round(t, 1) for key, t in times.items()}})
            print(f"{name:14} T={tokens:5} " + "  ".join(f"{key} {t:.1f}" for key, t in times.items()), flush=True)
            torch.cuda.empty_cache()
    arch = hardware.detect(torch.device("cuda")).arch
    print("written to", harness.write(f"ptpc_moe_{arch}", {"unit": "microseconds a call", "rows": rows}))


if __name__ == "__main__":
    main()
