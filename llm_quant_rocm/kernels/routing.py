# SPDX-License-Identifier: Apache-2.0
"""What stands around the grouped products of routed experts: rows sorted by expert, gathered, and added again.

A slot is one (token, expert) pair, number token * k + j. Slots are sorted by expert, and within an expert by number,
so that nothing depends on timing; every expert's slots fill whole tiles of `block_m` rows, the last one padded. A
product then gives each tile to one expert's weight.

Every tile finds its own slots: one program counts the slots of all experts, sees from the counts whose tile it is, and
picks that expert's slots in the tile's range out of all slots. That reads the ids once for every tile, which costs
less than a second launch until there are thousands of them. From MANY_SLOTS on, two small kernels count first, and a
tile reads only the part of the ids where its slots are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2

MANY_SLOTS = 4096
# Parts in which many slots are counted: about two programs for each multiprocessor.
_PARTS = 256


@dataclass(frozen=True)
class Schedule:
    """Rows in tiles of one expert each.

    Attributes:
        row_map: int32 [tiles * block_m], the slot of each row, or -1 where there is none.
        tile_expert: int32 [tiles], the expert of each tile, or -1 for the tiles that this routing does not need; those
            are the last ones.
        tile_count: int32 [1], how many tiles it needs.
        row_weight: fp32 [tiles * block_m], the router weight of each row, 0 where there is none; None if not asked for.
    """

    row_map: torch.Tensor
    tile_expert: torch.Tensor
    tile_count: torch.Tensor
    row_weight: torch.Tensor | None


def max_tiles(slots: int, experts: int, block_m: int) -> int:
    """The most tiles that a routing can need; some routing needs exactly these.

    The first slot of an expert begins a tile, and of its others each block_m-th does.
    """
    return min(slots, experts) + max(slots - experts, 0) // block_m


@triton.jit
def local_expert(ids_ptr, map_ptr, padding_ptr, slot, inside, known, TOPK: tl.constexpr):
    """The index of a slot's expert among this rank's; -1 for one that is elsewhere, of padding, and where not `inside`.

    `known` is the number of expert_map's entries, or without one the number of experts: an id that is not below it,
    which a router gives to a row of NaN, is nobody's.
    """
    expert = tl.load(ids_ptr + slot, mask=inside, other=-1)
    expert = tl.where((expert >= 0) & (expert < known), expert.to(tl.int32), -1)
    if map_ptr is not None:
        expert = tl.load(map_ptr + expert, mask=expert >= 0, other=-1).to(tl.int32)
    if padding_ptr is not None:
        expert = tl.where(tl.load(padding_ptr + slot // TOPK, mask=inside, other=-1) < 0, -1, expert)
    return expert


# The number of slots changes with every batch: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["slots"])
def count_kernel(
    ids_ptr, map_ptr, padding_ptr, counts_ptr, slots, known, part_slots,
    TOPK: tl.constexpr, BINS: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """counts[expert, part] of slots part * part_slots and following."""
    if PDL:
        programmatic_launch()
    part = tl.program_id(0)
    end = tl.minimum((part + 1) * part_slots, slots)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(part * part_slots, end, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        expert = local_expert(ids_ptr, map_ptr, padding_ptr, slot, slot < end, known, TOPK)
        counts += tl.histogram(expert, BINS, mask=expert >= 0)
    tl.store(counts_ptr + tl.arange(0, BINS) * PARTS + part, counts)


@triton.jit
def scan_kernel(counts_ptr, PARTS: tl.constexpr, PDL: tl.constexpr):
    """One expert's counts become the counts of its slots up to the end of each part."""
    if PDL:
        programmatic_launch()
    place = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    tl.store(counts_ptr + place, tl.cumsum(tl.load(counts_ptr + place), 0))


