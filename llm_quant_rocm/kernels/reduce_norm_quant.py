# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual, RMSNorm and quantization in one kernel between GPUs that reach each other's memory.

The bits of `reference.reduce_norm_quant`. Tiles, memory, slots, calls and order are those of `kernels.quick_reduce`,
whose region and state they may share with its all-reduces; but pieces are whole rows, so that whoever holds a sum holds
all that its norm needs, and a program ends a row in registers. docs/fusion.md says why sums travel, and not codes.

    one-shot   a tile is a row: every rank sends it to everybody, who adds, normalises and quantizes it for itself
    two-shot   a tile is a row of every owner, rows tile * WORLD + owner: owners add them up and send the sums, encoded
               again, to all, who normalise and quantize them

A row travels as a whole buffer of `formats.wire`, zeros beyond its columns; groups of zeros alone are not sent.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.norm_quant import Norm, Result, Target
from llm_quant_rocm.formats.wire import BLOCK, GROUP, Codec
from llm_quant_rocm.hardware import Hardware, detect
from llm_quant_rocm.kernels import wire
from llm_quant_rocm.kernels.norm_row import (
    LAYOUTS,
    LINEAR,
    QUANTIZATIONS,
    finish_row,
    load_residual,
    load_row,
    pad_scales,
)
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch
from llm_quant_rocm.kernels.quick_reduce import SLOTS, Mailbox, await_flags, begin_call, end_call, inbox, set_flags

# 64 values a lane of 16 waves of 32 lanes; a row is held more than once.
MAX_COLUMNS = 32768


@dataclass(frozen=True)
class Config:
    """How rows are shared out.

    Attributes:
        threads: of a program, which takes one row at a time, 8 values of a block each.
        programs: about as many as the GPU runs at once; the same for all ranks.
    """

    threads: int
    programs: int

    def block(self, columns: int) -> int:
        """Values of a block of a row of `columns`."""
        return min(self.threads * 8, max(triton.next_power_of_2(columns), BLOCK))


def default_config(columns: int, hardware: Hardware) -> Config:
    """A program for each compute unit of the largest GPU of its kind; not measured."""
    threads = 128 if columns <= 1024 else 256 if columns <= 4096 else 512
    return Config(threads, {"gfx90a": 104, "gfx942": 304, "gfx950": 256}.get(hardware.arch, 132))


def piece_bytes(columns: int, codec: Codec) -> int:
    """Bytes of a row on the wire, those that are not sent included."""
    return _groups(columns) * codec.group_bytes


def max_rows(mailbox: Mailbox, shots: int) -> int:
    """The most rows that one call can carry."""
    return mailbox.max_tiles * (mailbox.world if shots == 2 else 1)


