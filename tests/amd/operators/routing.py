# SPDX-License-Identifier: Apache-2.0
"""Rows of experts sorted, gathered and added: every bit, for any routing, with absent experts and ids of nobody."""

from collections.abc import Callable
from functools import partial

import torch

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import routing
from tests.amd.budget import Budget
from tests.inputs import DTYPE_IDS, DTYPES, assert_same

# Ids and counts are few; rows are what takes the time.
BUDGETS = {
    "count_kernel": Budget(bulk=False),
    "scan_kernel": Budget(bulk=False),
    "schedule_kernel": Budget(bulk=False),
    "gather_rows_kernel": Budget(),
    "sum_rows_kernel": Budget(),
}


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def launch(tokens: int, topk: int, experts: int, hidden: int, block_m: int, local: int | None = None) -> None:
        ids, weights = torch.zeros(tokens, topk, dtype=torch.int32), torch.empty(tokens, topk)
        expert_map = None if local is None else torch.zeros(experts, dtype=torch.int32)
        found = routing.schedule(ids, expert_map, local or experts, block_m, hardware, weights)
        routing.gather_rows(torch.empty(tokens, hidden, dtype=torch.bfloat16), found.row_map, topk, hardware)
        rows = torch.empty(tokens * topk, hidden, dtype=torch.bfloat16)
        routing.sum_rows(rows, ids, expert_map, local or experts, hardware)

    # Qwen3-30B-A3B with few and with many slots, and a rank of eight of DeepSeek-V3.
    return {
        "1 token": partial(launch, 1, 8, 128, 2048, 16),
        "256 tokens": partial(launch, 256, 8, 128, 2048, 64),
        "4096 tokens": partial(launch, 4096, 8, 128, 2048, 128),
        "32 of 256 experts": partial(launch, 64, 8, 256, 7168, 16, 32),
    }


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def draw(tokens: int, topk: int, known: int, seed: int) -> torch.Tensor:
        """Ids of which some are negative, some too large, and many those of one popular expert."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(-1, known + 1, (tokens, topk), generator=generator)
        return torch.where(torch.rand(tokens, topk, generator=generator) < 0.3, known - 1, ids)

    def local(ids: torch.Tensor, expert_map: torch.Tensor | None, known: int) -> torch.Tensor:
        mapped = torch.arange(known) if expert_map is None else expert_map.long()
        return torch.where((ids >= 0) & (ids < known), mapped[ids.long().clamp(0, known - 1)], -1)

    def check(
        tokens: int, topk: int, experts: int, block_m: int, absent: int = 0, dtype: torch.dtype = torch.int32
    ) -> None:
        known = experts + absent
        expert_map = None
        if absent:
            expert_map = torch.full((known,), -1, dtype=dtype)
            expert_map[torch.randperm(known, generator=torch.Generator().manual_seed(0))[:experts]] = torch.arange(
                experts, dtype=dtype
            )
        ids, weights = draw(tokens, topk, known, tokens).to(dtype), torch.rand(tokens, topk)
        found = routing.schedule(ids, expert_map, experts, block_m, hardware, weights)
        experts_of_slots = local(ids, expert_map, known).flatten()
        row_map, tile_expert = [], []
        for expert in range(experts):
            slots = (experts_of_slots == expert).nonzero().flatten()
            tiles = -(-slots.numel() // block_m)
            row_map.append(torch.nn.functional.pad(slots, (0, tiles * block_m - slots.numel()), value=-1))
            tile_expert += [expert] * tiles
        tiles = routing.max_tiles(ids.numel(), experts, block_m)
        rows = torch.cat(row_map)
        rows = torch.nn.functional.pad(rows, (0, tiles * block_m - rows.numel()), value=-1).int()
        assert torch.equal(found.tile_expert, torch.tensor(tile_expert + [-1] * (tiles - len(tile_expert))).int())
        assert torch.equal(found.row_map, rows)
        expected_weight = torch.where(rows >= 0, weights.flatten()[rows.clamp_min(0).long()], 0.0)
        assert found.row_weight is not None and torch.equal(found.row_weight, expected_weight)

    def gather(tokens: int, columns: int, dtype: torch.dtype) -> None:
        x = torch.arange(tokens * columns).view(tokens, columns).remainder(251).to(dtype)
        row_map = torch.randint(-1, tokens * 3, (64,), generator=torch.Generator().manual_seed(0)).int()
        row_map[16:32] = -1
        there = row_map >= 0
        found = routing.gather_rows(x, row_map, 3, hardware)
        assert_same(found[there], x[(row_map[there] // 3).long()])

    def add(tokens: int, topk: int, columns: int, dtype: torch.dtype, weighted: bool, absent: bool) -> None:
        """Integers, so that no sum is rounded; NaN in the rows that must not be read."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(-8, 9, (tokens * topk, columns), generator=generator).to(dtype)
        ids = draw(tokens, topk, 8, 1).int()
        expert_map = torch.tensor([0, -1, 1, 2, -1, 3, -1, 4], dtype=torch.int32) if absent else None
        here = (local(ids, expert_map, 8) >= 0).flatten()
        weights = torch.randint(-2, 3, (tokens, topk), generator=generator).float() if weighted else None
        factor = here[:, None] * (1.0 if weights is None else weights.flatten()[:, None])
        expected = (rows.double() * factor).view(tokens, topk, columns).sum(1)
        rows[~here] = torch.nan
        found = routing.sum_rows(rows, ids, expert_map, 5 if absent else 8, hardware, weights)
        assert_same(found, expected.float().to(dtype) + 0.0)

    return {
        "one slot": partial(check, 1, 1, 1, 16),
        "few slots": partial(check, 3, 2, 5, 16),
        "128 slots": partial(check, 16, 8, 64, 16),
        "more than 128 slots": partial(check, 43, 4, 70, 16),
        "tall tiles": partial(check, 90, 3, 4, 64),
        "absent experts": partial(check, 20, 4, 12, 16, absent=9),
        "int64": partial(check, 20, 4, 12, 16, absent=9, dtype=torch.int64),
        "many slots": partial(check, 700, 6, 40, 64),
        "many slots and absent experts": partial(check, 1031, 4, 20, 128, absent=30),
        **{
            f"gather {columns} columns of {name}": partial(gather, 5, columns, dtype)
            for dtype, name in zip(DTYPES, DTYPE_IDS, strict=True)
            for columns in (1, 100, 1040)
        },
        **{
            f"sum {columns} columns of {name}{', weighted' * weighted}{', absent experts' * absent}": partial(
                add, 7, 3, columns, dtype, weighted, absent
            )
            for dtype, name, weighted, absent in zip(DTYPES, DTYPE_IDS, (0, 1, 1), (1, 0, 1), strict=True)
            for columns in (1, 100, 2064)
        },
    }
