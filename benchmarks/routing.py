# SPDX-License-Identifier: Apache-2.0
"""What stands around the grouped products of routed experts: the schedule of rows, x at its rows, and their sum.

    python benchmarks/routing.py [--vllm-ops FOLDER]

`schedule` is what the experts run; `one_launch` and `two_launches` force one of its two ways, so that
kernels.routing.MANY_READS can be read off. Peers: the same with torch's sort and searches, torch's indexing and sum,
and where its library of experts' operators is given, vLLM's moe_align_block_size and moe_sum. Times are of replayed
graphs: a peer of ten launches pays the GPU's part of each, not the CPU's.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm import hardware, timing
from llm_quant_rocm.kernels import routing
from llm_quant_rocm.kernels.ptpc_moe import default_config

# Experts, experts of a token, columns.
SHAPES = {"mixtral-8x7b": (8, 2, 4096), "qwen3-30b-a3b": (128, 8, 2048), "deepseek-v3": (256, 8, 7168)}
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16384)
# In one launch every tile reads all ids.
MOST_SLOTS_IN_ONE_LAUNCH = 32768


def torch_schedule(ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """row_map and tile_expert of kernels.routing.schedule with torch's operators, as a graph can hold them."""
    ids = ids.flatten()
    sorted_ids, order = torch.sort(ids, stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(experts + 1, dtype=ids.dtype, device=ids.device))
    first, last = bounds[:-1], bounds[1:]
    tiles = (last - first + block_m - 1) // block_m
    ends = tiles.cumsum(0)
    tile = torch.arange(routing.max_tiles(ids.numel(), experts, block_m), device=ids.device)
    expert = torch.searchsorted(ends, tile, right=True)
    real = expert.clamp_max(experts - 1)
    begin = first[real] + (tile - (ends - tiles)[real]) * block_m
    place = begin[:, None] + torch.arange(block_m, device=ids.device)
    inside = (place < last[real][:, None]) & (expert < experts)[:, None]
    row_map = torch.where(inside, order[place.clamp_max(ids.numel() - 1)], -1).int().flatten()
    return row_map, torch.where(expert < experts, expert, -1).int()


def variants(
    experts: int, topk: int, columns: int, tokens: int, with_vllm: bool
) -> dict[str, dict[str, list[Callable[[], object]]]]:
    """For every step of the experts, the calls to time over rotating operands."""
    device = hardware.detect(torch.device("cuda"))
    slots = tokens * topk
    block_m = default_config(device, slots, experts, columns, columns).block_m
    sets = []
    for _ in range(min(32, timing.copies(slots * columns * 2))):
        weights, ids = torch.randn(tokens, experts, device="cuda").softmax(-1).topk(topk)
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        rows = torch.randn(slots, columns, device="cuda", dtype=torch.bfloat16)
        ids = ids.int()
        sets.append((ids, weights, x, rows, routing.schedule(ids, None, experts, block_m, device)))

    def schedule(ids: torch.Tensor, weights: torch.Tensor, many_reads: int = routing.MANY_READS) -> routing.Schedule:
        with patch.object(routing, "MANY_READS", many_reads):
            return routing.schedule(ids, None, experts, block_m, device, weights)

    steps: dict[str, dict[str, list[Callable[[], object]]]] = {
        "schedule": {
            "schedule": [lambda s=s: schedule(s[0], s[1]) for s in sets],
            "two_launches": [lambda s=s: schedule(s[0], s[1], 0) for s in sets],
            "torch": [lambda s=s: torch_schedule(s[0], experts, block_m) for s in sets],
        },
        "rows": {
            "scatter_rows": [
                lambda s=s: routing.scatter_rows(s[2], s[4].slot_row, s[4].row_map.numel(), device) for s in sets
            ],
            "torch": [lambda s=s: s[2][s[4].row_map.clamp_min(0) // topk] for s in sets],
        },
        "sum": {
            "sum_rows": [lambda s=s: routing.sum_rows(s[3], s[4].slot_row, topk, device, in_tiles=False) for s in sets],
            "torch": [lambda s=s: s[3].view(tokens, topk, columns).sum(dim=1) for s in sets],
        },
    }
    if slots <= MOST_SLOTS_IN_ONE_LAUNCH:
        steps["schedule"]["one_launch"] = [lambda s=s: schedule(s[0], s[1], 1 << 62) for s in sets]
    if with_vllm:
        align, add = torch.ops._moe_C.moe_align_block_size.default, torch.ops._moe_C.moe_sum.default
        padded = slots + experts * (block_m - 1)
        sorted_ids = torch.empty(padded, dtype=torch.int32, device="cuda")
        expert_ids = torch.empty(-(-padded // block_m), dtype=torch.int32, device="cuda")
        count = torch.empty(1, dtype=torch.int32, device="cuda")
        total = torch.empty(tokens, columns, dtype=torch.bfloat16, device="cuda")

        def call(operator: torch._ops.OpOverload, *arguments: object) -> None:
            # Optional arguments have been added at the end from version to version.
            operator(*arguments, *[None] * (len(operator._schema.arguments) - len(arguments)))

        steps["schedule"]["vllm"] = [
            lambda s=s: call(align, s[0], experts, block_m, sorted_ids, expert_ids, count) for s in sets
        ]
        steps["sum"]["vllm"] = [lambda s=s: call(add, s[3].view(tokens, topk, columns), total) for s in sets]
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-ops", type=Path, help="folder that holds vLLM's _moe_C_stable_libtorch.abi3.so")
    args = parser.parse_args()
    if args.vllm_ops:
        torch.ops.load_library(harness.vllm_library(args.vllm_ops, "_moe_C_stable_libtorch"))
    rows = []
    for name, shape in SHAPES.items():
        for tokens in TOKENS:
            steps = variants(*shape, tokens, args.vllm_ops is not None)
            for step, calls in steps.items():
                times = timing.time_variants(calls)
                us = {key: round(t, 2) for key, t in times.items()}
                rows.append({"model": name, "tokens": tokens, "step": step, "us": us})
                shown = "  ".join(f"{key} {t:.1f}" for key, t in times.items())
                print(f"{name:14} T={tokens:5} {step:8} {shown}", flush=True)
            del steps, calls
            torch.cuda.empty_cache()
    print("written to", harness.write(f"routing_{harness.gpu()}", {"unit": "microseconds a call", "rows": rows}))


if __name__ == "__main__":
    main()