def programs_of(tiles: int, columns: int, codec: Codec, mailbox: Mailbox, config: Config) -> int:
    """Programs that share `tiles`.

    Raises:
        ValueError: the inboxes do not hold the slots of one program.
    """
    slots = mailbox.phase_bytes // (mailbox.world * piece_bytes(columns, codec))
    # A program of a single tile takes a single slot.
    programs = min(tiles, config.programs, slots if tiles <= min(slots, config.programs) else slots // SLOTS.value)
    if not programs:
        raise ValueError(
            f"inboxes of {mailbox.phase_bytes} bytes do not hold {SLOTS.value} rows of {columns} columns in "
            f"{codec.name} from each of {mailbox.world} ranks: enlarge them"
        )
    return programs


def one_shot(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target, out: Result, mailbox: Mailbox,
    codec: Codec, config: Config, max_spins: int,
) -> None:  # fmt: skip
    """Writes `out`, the results of x summed over the ranks. All ranks call with as many rows.

    Args:
        x, residual: bf16 or fp16 [M, K], at most `max_rows`, the last dimension contiguous; K a multiple of 16,
            at most MAX_COLUMNS.
        out: `target.empty(x)`.
        max_spins: looks at a flag until its rank counts as lost.
    """
    tiles = x.shape[0]
    _reduce(reduce_norm_one_shot_kernel, tiles, x, residual, norm, target, out, mailbox, codec, config, max_spins)


def two_shot(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target, out: Result, mailbox: Mailbox,
    codec: Codec, config: Config, max_spins: int,
) -> None:  # fmt: skip
    """`one_shot`, where every row is added up by one rank."""
    tiles = triton.cdiv(x.shape[0], mailbox.world)
    _reduce(reduce_norm_two_shot_kernel, tiles, x, residual, norm, target, out, mailbox, codec, config, max_spins)


def norm_quant(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target, out: Result) -> None:
    """`one_shot` of one rank alone, on any number of rows."""
    _launch(norm_quant_kernel, x.shape[0], default_config(x.shape[1], detect(x.device)), x, residual, norm, target, out)


def _groups(columns: int) -> int:
    """Groups of a row's buffer."""
    return triton.cdiv(columns, BLOCK) * (BLOCK // GROUP)


def _reduce(
    kernel: Any, tiles: int, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target, out: Result,
    mailbox: Mailbox, codec: Codec, config: Config, max_spins: int,
) -> None:  # fmt: skip
    columns = x.shape[1]
    _launch(
        kernel, programs_of(tiles, columns, codec, mailbox, config) if tiles else 0, config, x, residual, norm, target,
        out, peers_ptr=mailbox.peers, state_ptr=mailbox.state, report_ptr=mailbox.report, rank=mailbox.rank,
        phase_bytes=mailbox.phase_bytes, max_tiles=mailbox.max_tiles, max_spins=max_spins, MAX=torch.finfo(x.dtype).max,
        PIECE_BYTES=piece_bytes(columns, codec), ROW_GROUPS=_groups(columns), WORLD=mailbox.world,
        **wire.constants(codec, x.dtype),
    )  # fmt: skip


def _launch(
    kernel: Any, programs: int, config: Config, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm,
    target: Target, out: Result, **reduction: Any,
) -> None:  # fmt: skip
    rows, columns = x.shape
    if not rows:
        return
    hardware = detect(x.device)
    padded = out.scales.shape[0] - rows if out.scales is not None else 0
    added = x if residual is None else residual
    # What is absent is not touched; x stands in for it.
    normed, codes, scales, given = (x if t is None else t for t in (*out[1:], norm.scale))
    kernel[(programs + padded,)](
        x, added, norm.weight, out.residual, normed, codes, scales, given,
        rows, programs, x.stride(0), added.stride(0), norm.eps,
        HAS_RESIDUAL=residual is not None, WEIGHT_BIAS=norm.weight_bias, NORMED=target.normed,
        QUANTIZATION=QUANTIZATIONS[target.quantization], LAYOUT=LAYOUTS[target.layout], FP8_MAX=target.fmt.max,
        MIN_SCALE=target.fmt.min_scale, COLUMNS=columns, BLOCK=config.block(columns), PDL=hardware.pdl,
        num_warps=config.threads // hardware.lanes, enable_fp_fusion=False, **reduction, **pdl_option(hardware),
    )  # fmt: skip


_RUNTIME = ["rows", "programs", "rank", "phase_bytes", "max_tiles", "max_spins"]


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_norm_one_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr,
    rows, programs, x_stride, residual_stride, eps,
    peers_ptr, state_ptr, report_ptr, rank, phase_bytes, max_tiles, max_spins,
    HAS_RESIDUAL: tl.constexpr, WEIGHT_BIAS: tl.constexpr, NORMED: tl.constexpr, QUANTIZATION: tl.constexpr,
    LAYOUT: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, T: tl.constexpr, MAX: tl.constexpr, PIECE_BYTES: tl.constexpr, ROW_GROUPS: tl.constexpr,
    WORLD: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    program = tl.program_id(0)
    call, patience = begin_call(state_ptr, max_spins)
    mine = tl.load(peers_ptr + rank)
    if program < programs:
        for tile in range(program, rows + programs, programs):
            if (tile < rows) & (patience >= 0):
                slot = inbox(call, 0, slot_of(tile, programs), rank, phase_bytes, PIECE_BYTES, WORLD)
                x_row = x_ptr + tl.cast(tile, tl.int64) * x_stride
                for i in tl.static_range((COLUMNS + BLOCK - 1) // BLOCK):
                    parts = wire.encode(load_tile(x_row, i, COLUMNS, BLOCK), KIND, LIMIT, CAP, LOW, HIGH)
                    for peer in tl.static_range(WORLD):
                        to = tl.load(peers_ptr + peer) + slot
                        store_groups(to, parts, i, LOW, HIGH, COLUMNS, BLOCK, ROW_GROUPS)
                set_flags(peers_ptr, 0, tile, rank, call, patience, phase_bytes, max_tiles, WORLD)

            received = tile - programs
            if received >= 0:
                row = tl.cast(received, tl.int64)
                # Loads that wait for nobody are under way while the flags are.
                weight = load_row(weight_ptr, COLUMNS, BLOCK, "evict_last")
                added = load_residual(residual_ptr + row * residual_stride, HAS_RESIDUAL, COLUMNS, BLOCK)
                patience = await_flags(
                    mine, state_ptr, report_ptr, 0, received, call, patience, phase_bytes, max_tiles, WORLD
                )
                slots = mine + inbox(call, 0, slot_of(received, programs), 0, phase_bytes, PIECE_BYTES, WORLD)
                sums = tl.tuple([])
                for i in tl.static_range((COLUMNS + BLOCK - 1) // BLOCK):
                    total = add_rows(
                        slots, i, KIND, LIMIT, LOW, HIGH, T, MAX, COLUMNS, BLOCK, PIECE_BYTES, ROW_GROUPS, WORLD
                    )
                    sums += (tl.reshape(total, (BLOCK,)),)
                finish_row(
                    row, sums, added, weight, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr, eps,
                    HAS_RESIDUAL, WEIGHT_BIAS, NORMED, QUANTIZATION, LAYOUT, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK
                )  # fmt: skip
    elif LAYOUT != LINEAR:
        pad_scales(scales_ptr, tl.cast(rows + program - programs, tl.int64), LAYOUT, COLUMNS, BLOCK)
    end_call(state_ptr, call)


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_norm_two_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr,
    rows, programs, x_stride, residual_stride, eps,
    peers_ptr, state_ptr, report_ptr, rank, phase_bytes, max_tiles, max_spins,
    HAS_RESIDUAL: tl.constexpr, WEIGHT_BIAS: tl.constexpr, NORMED: tl.constexpr, QUANTIZATION: tl.constexpr,
    LAYOUT: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, T: tl.constexpr, MAX: tl.constexpr, PIECE_BYTES: tl.constexpr, ROW_GROUPS: tl.constexpr,
    WORLD: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    call, patience = begin_call(state_ptr, max_spins)
    mine = tl.load(peers_ptr + rank)
    tiles = tl.cdiv(rows, WORLD)
    if program < programs:
        for tile in range(program, tiles + 2 * programs, programs):
            if (tile < tiles) & (patience >= 0):
                slot = inbox(call, 0, slot_of(tile, programs), rank, phase_bytes, PIECE_BYTES, WORLD)
                for owner in range(WORLD):
                    row = tl.cast(tile * WORLD + owner, tl.int64)
                    if row < rows:
                        to = tl.load(peers_ptr + owner) + slot
                        for i in tl.static_range(BLOCKS):
                            x = load_tile(x_ptr + row * x_stride, i, COLUMNS, BLOCK)
                            parts = wire.encode(x, KIND, LIMIT, CAP, LOW, HIGH)
                            store_groups(to, parts, i, LOW, HIGH, COLUMNS, BLOCK, ROW_GROUPS)
                set_flags(peers_ptr, 0, tile, rank, call, patience, phase_bytes, max_tiles, WORLD)

            owned = tile - programs
            if (owned >= 0) & (owned < tiles):
                patience = await_flags(
                    mine, state_ptr, report_ptr, 0, owned, call, patience, phase_bytes, max_tiles, WORLD
                )
                if (owned * WORLD + rank < rows) & (patience >= 0):
                    slots = mine + inbox(call, 0, slot_of(owned, programs), 0, phase_bytes, PIECE_BYTES, WORLD)
                    slot = inbox(call, 1, slot_of(owned, programs), rank, phase_bytes, PIECE_BYTES, WORLD)
                    for i in tl.static_range(BLOCKS):
                        total = add_rows(
                            slots, i, KIND, LIMIT, LOW, HIGH, T, MAX, COLUMNS, BLOCK, PIECE_BYTES, ROW_GROUPS, WORLD
                        )
                        parts = wire.encode(total, KIND, LIMIT, CAP, LOW, HIGH)
                        for peer in tl.static_range(WORLD):
                            to = tl.load(peers_ptr + peer) + slot
                            store_groups(to, parts, i, LOW, HIGH, COLUMNS, BLOCK, ROW_GROUPS)
                set_flags(peers_ptr, 1, owned, rank, call, patience, phase_bytes, max_tiles, WORLD)

            received = tile - 2 * programs
            if received >= 0:
                patience = await_flags(
                    mine, state_ptr, report_ptr, 1, received, call, patience, phase_bytes, max_tiles, WORLD
                )
                slots = mine + inbox(call, 1, slot_of(received, programs), 0, phase_bytes, PIECE_BYTES, WORLD)
                for owner in range(WORLD):
                    row = tl.cast(received * WORLD + owner, tl.int64)
                    if row < rows:
                        added = load_residual(residual_ptr + row * residual_stride, HAS_RESIDUAL, COLUMNS, BLOCK)
                        sums = tl.tuple([])
                        for i in tl.static_range(BLOCKS):
                            parts = load_groups(
                                slots + owner * PIECE_BYTES, 0, i, T, LOW, HIGH, COLUMNS, BLOCK, ROW_GROUPS
                            )
                            value, _ = wire.decode(parts, KIND, LIMIT, LOW, HIGH)
                            if KIND == wire.INT:
                                value += 0.0  # no -0
                            sums += (tl.reshape(value.to(T), (BLOCK,)),)
                        weight = load_row(weight_ptr, COLUMNS, BLOCK, "evict_last")
                        finish_row(
                            row, sums, added, weight, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr, eps,
                            HAS_RESIDUAL, WEIGHT_BIAS, NORMED, QUANTIZATION, LAYOUT, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK
                        )  # fmt: skip
    elif LAYOUT != LINEAR:
        pad_scales(scales_ptr, tl.cast(rows + program - programs, tl.int64), LAYOUT, COLUMNS, BLOCK)
    end_call(state_ptr, call)


@triton.jit(do_not_specialize=["rows", "programs"])
def norm_quant_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr,
    rows, programs, x_stride, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, WEIGHT_BIAS: tl.constexpr, NORMED: tl.constexpr, QUANTIZATION: tl.constexpr,
    LAYOUT: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    row = tl.program_id(0).to(tl.int64)
    if row < rows:
        sums = load_row(x_ptr + row * x_stride, COLUMNS, BLOCK, "evict_first")
        added = load_residual(residual_ptr + row * residual_stride, HAS_RESIDUAL, COLUMNS, BLOCK)
        weight = load_row(weight_ptr, COLUMNS, BLOCK, "evict_last")
        finish_row(
            row, sums, added, weight, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr, eps,
            HAS_RESIDUAL, WEIGHT_BIAS, NORMED, QUANTIZATION, LAYOUT, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK
        )  # fmt: skip
    elif LAYOUT != LINEAR:
        pad_scales(scales_ptr, row, LAYOUT, COLUMNS, BLOCK)


@triton.jit
def slot_of(tile, programs):
    """Where in the ring of its program the pieces of a tile lie."""
    return tl.cast(tile, tl.int32) % (SLOTS * programs)


@triton.jit
def load_tile(row_ptr, i: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Block i of a row in groups, [BLOCK / 32, 32], zeros beyond the row."""
    place = i * BLOCK + tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if (i + 1) * BLOCK <= COLUMNS:
        return tl.load(row_ptr + place)
    else:
        return tl.load(row_ptr + place, mask=place < COLUMNS, other=0.0)


@triton.jit
def add_rows(
    slots, i: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    T: tl.constexpr, MAX: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PIECE_BYTES: tl.constexpr,
    ROW_GROUPS: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """Block i of the sum, T [BLOCK / 32, 32], of a row of all ranks in their order; finite where all of them are."""
    total = tl.zeros([BLOCK // 32, 32], tl.float32)
    finite = tl.full([BLOCK // 32, 32 if KIND == wire.FP else 1], True, tl.int1)
    for source in tl.static_range(WORLD):
        parts = load_groups(slots, source * PIECE_BYTES, i, T, LOW, HIGH, COLUMNS, BLOCK, ROW_GROUPS)
        value, extent = wire.decode(parts, KIND, LIMIT, LOW, HIGH)
        total += value
        finite = finite & (tl.abs(extent) < float("inf"))
    total = tl.where(finite & (total > MAX), MAX, total)
    return tl.where(finite & (total < -MAX), -MAX, total).to(T)


@triton.jit
def store_groups(
    piece, parts, i: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_GROUPS: tl.constexpr
):  # fmt: skip
    """Stores block i of an encoded row into its buffer of ROW_GROUPS groups at `piece`; nothing beyond the columns."""
    if LOW == 0:
        _store_part(piece, 0, parts[0], i, 32, COLUMNS, BLOCK)
    else:
        _store_part(piece, 0, parts[0], i, LOW, COLUMNS, BLOCK)
        if HIGH != 0:
            _store_part(piece, ROW_GROUPS * 4 * LOW, parts[1], i, HIGH, COLUMNS, BLOCK)
        scales = tl.expand_dims(parts[len(parts) - 1], 1)
        _store_part(piece, ROW_GROUPS * 4 * (LOW + HIGH), scales, i, 1, COLUMNS, BLOCK)


@triton.jit
def load_groups(
    piece, START: tl.constexpr, i: tl.constexpr, T: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROW_GROUPS: tl.constexpr
):  # fmt: skip
    """The parts that `store_groups` stored START bytes behind `piece`; those of groups beyond the columns decode to
    zeros."""
    if LOW == 0:
        return (_load_part(piece, START, T, i, 32, COLUMNS, BLOCK),)
    else:
        low = _load_part(piece, START, tl.int32, i, LOW, COLUMNS, BLOCK)
        scales = _load_part(piece, START + ROW_GROUPS * 4 * (LOW + HIGH), T, i, 1, COLUMNS, BLOCK)
        scale = tl.reshape(scales, (BLOCK // 32,))
        if HIGH == 0:
            return low, scale
        else:
            return low, _load_part(piece, START + ROW_GROUPS * 4 * LOW, tl.int32, i, HIGH, COLUMNS, BLOCK), scale


@triton.jit
def _store_part(
    piece, START: tl.constexpr, part, i: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    pointers = _pointers(piece, START, part.dtype, i, WIDTH, BLOCK)
    if (i + 1) * BLOCK <= COLUMNS:
        tl.store(pointers, part)
    else:
        group = i * (BLOCK // 32) + tl.arange(0, BLOCK // 32)[:, None]
        tl.store(pointers, part, mask=group * 32 < COLUMNS)


@triton.jit
def _load_part(
    piece, START: tl.constexpr, T: tl.constexpr, i: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    pointers = _pointers(piece, START, T, i, WIDTH, BLOCK)
    if (i + 1) * BLOCK <= COLUMNS:
        return tl.load(pointers)
    else:
        group = i * (BLOCK // 32) + tl.arange(0, BLOCK // 32)[:, None]
        return tl.load(pointers, mask=group * 32 < COLUMNS, other=0)


@triton.jit
def _pointers(
    piece, START: tl.constexpr, T: tl.constexpr, i: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pointers [BLOCK / 32, WIDTH] to block i of a part that begins START bytes behind the address `piece`.

    START is added to the pointer: Triton would forget the alignment of an address to which a constant is added.
    """
    GROUPS: tl.constexpr = BLOCK // 32
    first: tl.constexpr = START // (T.primitive_bitwidth // 8) + i * GROUPS * WIDTH
    return wire.part_pointers(piece, T, GROUPS, WIDTH) + first
