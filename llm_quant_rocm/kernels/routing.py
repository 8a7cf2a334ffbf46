# SPDX-License-Identifier: Apache-2.0
"""What stands around the grouped products of routed experts: rows sorted by expert, copied there, and added again.

A slot is one (token, expert) pair, number token * k + j. Slots are sorted by expert, and within an expert by number,
so that nothing depends on timing; every expert's slots fill whole tiles of `block_m` rows, the last one padded. A
product then gives each tile to one expert's weight.

Every tile finds its own slots: one program counts the slots of all experts, sees from the counts whose tile it is, and
picks that expert's slots in the tile's range out of all slots. That reads the ids once for every tile, which costs less
than a second launch up to MANY_READS of them. Beyond, two launches read them twice in all. Every program of the first
has a part of the slots: it counts those of each expert, and for each slot those of its expert before it. The second
sees from the counts of all parts where a part's slots of each expert begin: that and what was counted for the slot make
its row.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.launch import PLANS, Launch
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2

# Ids that the programs of one launch read together, from which two launches are faster (routing_sm_90.json).
MANY_READS = 2**15
# Slots that are compared with each other. Parts have no more until there are about as many parts as multiprocessors:
# every program adds up the counts of all parts, a block of them at a time.
_CHUNK = 128
_PARTS_BLOCK = 32
_MOST_PARTS = 128


@dataclass(frozen=True)
class Schedule:
    """Rows in tiles of one expert each.

    Attributes:
        row_map: int32 [tiles * block_m], the slot of each row, or -1 where there is none.
        tile_expert: int32 [tiles], the expert of each tile, or -1 for the tiles that this routing does not need; those
            are the last ones.
        tile_rows: int32 [tiles], how many of a tile's rows there are, its first ones.
        tile_count: int32 [1], how many tiles it needs.
        row_weight: fp32 [tiles * block_m], the router weight of each row, 0 where there is none; None if not asked for.
        slot_row: int32 [slots], the row of each slot, or -1 of one whose expert is not here.
        counts: of two launches what the first one counted, or None. Kept, so that nobody writes there who runs beside
            the second.
    """

    row_map: torch.Tensor
    tile_expert: torch.Tensor
    tile_rows: torch.Tensor
    tile_count: torch.Tensor
    row_weight: torch.Tensor | None
    slot_row: torch.Tensor
    counts: torch.Tensor | None = None


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


@triton.jit
def put_slot(weight_ptr, row_map_ptr, row_weight_ptr, slot_row_ptr, slot, row, mask):
    """Stores slots and their weights at their rows, and the rows at the slots."""
    tl.store(row_map_ptr + row, slot, mask=mask)
    tl.store(slot_row_ptr + slot, row, mask=mask)
    if row_weight_ptr is not None:
        tl.store(row_weight_ptr + row, tl.load(weight_ptr + slot, mask=mask, other=0.0), mask=mask)


# The number of slots changes with every batch: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["slots"])
def schedule_kernel(
    ids_ptr, map_ptr, padding_ptr, weight_ptr, row_map_ptr, tile_expert_ptr, tile_rows_ptr, tile_count_ptr,
    row_weight_ptr, slot_row_ptr, slots, known,
    TOPK: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One tile of a `Schedule`."""
    if PDL:
        programmatic_launch()
    tile = tl.program_id(0)
    experts = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        expert = local_expert(ids_ptr, map_ptr, padding_ptr, slot, slot < slots, known, TOPK)
        counts += tl.histogram(expert, BINS, mask=expert >= 0)
        # No tile has them.
        tl.store(slot_row_ptr + slot, expert, mask=(expert < 0) & (slot < slots) & (tile == 0))
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
    tl.store(tile_rows_ptr + tile, tl.maximum(end - begin, 0))
    first_row = first * BLOCK_M
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    empty = row >= first_row + end
    tl.store(row_map_ptr + row, tl.full([BLOCK_M], -1, tl.int32), mask=empty)
    if row_weight_ptr is not None:
        tl.store(row_weight_ptr + row, tl.zeros([BLOCK_M], tl.float32), mask=empty)
    seen = 0
    start = 0
    while (seen < end) & (start < slots):  # the second never decides, unless somebody writes the ids meanwhile
        slot = start + tl.arange(0, CHUNK)
        expert = local_expert(ids_ptr, map_ptr, padding_ptr, slot, slot < slots, known, TOPK)
        here = (expert == mine).to(tl.int32)
        rank = tl.where(here > 0, seen + tl.cumsum(here, 0) - 1, -1)
        chosen = (rank >= begin) & (rank < end)
        put_slot(weight_ptr, row_map_ptr, row_weight_ptr, slot_row_ptr, slot, first_row + rank, chosen)
        seen += tl.sum(here, 0)
        start += CHUNK


