# SPDX-License-Identifier: Apache-2.0
"""Routings that break a schedule of tiles, and what the schedule must be, in plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from llm_quant_rocm import reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.hardware import Hardware
from tests.inputs import assert_close_codes, assert_same, random_rows

kernels = pytest.importorskip("llm_quant_rocm.kernels.routing", reason="needs Triton")
act_and_mul_quant = pytest.importorskip("llm_quant_rocm.kernels.act_and_mul_quant", reason="needs Triton")


@dataclass(frozen=True)
class Routing:
    """Arguments of kernels.routing.schedule on the CPU."""

    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    experts: int
    block_m: int
    padding: torch.Tensor | None = None


def random_ids(tokens: int, topk: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Distinct experts for every token, int32 [tokens, topk]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(topk).indices.int()


def routings() -> dict[str, Routing]:
    """Small routings by name, each of another kind."""
    some = torch.arange(-1, 5, dtype=torch.int32)
    cases = {f"k = {topk}": Routing(random_ids(9, topk, 12), None, 12, 16) for topk in range(1, 9)}
    return cases | {
        "one token": Routing(random_ids(1, 8, 128), None, 128, 16),
        "one slot of one expert": Routing(torch.zeros(1, 1, dtype=torch.int64), None, 1, 16),
        "one expert": Routing(torch.zeros(40, 1, dtype=torch.int32), None, 1, 16),
        "3 experts": Routing(random_ids(50, 2, 3), None, 3, 16),
        "256 experts": Routing(random_ids(20, 8, 256), None, 256, 16),
        "one expert gets all": Routing(torch.full((70, 2), 77, dtype=torch.int32), None, 128, 32),
        "the last expert gets all": Routing(torch.full((70, 2), 127, dtype=torch.int64), None, 128, 32),
        "whole tiles": Routing(torch.arange(64, dtype=torch.int32).view(16, 4) // 16, None, 4, 16),
        "a slot more than whole tiles": Routing(torch.arange(66, dtype=torch.int32).view(-1, 1) // 33, None, 2, 16),
        "the most tiles there can be": Routing(torch.arange(-32, 5).clamp_min(0).view(-1, 1), None, 5, 16),
        "descending": Routing(torch.arange(119, -1, -1, dtype=torch.int32).view(-1, 4) % 30, None, 30, 16),
        "no expert at all": Routing(torch.full((5, 3), -1, dtype=torch.int32), None, 7, 16),
        "some ids are -1": Routing(some.repeat(7).view(-1, 2), None, 5, 16),
        "ids out of range": Routing(torch.tensor([[0, 5], [2**31 + 1, 4], [-(2**31), 1]]), None, 5, 16),
        "a tall tile": Routing(random_ids(33, 4, 8), None, 8, 256),
        "mapped away": Routing(some.repeat(7).view(-1, 2), torch.tensor([1, -1, 0, -1, 2, 3]), 4, 16),
        "all mapped away": Routing(random_ids(6, 2, 8), torch.full((8,), -1, dtype=torch.int32), 2, 16),
        "ids beyond the map": Routing(torch.tensor([[0, 3], [2, 9], [-1, 1]]), torch.tensor([0, -1, 1]).int(), 2, 16),
        "most experts elsewhere": Routing(
            random_ids(40, 8, 64), torch.where(torch.arange(64) % 8 == 3, torch.arange(64) // 8, -1).int(), 8, 16
        ),
        "padding at the end": Routing(random_ids(16, 8, 64), None, 64, 16, torch.arange(9, -7, -1)),
        "padding in between": Routing(random_ids(50, 3, 8), None, 8, 16, torch.arange(50).int() % 5 - 2),
        "nothing but padding": Routing(random_ids(6, 2, 8), None, 8, 16, torch.full((6,), -1)),
        "padding and a map": Routing(
            some.repeat(7).view(-1, 2), torch.tensor([1, -1, 0, -1, 2, 3]), 4, 16, 10 - torch.arange(21)
        ),
        "more than one chunk": Routing(random_ids(131, 8, 32), None, 32, 64),
    }  # fmt: skip


def many_slots_a_part() -> Routing:
    """With 32 parts, several chunks of slots and blocks of tiles for every program of the schedule in two launches."""
    return Routing(random_ids(2100, 8, 10), None, 10, 16)


def local_id(routing: Routing, slot: int) -> int | None:
    """The expert of a slot among this rank's, or None."""
    if routing.padding is not None and routing.padding[slot // routing.topk_ids.shape[1]] < 0:
        return None
    expert = int(routing.topk_ids.flatten()[slot])
    if routing.expert_map is not None:
        expert = int(routing.expert_map[expert]) if 0 <= expert < len(routing.expert_map) else -1
    return expert if 0 <= expert < routing.experts else None


def expected(routing: Routing, tiles: int) -> tuple[Sequence[int], Sequence[int]]:
    """(row_map, tile_expert) in `tiles` tiles, which are at least as many as this routing needs."""
    row_map, tile_expert = [], []
    ids = [local_id(routing, slot) for slot in range(routing.topk_ids.numel())]
    for expert in range(routing.experts):
        slots = [slot for slot, found in enumerate(ids) if found == expert]
        while slots:
            rows, slots = slots[: routing.block_m], slots[routing.block_m :]
            row_map += rows + [-1] * (routing.block_m - len(rows))
            tile_expert.append(expert)
    assert len(tile_expert) <= tiles, "the bound is too low"
    spare = tiles - len(tile_expert)
    return row_map + [-1] * (spare * routing.block_m), tile_expert + [-1] * spare


def check_schedule(routing: Routing, hardware: Hardware, device: str = "cpu") -> None:
    """kernels.routing.schedule gives what `expected` says, each row the weight of its slot, and each slot its row."""
    ids, expert_map, padding = _on(routing, device)
    weights = torch.rand(ids.shape, device=device)
    found = kernels.schedule(ids, expert_map, routing.experts, routing.block_m, hardware, weights, padding)
    row_map, tile_expert = expected(routing, kernels.max_tiles(ids.numel(), routing.experts, routing.block_m))
    assert found.tile_expert.dtype == found.tile_count.dtype == found.row_map.dtype == torch.int32
    assert found.tile_expert.tolist() == tile_expert
    assert found.tile_count.tolist() == [sum(expert >= 0 for expert in tile_expert)]
    assert found.row_map.tolist() == row_map
    assert found.tile_rows.dtype == torch.int32
    assert torch.equal(found.tile_rows, (found.row_map >= 0).view(len(tile_expert), routing.block_m).sum(1).int())
    assert found.row_weight is not None
    slots = found.row_map.long()
    row_weight = torch.where(slots < 0, 0, weights.flatten()[slots.clamp_min(0)])
    assert_same(found.row_weight, row_weight)
    rows = (slots >= 0).nonzero().flatten()
    assert found.slot_row.dtype == torch.int32 and found.slot_row.shape == (ids.numel(),)
    assert torch.equal(found.slot_row[slots[rows]].long(), rows)
    absent = torch.ones(ids.numel(), dtype=torch.bool, device=device)
    absent[slots[rows]] = False
    assert (found.slot_row[absent] == -1).all()


def check_sum(routing: Routing, hardware: Hardware, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> None:
    """kernels.routing.sum_rows adds the rows of the experts that are here, and reads no other, whether they are at the
    slots' numbers or in the schedule's tiles."""
    ids, expert_map, padding = _on(routing, device)
    tokens, topk = ids.shape
    rows = torch.randn(tokens * topk, 100, device=device).to(dtype)
    absent = torch.tensor([local_id(routing, slot) is None for slot in range(tokens * topk)], device=device)
    rows[absent] = torch.nan
    schedule = kernels.schedule(ids, expert_map, routing.experts, routing.block_m, hardware, padding=padding)
    scheduled = torch.where(schedule.row_map[:, None] < 0, torch.nan, rows[schedule.row_map.clamp_min(0)])
    found = kernels.sum_rows(rows, schedule.slot_row, topk, hardware, in_tiles=False)
    again = kernels.sum_rows(scheduled, schedule.slot_row, topk, hardware, in_tiles=True)
    assert_same(again, found)
    parts = torch.where(absent[:, None], 0, rows.float()).view(tokens, topk, -1)
    total = torch.zeros(tokens, 100, device=device)
    for j in range(topk):
        total += parts[:, j]
    assert_same(found, total.to(dtype))


def check_scatter(hardware: Hardware, device: str = "cpu") -> None:
    """kernels.routing.scatter_rows copies each token to the rows of its slots, wherever they are, and nowhere else."""
    slot_row = torch.tensor([[40, 3, -1], [-1, -1, -1], [0, 47, 8]], dtype=torch.int32, device=device)
    token, slot = (slot_row >= 0).nonzero(as_tuple=True)
    for dtype, columns in ((torch.bfloat16, 256), (torch.float32, 77), (torch.float16, 1000), (torch.bfloat16, 2064)):
        x = torch.randn(3, columns, device=device).to(dtype)
        # A row before the first one, where a slot without a row must not store either.
        left = torch.randn(49, columns, device=device).to(dtype)
        expected = left.clone()
        expected[1 + slot_row[token, slot].long()] = x[token]
        # No kernel stands between what makes x and this one.
        if device != "cpu":
            torch.cuda.synchronize()
        with patch.object(kernels, "torch", SimpleNamespace(empty=Mock(return_value=left[1:]))):
            found = kernels.scatter_rows(x, slot_row.flatten(), 48, hardware)
        assert_same(found, expected[1:])
        assert_same(left[:1], expected[:1])


def check_activations(hardware: Hardware, device: str = "cpu") -> None:
    """kernels.act_and_mul_quant stores the rows of the slots whose expert is here, at their numbers or in tiles, and no
    other."""
    fmt = fp8.of_dtype(hardware.fp8_dtype)
    slot_row = torch.tensor([3, -1, 0, 5, -1], dtype=torch.int32, device=device)
    for in_tiles, rows in ((False, [0, 2, 3]), (True, [3, 0, 5])):
        h = random_rows(6, 2 * 48, torch.bfloat16).to(device)
        # A row before the first one, where a slot without a row must not store either.
        left = random_rows(7, 48, torch.bfloat16).to(fmt.dtype).to(device), torch.rand(7, 1, device=device)
        before = [part.clone() for part in left]
        outputs = SimpleNamespace(empty=Mock(side_effect=[part[1:] for part in left]), float32=torch.float32)
        with patch.object(act_and_mul_quant, "torch", outputs):
            found = act_and_mul_quant.act_and_mul_quant_fp8(h, "silu", fmt, hardware, slot_row, in_tiles=in_tiles)
        expected = reference.act_and_mul_quant_fp8(h[rows].cpu(), "silu", fmt)
        assert_close_codes([part[rows] for part in found], expected, h.dtype)
        others = [0, *(1 + row for row in range(6) if row not in rows)]
        for part, same in zip(left, before, strict=True):
            assert_same(part[others].cpu(), same[others].cpu())


def _on(routing: Routing, device: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    expert_map, padding = (
        None if given is None else given.to(device) for given in (routing.expert_map, routing.padding)
    )
    return routing.topk_ids.to(device), expert_map, padding
