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
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from benchmarks._nvfp4_peers import reading_bytes
from llm_quant_rocm import hardware, ops
from llm_quant_rocm.formats import nvfp4

# Experts, experts a token, hidden size, inner size.
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3/8": (256, 8, 7168, 256),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
ROUTERS = ("fair", "skewed")
ROUTINGS = 16
# The largest relative error that counts as right: bf16 rounds what is between the products, and each expert's share.
TOLERANCE = 0.012

# (x [T, H], router weights [T, k], ids [T, k]) -> [T, H]
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(w13: nvfp4.NvFp4Weight, w2: nvfp4.NvFp4Weight) -> Experts:
    prepared = ops.prepare_nvfp4_weight(w13, gate_up=True), ops.prepare_nvfp4_weight(w2)
    return lambda x, weights, ids: ops.nvfp4_moe(x, *prepared, weights, ids)


def bf16(w13: nvfp4.NvFp4Weight, w2: nvfp4.NvFp4Weight) -> Experts:
    from vllm.model_executor.layers.fused_moe import fused_experts

    dense = w13.dequantize(torch.bfloat16), w2.dequantize(torch.bfloat16)
    return lambda x, weights, ids: fused_experts(x, *dense, weights, ids)


def marlin(w13: nvfp4.NvFp4Weight, w2: nvfp4.NvFp4Weight) -> Experts:
    import vllm._custom_ops as vllm_ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin
    from vllm.scalar_type import scalar_types

    layer = SimpleNamespace(
        num_experts=w2.codes.shape[0],
        hidden_size=w2.n,
        intermediate_size_per_partition=w2.k,
        params_dtype=torch.bfloat16,
    )
    arranged = [(w.codes, w.scales, w.global_scale[:, 0].contiguous()) for w in (w13, w2)]
    words13, scales13, global13, words2, scales2, global2 = prepare_nvfp4_moe_layer_for_marlin(
        layer, *arranged[0], *arranged[1], is_act_and_mul=True
    )

    def experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        fused_marlin_moe(
            x, words13, words2, None, None, scales13, scales2, weights, ids, scalar_types.float4_e2m1f.id,
            global_scale1=global13, global_scale2=global2, workspace=layer.workspace, output=out,
            moe_sum=lambda parts, into, *_: vllm_ops.moe_sum(parts, into),
        )  # fmt: skip
        return out

    return experts


EVERYONE = {"bf16": bf16, "marlin": marlin, "nvfp4_moe": ours}


def choose(experts: int, topk: int, tokens: int, router: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights fp32 [T, k], which add up to one, and ids int32 [T, k] of different experts."""
    odds = torch.ones(experts, device="cuda")
    if router == "skewed":
        odds = odds / torch.arange(1, experts + 1, device="cuda")
        odds = odds[torch.randperm(experts, device="cuda")]
    ids = torch.multinomial(odds.expand(tokens, experts), topk)
    return torch.randn(tokens, topk, device="cuda").softmax(-1), ids.int()


class Layer:
    """A model's experts, in two sets that take turns, arranged for everyone who runs them."""

    def __init__(self, experts: int, topk: int, hidden: int, inner: int) -> None:
        self.shape = experts, topk, hidden, inner
        self.runners: dict[str, list[Experts]] = {name: [] for name in EVERYONE}
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
                    self.failed[name] = harness.first_line(error)

    def measure(self, tokens: int, router: str, bandwidth: float, rate: float) -> dict[str, Any]:
        experts, topk, hidden, inner = self.shape
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        routings = [choose(experts, topk, tokens, router) for _ in range(ROUTINGS)]
        variants = {
            name: [lambda run=runners[i % 2], r=routing: run(x, *r) for i, routing in enumerate(routings)]
            for name, runners in self.runners.items()
            if name not in self.failed
        }
        row = harness.measure(variants, self._expected(x, *routings[0]), dict.fromkeys(variants, TOLERANCE))
        if self.failed:
            row["failed"] = self.failed | row.get("failed", {})
        chosen = sum(len(ids.unique()) for _, ids in routings) / ROUTINGS
        reading = chosen * (reading_bytes(2 * inner, hidden, 0) + reading_bytes(hidden, inner, 0))
        limit = max((reading + 4 * tokens * hidden) / bandwidth, 6 * tokens * topk * hidden * inner / rate)
        return {"experts_chosen": round(chosen, 1), "limit_us": round(limit * 1e6, 2), **row}

    def _expected(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The output in fp32 throughout."""
        out = torch.zeros(x.shape, device="cuda")
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token].float() @ self.decoded[0][expert].t()).chunk(2, dim=-1)
            y = (torch.nn.functional.silu(gate) * up) @ self.decoded[1][expert].t()
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder that holds the package vllm, if it is not installed")
    parser.add_argument("--models", nargs="+", default=["*"], help="patterns of the models' names")
    parser.add_argument("--tokens", nargs="+", type=int)
    args = parser.parse_args()
    if args.vllm:
        sys.path.insert(0, str(args.vllm))
    bandwidth, rate = harness.copy_bandwidth(), harness.bf16_rate()
    print(f"copy {bandwidth / 1e9:.0f} GB/s, bf16 {rate / 1e12:.0f} TFLOP/s", flush=True)
    name = f"nvfp4_moe_{hardware.detect(torch.device('cuda')).arch}"
    rows: list[dict[str, Any]] = []
    result = {
        "unit": "microseconds a call", "copy_gb_s": round(bandwidth / 1e9), "bf16_tflop_s": round(rate / 1e12),
        "rows": rows,
    }  # fmt: skip
    for model, shape in MODELS.items():
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