@triton.jit(do_not_specialize=["slots"])
def count_kernel(
    ids_ptr, map_ptr, padding_ptr, counts_ptr, slot_row_ptr, slots, known, part_slots,
    TOPK: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """counts[part, expert] of slots part * part_slots and following; slot_row[slot] becomes how many slots of its
    expert its part has before it, or -1 where its expert is not here."""
    if PDL:
        programmatic_launch()
    part = tl.program_id(0)
    end = tl.minimum((part + 1) * part_slots, slots)
    place = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    slot = part * part_slots + place
    # The next chunk is loaded while this one is compared.
    following = local_expert(ids_ptr, map_ptr, padding_ptr, slot, slot < end, known, TOPK)
    for start in range(part * part_slots, end, CHUNK):
        slot = start + place
        expert = following
        following = local_expert(ids_ptr, map_ptr, padding_ptr, slot + CHUNK, slot + CHUNK < end, known, TOPK)
        here = expert >= 0
        chunk_counts = tl.histogram(expert, BINS, mask=here)
        # A slot's place among the chunk's sorted ones, less the slots of smaller experts. Signs of differences are
        # added up: of comparisons LLVM makes masks of bits, which takes twice the instructions.
        key = tl.where(here, expert, BINS) * CHUNK + place
        sorted_place = -tl.sum((key[:, None] - key[None, :]) >> 31, 0)
        smaller = tl.cumsum(chunk_counts, 0) - chunk_counts
        rank = tl.gather(counts - smaller, tl.maximum(expert, 0), 0) + sorted_place
        tl.store(slot_row_ptr + slot, tl.where(here, rank, -1), mask=slot < end)
        counts += chunk_counts
    tl.store(counts_ptr + part * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["slots", "part_tiles", "tiles"])
def place_kernel(
    ids_ptr, map_ptr, padding_ptr, weight_ptr, counts_ptr, row_map_ptr, tile_expert_ptr, tile_rows_ptr, tile_count_ptr,
    row_weight_ptr, slot_row_ptr, slots, known, parts, part_slots, tiles, part_tiles,
    TOPK: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, PARTS_BLOCK: tl.constexpr,
    TILES_BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """From what `count_kernel` leaves, the rows of a part's slots, and a share of the tiles with their empty rows."""
    if PDL:
        programmatic_launch()
    part = tl.program_id(0)
    experts = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    earlier = tl.zeros([BINS], tl.int32)
    for start in range(0, parts, PARTS_BLOCK):
        found_ptr = counts_ptr + start * BINS + experts
        for other in tl.static_range(PARTS_BLOCK):
            earlier = tl.where(start + other == part, counts, earlier)
            counts += tl.load(found_ptr + other * BINS).to(tl.int32)
    tiles_of = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles_of, 0)
    first_row = (ends - tiles_of) * BLOCK_M
    tl.store(tile_count_ptr, tl.sum(tiles_of, 0), mask=part == 0)

    end = tl.minimum((part + 1) * part_slots, slots)
    for start in range(part * part_slots, end, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        expert = local_expert(ids_ptr, map_ptr, padding_ptr, slot, slot < end, known, TOPK)
        here = expert >= 0
        rank = tl.load(slot_row_ptr + slot, mask=here, other=0)
        row = tl.gather(first_row + earlier, tl.maximum(expert, 0), 0) + rank
        put_slot(weight_ptr, row_map_ptr, row_weight_ptr, slot_row_ptr, slot, row, here)

    end = tl.minimum((part + 1) * part_tiles, tiles)
    for start in range(part * part_tiles, end, TILES_BLOCK):
        tile = start + tl.arange(0, TILES_BLOCK)
        # The experts whose tiles end before this one; all of them where there is no such tile.
        mine = tl.sum((ends[:, None] <= tile[None, :]).to(tl.int32), 0)
        needed = mine < BINS
        tl.store(tile_expert_ptr + tile, tl.where(needed, mine, -1), mask=tile < end)
        filled = tl.where(needed, tl.gather(first_row + counts, tl.minimum(mine, BINS - 1), 0), 0)
        rows = tl.minimum(tl.maximum(filled - tile * BLOCK_M, 0), BLOCK_M)
        tl.store(tile_rows_ptr + tile, rows, mask=tile < end)
        row = tile[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        empty = (row >= filled[:, None]) & (tile < end)[:, None]
        tl.store(row_map_ptr + row, tl.full([TILES_BLOCK, BLOCK_M], -1, tl.int32), mask=empty)
        if row_weight_ptr is not None:
            tl.store(row_weight_ptr + row, tl.zeros([TILES_BLOCK, BLOCK_M], tl.float32), mask=empty)


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

    Waits for nothing, and may be captured in a graph. One launch or two, by the numbers of slots and tiles.
    """
    tokens, topk = topk_ids.shape
    known = experts if expert_map is None else expert_map.numel()
    plan = _plan(tokens, topk, experts, known, block_m, hardware, MANY_READS, _MOST_PARTS)
    tiles, new = plan.tiles, partial(topk_ids.new_empty, dtype=torch.int32)
    row_map, tile_expert, tile_rows, tile_count = new(tiles * block_m), new(tiles), new(tiles), new(1)
    slot_row = new(tokens * topk)
    row_weight = None if topk_weights is None else new(tiles * block_m, dtype=torch.float32)
    counted = () if plan.count is None else (new(plan.counts, dtype=plan.counts_dtype),)
    found = Schedule(row_map, tile_expert, tile_rows, tile_count, row_weight, slot_row, *counted)
    if plan.place is None:
        tile_count.zero_()
        return found
    if plan.count is not None:
        plan.count(topk_ids, expert_map, padding, *counted, slot_row)
    plan.place(
        topk_ids, expert_map, padding, topk_weights, *counted, row_map, tile_expert, tile_rows, tile_count, row_weight,
        slot_row,
    )  # fmt: skip
    return found


class _Plan(NamedTuple):
    """How a schedule is made.

    Attributes:
        tiles: how many it has.
        place: the launch that makes it; None if it has no tiles.
        count: of many slots the launch before, with counts of this shape and dtype.
    """

    tiles: int
    place: Launch | None
    count: Launch | None = None
    counts: tuple[int, int] = (0, 0)
    counts_dtype: torch.dtype = torch.int32


@lru_cache(PLANS)
def _plan(
    tokens: int, topk: int, experts: int, known: int, block_m: int, hardware: Hardware, many_reads: int, most_parts: int
) -> _Plan:
    """Of ids below `known`; with two launches beyond `many_reads`, of up to `most_parts` parts."""
    slots = tokens * topk
    tiles = max_tiles(slots, experts, block_m)
    if not tiles:
        return _Plan(0, None)
    bins = max(64, next_power_of_2(experts))
    constants = {"TOPK": topk, "BINS": bins, "PDL": hardware.pdl, **pdl_option(hardware)}
    if slots * tiles <= many_reads:
        chunk, warps = (128, 4) if slots <= 128 else (1024, 8)
        place = Launch(
            schedule_kernel, (tiles,), slots, known, CHUNK=chunk, BLOCK_M=block_m, num_warps=warps, **constants
        )
        return _Plan(tiles, place)
    parts = min(most_parts, cdiv(slots, _CHUNK * _PARTS_BLOCK) * _PARTS_BLOCK)
    part_slots = cdiv(slots, parts * 16) * 16
    # A thread a slot: of fewer slots than threads Triton repeats the loads in every layout.
    count = Launch(
        count_kernel, (parts,), slots, known, part_slots, CHUNK=_CHUNK, num_warps=_CHUNK // hardware.lanes, **constants
    )
    place = Launch(
        place_kernel, (parts,), slots, known, parts, part_slots, tiles, cdiv(tiles, parts),
        CHUNK=512, BLOCK_M=block_m, PARTS_BLOCK=_PARTS_BLOCK, TILES_BLOCK=16, num_warps=4, **constants,
    )  # fmt: skip
    # Every program reads all counts: they are as short as they can be.
    return _Plan(tiles, place, count, (parts, bins), torch.int16 if part_slots < 2**15 else torch.int32)


@triton.jit
def scatter_rows_kernel(
    x_ptr, slot_row_ptr, out_ptr, columns, TOPK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    # x does not depend on the kernel just before this one.
    value = tl.load(x_ptr + token * columns + column, mask=mask)
    if PDL:
        programmatic_launch()
    rows = tl.tuple([])
    for j in tl.static_range(TOPK):
        rows += (tl.load(slot_row_ptr + token * TOPK + j).to(tl.int64),)
    for j in tl.static_range(TOPK):
        tl.store(out_ptr + rows[j] * columns + column, value, mask=mask & (rows[j] >= 0))


def scatter_rows(x: torch.Tensor, slot_row: torch.Tensor, rows: int, hardware: Hardware) -> torch.Tensor:
    """Every token's row of x [T, H] at the rows `slot_row` [T * k] of its slots, of [rows, H]; all contiguous.

    Rows of no slot are left as torch.empty makes them. Each row of x is read once: to gather those of a schedule would
    read it k times, and of many tokens not all from the L2 cache.

    The kernel that makes `slot_row` stands between what makes x and this call, and waits for what comes before it: x is
    read before that kernel is waited for.
    """
    tokens, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if x.numel():
        _scatter(tokens, columns, slot_row.numel() // tokens, hardware)(x, slot_row, out)
    return out


@lru_cache(PLANS)
def _scatter(tokens: int, columns: int, topk: int, hardware: Hardware) -> Launch:
    return _by_rows(scatter_rows_kernel, tokens, columns, hardware, TOPK=topk)


def _by_rows(kernel: Any, tokens: int, columns: int, hardware: Hardware, **constants: Any) -> Launch:
    """A program for each block of columns of each token."""
    block = min(1024, next_power_of_2(columns))
    return Launch(
        kernel, (tokens, cdiv(columns, block)), columns,
        BLOCK=block, PDL=hardware.pdl, num_warps=2, **constants, **pdl_option(hardware),
    )  # fmt: skip


@triton.jit
def sum_rows_kernel(
    rows_ptr, slot_row_ptr, out_ptr, columns,
    TOPK: tl.constexpr, IN_TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Where a token's rows are does not depend on the kernel just before this one.
    places = tl.tuple([])
    for j in tl.static_range(TOPK):
        slot = token * TOPK + j
        row = tl.load(slot_row_ptr + slot).to(tl.int64)
        places += (((row if IN_TILES else slot) * columns, tl.where(row >= 0, columns, 0)),)
    if PDL:
        programmatic_launch()
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOPK):
        first, there = places[j]
        total += tl.load(rows_ptr + first + column, mask=column < there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), mask=column < columns)


def sum_rows(
    rows: torch.Tensor, slot_row: torch.Tensor, topk: int, hardware: Hardware, *, in_tiles: bool
) -> torch.Tensor:
    """Sum [T, H] of the k rows of every token.

    slot_row is a schedule's, int32 [T * k]. rows is [rows of its tiles, H] if they are `in_tiles`, or else [T * k, H],
    that of each slot at its number. Added in fp32 in the order of the slots and rounded once to the rows' dtype. The
    row of a slot whose expert is not here, -1 in slot_row, is not read and adds nothing. All tensors are contiguous.

    Between what makes slot_row and this call stands a kernel that waits for what comes before it: it is read before the
    kernel just before this one is waited for.
    """
    tokens, columns = slot_row.numel() // topk, rows.shape[1]
    out = torch.empty((tokens, columns), dtype=rows.dtype, device=rows.device)
    if tokens and columns:
        _sum(tokens, columns, topk, in_tiles, hardware)(rows, slot_row, out)
    return out


@lru_cache(PLANS)
def _sum(tokens: int, columns: int, topk: int, in_tiles: bool, hardware: Hardware) -> Launch:
    return _by_rows(sum_rows_kernel, tokens, columns, hardware, TOPK=topk, IN_TILES=in_tiles)