@triton.jit(do_not_specialize=["slots"])
def schedule_kernel(
    ids_ptr, map_ptr, padding_ptr, weight_ptr, counts_ptr, row_map_ptr, tile_expert_ptr, tile_count_ptr, row_weight_ptr,
    slots, known, part_slots,
    TOPK: tl.constexpr, BINS: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """One tile of a `Schedule`. counts_ptr: what `scan_kernel` leaves, or None."""
    if PDL:
        programmatic_launch()
    tile = tl.program_id(0)
    experts = tl.arange(0, BINS)
    if counts_ptr is None:
        counts = tl.zeros([BINS], tl.int32)
        for start in range(0, slots, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            expert = local_expert(ids_ptr, map_ptr, padding_ptr, slot, slot < slots, known, TOPK)
            counts += tl.histogram(expert, BINS, mask=expert >= 0)
    else:
        counts = tl.load(counts_ptr + experts * PARTS + PARTS - 1)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    # The experts whose tiles end before this one; all of them where there is no such tile, which leaves 0 slots.
    mine = tl.sum((ends <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(experts == mine, ends - tiles, 0), 0)
    count = tl.sum(tl.where(experts == mine, counts, 0), 0)
    tl.store(tile_expert_ptr + tile, tl.where(mine < BINS, mine, -1))
    tl.store(tile_count_ptr, tl.sum(tiles, 0), mask=tile == 0)

    # This tile has the slots begin to end of its expert.
    begin = (tile - first) * BLOCK_M
    end = tl.minimum(begin + BLOCK_M, count)
    row = begin + tl.arange(0, BLOCK_M)
    empty = row >= end
    row_map_ptr += tile * BLOCK_M - begin
    tl.store(row_map_ptr + row, tl.full([BLOCK_M], -1, tl.int32), mask=empty)
    if row_weight_ptr is not None:
        row_weight_ptr += tile * BLOCK_M - begin
        tl.store(row_weight_ptr + row, tl.zeros([BLOCK_M], tl.float32), mask=empty)
    seen = 0
    start = 0
    if counts_ptr is not None:
        # Skip the parts that hold only slots of the expert's earlier tiles.
        seen_by_part = tl.load(counts_ptr + tl.minimum(mine, BINS - 1) * PARTS + tl.arange(0, PARTS))
        seen = tl.max(tl.where(seen_by_part <= begin, seen_by_part, 0), 0)
        start = tl.sum((seen_by_part <= begin).to(tl.int32), 0) * part_slots
    while (seen < end) & (start < slots):  # the second never decides, unless somebody writes the ids meanwhile
        slot = start + tl.arange(0, CHUNK)
        expert = local_expert(ids_ptr, map_ptr, padding_ptr, slot, slot < slots, known, TOPK)
        here = (expert == mine).to(tl.int32)
        rank = tl.where(here > 0, seen + tl.cumsum(here, 0) - 1, -1)
        chosen = (rank >= begin) & (rank < end)
        tl.store(row_map_ptr + rank, slot, mask=chosen)
        if row_weight_ptr is not None:
            weight = tl.load(weight_ptr + slot, mask=chosen, other=0.0)
            tl.store(row_weight_ptr + rank, weight, mask=chosen)
        seen += tl.sum(here, 0)
        start += CHUNK


def schedule(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    block_m: int,
    hardware: Hardware,
    topk_weights: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
) -> Schedule:
    """Rows sorted by expert in tiles of `block_m`, of `max_tiles` tiles whatever the ids are.

    Args:
        topk_ids: integers of 32 or 64 bits [T, k], contiguous. An id that is negative or too large has no expert.
        expert_map: integers of 32 or 64 bits [all experts], contiguous: the index among this rank's `experts` of each,
            or -1. None: ids are indices.
        block_m: a power of two.
        topk_weights: fp32 [T, k], contiguous, for `row_weight`.
        padding: integers of 32 or 64 bits [T], contiguous. A token where it is negative has no experts.

    Waits for nothing, allocates its results alone, and may be captured in a graph. One launch below MANY_SLOTS slots,
    three from there on.
    """
    slots, device = topk_ids.numel(), topk_ids.device
    tiles = max_tiles(slots, experts, block_m)
    row_map = torch.empty(tiles * block_m, dtype=torch.int32, device=device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=device)
    tile_count = torch.empty(1, dtype=torch.int32, device=device)
    row_weight = None
    if topk_weights is not None:
        row_weight = torch.empty(tiles * block_m, dtype=torch.float32, device=device)
    if not tiles:
        return Schedule(row_map, tile_expert, tile_count.zero_(), row_weight)
    bins = max(64, next_power_of_2(experts))
    known = experts if expert_map is None else expert_map.numel()
    constants = {
        "TOPK": topk_ids.shape[1], "BINS": bins, "PARTS": _PARTS, "PDL": hardware.pdl, **pdl_option(hardware)
    }  # fmt: skip
    counts, part_slots = None, 16
    chunk, warps = (128, 4) if slots <= 128 else (1024, 8)
    if slots >= MANY_SLOTS:
        # A tile's slots are scattered over many more of other experts.
        chunk, warps = 2048, 16
        counts = torch.empty((bins, _PARTS), dtype=torch.int32, device=device)
        part_slots = cdiv(slots, _PARTS * 16) * 16
        count_kernel[(_PARTS,)](
            topk_ids, expert_map, padding, counts, slots, known, part_slots, CHUNK=256, num_warps=4, **constants
        )
        scan_kernel[(bins,)](counts, PARTS=_PARTS, PDL=hardware.pdl, num_warps=4, **pdl_option(hardware))
    schedule_kernel[(tiles,)](
        topk_ids, expert_map, padding, topk_weights, counts, row_map, tile_expert, tile_count, row_weight, slots, known,
        part_slots, CHUNK=chunk, BLOCK_M=block_m, num_warps=warps, **constants,
    )  # fmt: skip
    return Schedule(row_map, tile_expert, tile_count, row_weight)


@triton.jit
def gather_rows_kernel(
    x_ptr, row_map_ptr, out_ptr, columns,
    TOPK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(row_map_ptr + row)
    if tl.max(slot, 0) < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (slot >= 0)[:, None] & (column < columns)[None, :]
    value = tl.load(x_ptr + (slot // TOPK).to(tl.int64)[:, None] * columns + column[None, :], mask=mask)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], value, mask=mask)


def gather_rows(x: torch.Tensor, row_map: torch.Tensor, topk: int, hardware: Hardware) -> torch.Tensor:
    """Row row_map[r] // topk of x [T, H] (contiguous) as row r of [len(row_map), H].

    Rows whose map is negative are left as torch.empty makes them. len(row_map) is a multiple of 8.
    """
    rows, columns = row_map.numel(), x.shape[1]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(1024, next_power_of_2(columns))
        gather_rows_kernel[(rows // 8, cdiv(columns, block))](
            x, row_map, out, columns, TOPK=topk, ROWS=8, BLOCK=block, PDL=hardware.pdl, num_warps=4,
            **pdl_option(hardware),
        )  # fmt: skip
    return out


@triton.jit
def sum_rows_kernel(
    rows_ptr, ids_ptr, map_ptr, padding_ptr, weight_ptr, out_ptr, known, columns,
    TOPK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOPK):
        slot = token * TOPK + j
        there = tl.where(local_expert(ids_ptr, map_ptr, padding_ptr, slot, True, known, TOPK) >= 0, columns, 0)
        value = tl.load(rows_ptr + slot * columns + column, mask=column < there, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            value *= tl.load(weight_ptr + slot)
        total += value
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), mask=column < columns)


def sum_rows(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    hardware: Hardware,
    topk_weights: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum [T, H] of the k rows of every token in rows [T * k, H], times topk_weights fp32 [T, k] if given.

    Added in fp32 in the order of the slots and rounded once to the rows' dtype. The row of a slot whose expert is not
    here (`schedule` says which ids those are) is not read and adds nothing. All tensors are contiguous.
    """
    tokens, topk = topk_ids.shape
    columns = rows.shape[1]
    out = torch.empty((tokens, columns), dtype=rows.dtype, device=rows.device)
    if out.numel():
        block = min(1024, next_power_of_2(columns))
        known = experts if expert_map is None else expert_map.numel()
        sum_rows_kernel[(tokens, cdiv(columns, block))](
            rows, topk_ids, expert_map, padding, topk_weights, out, known, columns, TOPK=topk, BLOCK=block,
            PDL=hardware.pdl, num_warps=2, **pdl_option(hardware),
        )  # fmt: skip
    return out
