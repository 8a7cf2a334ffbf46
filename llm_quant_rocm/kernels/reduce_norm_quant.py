# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual, RMSNorm and quantization in one kernel between GPUs that reach each other's memory.

The bits of `reference.reduce_norm_quant`. Tiles, memory, slots, calls and order are those of `kernels.quick_reduce`,
whose region and state they may share with its all-reduces; but pieces are whole rows, so that whoever holds a sum holds
all that its norm needs, and a program ends a row in registers. docs/fusion.md says why sums travel, and not codes.

    one-shot   every rank sends a row to everybody, who adds, normalises and quantizes it for itself
    two-shot   every rank sends a row to its owner, who adds it up and sends the sum, encoded again, to all, who
               normalise and quantize it

Few exact rows travel without flags, as `kernels.lamport` says. What follows is of all others.

A tile is a row. Of a program's rows every rank owns each WORLD-th, so that no program has more to add than others; and
a row of the two-shot has room in the first phase at its owner alone, in the second for a single sum. Few rows are as
many programs in either.

That slots, which the tiles of a program take in turn, are safe to use again is seen as for `kernels.quick_reduce`: who
sends a row has received the one three turns earlier, which its owner sent after it read what came of it; and who sends
a sum has seen all ranks' flags of the row, set after they received that one. So are calls: everybody awaits the sum of
row 0, whose owner has awaited everybody.

A row travels as a whole buffer of `formats.wire`, zeros beyond its columns; groups of zeros alone are not sent.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.norm_quant import Norm, Result, Target
from llm_quant_rocm.formats.wire import BLOCK, GROUP, Codec
from llm_quant_rocm.hardware import Hardware, detect, units_of
from llm_quant_rocm.kernels import lamport, wire_units
from llm_quant_rocm.kernels.launch import launch
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
from llm_quant_rocm.kernels.quick_reduce import (
    SLOTS,
    Mailbox,
    add_loaded,
    add_pieces,
    address,
    addresses,
    await_flags,
    begin_call,
    end_call,
    flags,
    inbox,
    look,
    report_lost,
    set_flags,
)
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2

# 64 values a lane of 16 waves of 32 lanes; a row is held more than once.
MAX_COLUMNS = 32768
# That a lane holds while it awaits others, of the 128 registers that it has on Hopper.
_MOST_WORDS = 64


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
        return self._values(columns, 8)

    def chunk(self, columns: int, codec: Codec) -> int:
        """Values of a row that are encoded at once, a unit of `kernels.wire_units` by each lane."""
        return self._values(columns, wire_units.unit_values_of(codec))

    def _values(self, columns: int, of_a_lane: int) -> int:
        return min(self.threads * of_a_lane, max(next_power_of_2(columns), BLOCK))


def default_config(rows: int, columns: int, codec: Codec, hardware: Hardware) -> Config:
    """What should serve `rows` best; measured on two H200s alone.

    As long as there is a compute unit for each row, more threads end a row sooner. More rows share units, so that some
    wait for links while others compute: on Hopper 2 programs of 256 threads fit, with up to 128 registers a lane, and 4
    where a row is half as long, for as many bytes on the way. Where rows are encoded, lanes without a group to encode
    would make others' words cross lanes.
    """
    units = units_of(hardware.arch)
    most = 512 if rows <= units else 256
    units_of_row = next_power_of_2(columns) // wire_units.unit_values_of(codec)
    threads = min(most, max(128, units_of_row))
    return Config(threads, units * (1 if rows <= units else 4 if columns <= 4096 else 2))


def piece_bytes(columns: int, codec: Codec) -> int:
    """Bytes of a row on the wire, those that are not sent included."""
    return _groups(columns) * codec.group_bytes


@dataclass(frozen=True)
class Cut:
    """How rows are shared out: `programs`, and slots of a program, its `ring`, which its rows take in turn."""

    programs: int
    ring: int


def cut(rows: int, columns: int, codec: Codec, mailbox: Mailbox, config: Config, shots: int) -> Cut:
    """How at least one row is shared out.

    Raises:
        ValueError: the inboxes do not hold the slots of one program.
    """
    world, pieces = mailbox.world, mailbox.phase_bytes // piece_bytes(columns, codec)
    slots = pieces // world if shots == 1 else pieces - pieces % world
    if rows <= min(config.programs, slots):
        return Cut(rows, 1)
    # In the two-shot a rank's rows have neighbouring slots if rings are whole rounds of owners.
    ring = SLOTS.value if shots == 1 else cdiv(SLOTS.value, world) * world
    programs = min(config.programs, slots // ring)
    if not programs:
        raise ValueError(
            f"inboxes of {mailbox.phase_bytes} bytes do not hold {ring} rows of {columns} columns in {codec.name} from "
            f"each of {world} ranks: enlarge them"
        )
    return Cut(programs, ring)


def without_flags(rows: int, columns: int, codec: Codec, world: int, lamport_bytes: int, config: Config) -> bool:
    """Whether rows travel by `kernels.lamport`: they are exact and few, one for each program.

    Each lane has words of its own, as of two that look at the same one, one may see it and the other not yet; and it
    has registers for all ranks' words of a row.
    """
    few = rows <= config.programs and rows * columns * 2 <= lamport_bytes
    block = config.block(columns)
    held = world * cdiv(columns, block) * 4
    return few and not codec.quantizes and block == 8 * config.threads and held <= _MOST_WORDS


def one_shot(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target, out: Result, mailbox: Mailbox,
    codec: Codec, config: Config, max_spins: int,
) -> None:  # fmt: skip
    """Writes `out`, the results of x summed over the ranks. All ranks call with as many rows.

    Args:
        x, residual: bf16 or fp16 [M, K], M at most the mailbox's tiles, the last dimension contiguous; K a multiple of
            16, at most MAX_COLUMNS. Rows of x begin at multiples of 16 bytes.
        out: `target.empty(x)`.
        max_spins: looks at a flag, or at words that come without one, until its rank counts as lost.

    Raises:
        ValueError: the inboxes are too small (`cut`).
    """
    _reduce(1, x, residual, norm, target, out, mailbox, codec, config, max_spins)


def two_shot(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target, out: Result, mailbox: Mailbox,
    codec: Codec, config: Config, max_spins: int,
) -> None:  # fmt: skip
    """`one_shot`, where every row is added up by one rank."""
    _reduce(2, x, residual, norm, target, out, mailbox, codec, config, max_spins)


def norm_quant(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target, out: Result) -> None:
    """`one_shot` of one rank alone, on any number of rows."""
    rows, columns = x.shape
    # A program for each row, whatever the configuration says, which constants are kept by.
    config = Config(128 if columns <= 1024 else 256 if columns <= 4096 else 512, programs=0)
    _launch(norm_quant_kernel, rows, config, x, residual, norm, target, out)


def _groups(columns: int) -> int:
    """Groups of a row's buffer."""
    return cdiv(columns, BLOCK) * (BLOCK // GROUP)


def _reduce(
    shots: int, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target, out: Result,
    mailbox: Mailbox, codec: Codec, config: Config, max_spins: int,
) -> None:  # fmt: skip
    rows, columns = x.shape
    if not rows:
        return
    call = (config, x, residual, norm, target, out)
    state = (mailbox.peers, mailbox.state, mailbox.report, mailbox.rank)
    if without_flags(rows, columns, codec, mailbox.world, mailbox.lamport_bytes, config):
        _launch(
            reduce_norm_lamport_kernel, rows, *call, *state, max_spins, mailbox.lamport_at,
            LAMPORT_BYTES=mailbox.lamport_bytes, SHOTS=shots, **_constants_of_sums(x.dtype, mailbox.world),
        )  # fmt: skip
        return
    kernel = reduce_norm_one_shot_kernel if shots == 1 else reduce_norm_two_shot_kernel
    shared = cut(rows, columns, codec, mailbox, config, shots)
    _launch(
        kernel, shared.programs, *call, shared.ring, piece_bytes(columns, codec), *state, mailbox.phase_bytes,
        mailbox.max_tiles, max_spins, **_constants_on_the_wire(columns, x.dtype, codec, config, mailbox.world),
    )  # fmt: skip


def _launch(
    kernel: Any, programs: int, config: Config, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm,
    target: Target, out: Result, *reduction: Any, **constants: Any,
) -> None:  # fmt: skip
    rows, columns = x.shape
    if not rows:
        return
    padded = out.scales.shape[0] - rows if out.scales is not None else 0
    added = x if residual is None else residual
    # What is absent is not touched; x stands in for it.
    normed, codes, scales, given = (x if t is None else t for t in (*out[1:], norm.scale))
    launch(
        kernel, (programs + padded,),
        x, added, norm.weight, out.residual, normed, codes, scales, given,
        rows, programs, x.stride(0), added.stride(0), norm.eps, *reduction, **constants,
        **_constants(columns, residual is not None, norm.weight_bias, target, config, detect(x.device)),
    )  # fmt: skip


@cache
def _constants(
    columns: int, has_residual: bool, weight_bias: float, target: Target, config: Config, hardware: Hardware
) -> dict[str, Any]:
    """What every kernel is compiled for."""
    return {
        "HAS_RESIDUAL": has_residual,
        "WEIGHT_BIAS": weight_bias,
        "NORMED": target.normed,
        "QUANTIZATION": QUANTIZATIONS[target.quantization],
        "LAYOUT": LAYOUTS[target.layout],
        "FP8_MAX": target.fmt.max,
        "MIN_SCALE": target.fmt.min_scale,
        "COLUMNS": columns,
        "BLOCK": config.block(columns),
        "PDL": hardware.pdl,
        "num_warps": config.threads // hardware.lanes,
        "enable_fp_fusion": False,
        **pdl_option(hardware),
    }


@cache
def _constants_of_sums(dtype: torch.dtype, world: int) -> dict[str, Any]:
    """What kernels that reduce are compiled for besides."""
    return {"T": wire_units.TYPES[dtype], "MAX": torch.finfo(dtype).max, "WORLD": world}


@cache
def _constants_on_the_wire(
    columns: int, dtype: torch.dtype, codec: Codec, config: Config, world: int
) -> dict[str, Any]:
    """What those of them that encode are compiled for."""
    return {
        **_constants_of_sums(dtype, world),
        **wire_units.constants(codec, dtype),
        "ROW_GROUPS": _groups(columns),
        "CHUNK": config.chunk(columns, codec),
    }


_RUNTIME = ["rows", "programs", "ring", "piece_bytes", "rank", "phase_bytes", "max_tiles", "max_spins", "lamport_at"]


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_norm_one_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr,
    rows, programs, x_stride, residual_stride, eps,
    ring, piece_bytes, peers_ptr, state_ptr, report_ptr, rank, phase_bytes, max_tiles, max_spins,
    HAS_RESIDUAL: tl.constexpr, WEIGHT_BIAS: tl.constexpr, NORMED: tl.constexpr, QUANTIZATION: tl.constexpr,
    LAYOUT: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, T: tl.constexpr, MAX: tl.constexpr, ROW_GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    program = tl.program_id(0)
    call, patience = begin_call(state_ptr, max_spins)
    mine = address(peers_ptr, rank)
    if program < programs:
        turns = tl.cdiv(rows - program, programs)
        for turn in range(turns + 1):
            if (turn < turns) & (patience >= 0):
                tile = turn * programs + program
                # All of a row and of the addresses is asked for before the first store, which loads do not pass.
                x = load_chunks(x_ptr + tl.cast(tile, tl.int64) * x_stride, COLUMNS, CHUNK, LOW)
                to = addresses(peers_ptr, rank, WORLD)
                at = inbox(call, 0, slot_of(turn, program, ring), rank, phase_bytes, piece_bytes, WORLD)
                send(to, at, x, KIND, LIMIT, CAP, LOW, HIGH, T, COLUMNS, CHUNK, ROW_GROUPS)
                set_flags(to, peers_ptr, 0, tile, rank, call, patience, phase_bytes, max_tiles, WORLD)

            if turn >= 1:
                received = (turn - 1) * programs + program
                row = tl.cast(received, tl.int64)
                # Loads that wait for nobody are under way while the flags are.
                weight = load_row(weight_ptr, COLUMNS, BLOCK, "evict_last")
                added = load_residual(residual_ptr + row * residual_stride, HAS_RESIDUAL, COLUMNS, BLOCK)
                patience = await_flags(
                    mine, state_ptr, report_ptr, 0, received, call, patience, phase_bytes, max_tiles, WORLD, True
                )
                pieces = mine + inbox(call, 0, slot_of(turn - 1, program, ring), 0, phase_bytes, piece_bytes, WORLD)
                sums = add_row(
                    pieces, piece_bytes, True, KIND, LIMIT, LOW, HIGH, T, MAX, COLUMNS, BLOCK, ROW_GROUPS, WORLD
                )
                finish_row(
                    row, sums, added, weight, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr, eps,
                    HAS_RESIDUAL, WEIGHT_BIAS, NORMED, QUANTIZATION, LAYOUT, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK
                )  # fmt: skip
    elif LAYOUT != LINEAR:
        pad_scales(scales_ptr, tl.cast(rows + program - programs, tl.int64), LAYOUT, COLUMNS, BLOCK)
    end_call(state_ptr, call)


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_norm_lamport_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr,
    rows, programs, x_stride, residual_stride, eps,
    peers_ptr, state_ptr, report_ptr, rank, max_spins, lamport_at,
    HAS_RESIDUAL: tl.constexpr, WEIGHT_BIAS: tl.constexpr, NORMED: tl.constexpr, QUANTIZATION: tl.constexpr,
    LAYOUT: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, T: tl.constexpr, MAX: tl.constexpr, LAMPORT_BYTES: tl.constexpr, WORLD: tl.constexpr,
    SHOTS: tl.constexpr
):  # fmt: skip
    """Either shot of few exact rows, one for each program."""
    if PDL:
        programmatic_launch()
    row = tl.program_id(0).to(tl.int64)
    if row < rows:
        owner = tl.program_id(0) % WORLD
        # Asked for before the state, which AMD's GPUs wait for at once.
        x = load_chunks(x_ptr + row * x_stride, COLUMNS, BLOCK, 0)
        call, patience = begin_call(state_ptr, max_spins)
        mine = address(peers_ptr, rank)
        to = addresses(peers_ptr, rank, WORLD) if SHOTS == 1 else (address(peers_ptr, owner),)
        words = ()
        for i in tl.static_range(len(x)):
            words = words + (lamport.not_zero(x[i][0]),)
        pieces = lamport.place(call, 0, row, lamport_at, LAMPORT_BYTES, WORLD, COLUMNS)
        lamport.send(to, pieces + rank * LAMPORT_BYTES, words, patience >= 0, COLUMNS, BLOCK)
        weight = load_row(weight_ptr, COLUMNS, BLOCK, "evict_last")
        added = load_residual(residual_ptr + row * residual_stride, HAS_RESIDUAL, COLUMNS, BLOCK)
        # All waves know the call, as they have sent by its parity. It is counted while words are on their way.
        tl.debug_barrier()
        end_call(state_ptr, call)
        if SHOTS == 1:
            sums, _ = await_pieces(
                mine + pieces, state_ptr, report_ptr, call, patience, T, MAX, COLUMNS, BLOCK, LAMPORT_BYTES, WORLD
            )  # fmt: skip
        else:
            if owner == rank:
                sums, complete = await_pieces(
                    mine + pieces, state_ptr, report_ptr, call, patience, T, MAX, COLUMNS, BLOCK, LAMPORT_BYTES, WORLD
                )  # fmt: skip
                others = addresses(peers_ptr, rank, WORLD)[: WORLD - 1]
                lamport.send(others, pieces + rank * LAMPORT_BYTES, inverted(sums), complete, COLUMNS, BLOCK)
            else:
                first = mine + pieces + owner * LAMPORT_BYTES
                received, absent = lamport.receive(first, patience, COLUMNS, BLOCK, LAMPORT_BYTES, 1, -1)
                if absent == 0:
                    report_owner(
                        address(peers_ptr, owner) + pieces, owner, rank, state_ptr, report_ptr, call, patience,
                        COLUMNS, BLOCK, LAMPORT_BYTES, WORLD
                    )  # fmt: skip
                lamport.clear(first, absent == 1, COLUMNS, BLOCK, LAMPORT_BYTES, 1)
                sums = inverted(received)
        blocks = tl.tuple([])
        for i in tl.static_range(len(sums)):
            blocks += (block_of(sums[i], T),)
        finish_row(
            row, blocks, added, weight, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr, eps,
            HAS_RESIDUAL, WEIGHT_BIAS, NORMED, QUANTIZATION, LAYOUT, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK
        )  # fmt: skip
    else:
        if LAYOUT != LINEAR:
            pad_scales(scales_ptr, row, LAYOUT, COLUMNS, BLOCK)
        call, patience = begin_call(state_ptr, max_spins)
        end_call(state_ptr, call)


@triton.jit
def await_pieces(
    first, state_ptr, report_ptr, call, patience, T: tl.constexpr, MAX: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, LAMPORT_BYTES: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """Blocks of the words of a row's sum over the ranks, rank 0's at the address `first`, and whether all came."""
    received, absent = lamport.receive(first, patience, COLUMNS, BLOCK, LAMPORT_BYTES, WORLD)
    if absent < WORLD:
        report_lost(state_ptr, report_ptr, 0, absent, call, patience)
    lamport.clear(first, absent == WORLD, COLUMNS, BLOCK, LAMPORT_BYTES, WORLD)
    sums = ()
    for i in tl.static_range((COLUMNS + BLOCK - 1) // BLOCK):
        pieces = ()
        for source in tl.static_range(WORLD):
            pieces = pieces + ((received[i * WORLD + source], (), ()),)
        (words,) = add_loaded(pieces, True, wire_units.FP, 0, 0, 0, T, MAX, WORLD)
        # Two NaNs of all bits would not be there once they are inverted, as sums travel; these are two NaNs as well.
        sums = sums + (tl.where(words == -1, -65537, words),)
    return sums, absent == WORLD


@triton.jit
def inverted(blocks):
    """Blocks of words with all bits inverted."""
    found = ()
    for i in tl.static_range(len(blocks)):
        found = found + (~blocks[i],)
    return found


@triton.jit
def report_owner(
    pieces, owner, rank, state_ptr, report_ptr, call, patience, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    LAMPORT_BYTES: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """A sum did not come: says whom its owner waits for, which leaves what has come at the address `pieces`, or, if it
    has read this rank's words or has all, that it is lost itself."""
    _, missing = lamport.look(pieces, COLUMNS, BLOCK, LAMPORT_BYTES, WORLD)
    _, unread = lamport.look(pieces + rank * LAMPORT_BYTES, COLUMNS, BLOCK, LAMPORT_BYTES, 1)
    if (missing < WORLD) & (unread == 1):
        report_lost(state_ptr, report_ptr, 0, missing, call, patience)
    else:
        report_lost(state_ptr, report_ptr, 1, owner, call, patience)


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_norm_two_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr,
    rows, programs, x_stride, residual_stride, eps,
    ring, piece_bytes, peers_ptr, state_ptr, report_ptr, rank, phase_bytes, max_tiles, max_spins,
    HAS_RESIDUAL: tl.constexpr, WEIGHT_BIAS: tl.constexpr, NORMED: tl.constexpr, QUANTIZATION: tl.constexpr,
    LAYOUT: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, T: tl.constexpr, MAX: tl.constexpr, ROW_GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    if PDL:
        programmatic_launch()
    program = tl.program_id(0)
    call, patience = begin_call(state_ptr, max_spins)
    mine = address(peers_ptr, rank)
    if program < programs:
        turns = tl.cdiv(rows - program, programs)
        for turn in range(turns + 2):
            if (turn < turns) & (patience >= 0):
                tile = turn * programs + program
                owner = (turn + program) % WORLD
                x = load_chunks(x_ptr + tl.cast(tile, tl.int64) * x_stride, COLUMNS, CHUNK, LOW)
                to = (address(peers_ptr, owner),)
                at = inbox(call, 0, slot_of(turn, program, ring) // WORLD, rank, phase_bytes, piece_bytes, WORLD)
                send(to, at, x, KIND, LIMIT, CAP, LOW, HIGH, T, COLUMNS, CHUNK, ROW_GROUPS)
                set_flags(to, peers_ptr, 0, tile, rank, call, patience, phase_bytes, max_tiles, WORLD, owner)

            if (turn >= 1) & (turn <= turns) & ((turn - 1 + program) % WORLD == rank):
                owned = (turn - 1) * programs + program
                patience = await_flags(
                    mine, state_ptr, report_ptr, 0, owned, call, patience, phase_bytes, max_tiles, WORLD, True
                )
                if patience >= 0:
                    slot = slot_of(turn - 1, program, ring)
                    pieces = mine + inbox(call, 0, slot // WORLD, 0, phase_bytes, piece_bytes, WORLD)
                    to = addresses(peers_ptr, rank, WORLD)
                    sums = add_row(
                        pieces, piece_bytes, False, KIND, LIMIT, LOW, HIGH, T, MAX, COLUMNS, CHUNK, ROW_GROUPS, WORLD
                    )
                    at = inbox(call, 1, slot, 0, phase_bytes, piece_bytes, 1)
                    send(to, at, sums, KIND, LIMIT, CAP, LOW, HIGH, T, COLUMNS, CHUNK, ROW_GROUPS)
                    set_flags(to, peers_ptr, 1, owned, rank, call, patience, phase_bytes, max_tiles, WORLD)

            if turn >= 2:
                received = (turn - 2) * programs + program
                row = tl.cast(received, tl.int64)
                weight = load_row(weight_ptr, COLUMNS, BLOCK, "evict_last")
                added = load_residual(residual_ptr + row * residual_stride, HAS_RESIDUAL, COLUMNS, BLOCK)
                patience = await_sum(
                    peers_ptr, mine, (turn - 2 + program) % WORLD, state_ptr, report_ptr, received, call, patience,
                    phase_bytes, max_tiles, WORLD
                )  # fmt: skip
                piece = mine + inbox(call, 1, slot_of(turn - 2, program, ring), 0, phase_bytes, piece_bytes, 1)
                sums = tl.tuple([])
                for i in tl.static_range((COLUMNS + BLOCK - 1) // BLOCK):
                    pairs = wire_units.decode(
                        piece, KIND, LIMIT, LOW, HIGH, T, T, BLOCK // 32, part(i, BLOCK, COLUMNS, ROW_GROUPS)
                    )  # fmt: skip
                    sums += (block_of(pairs, T),)
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
def slot_of(turn, program, ring):
    """Where the pieces of a program's row of this turn lie, among those of all programs."""
    return program * ring + turn % ring


@triton.jit
def await_sum(
    peers_ptr, mine, owner, state_ptr, report_ptr, tile, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr
):  # fmt: skip
    """`quick_reduce.await_flags` of the second phase, where the owner alone sets one.

    If it does not come, its flags of the first phase say for whom the owner waits.
    """
    flag = (mine + flags(1, tile, phase_bytes, max_tiles, WORLD)).to(tl.pointer_type(call.dtype))
    spins = 0
    absent = look(flag, owner, call, WORLD, False)
    while (absent < WORLD) & (spins < patience):
        absent = look(flag, owner, call, WORLD, False)
        spins += 1
    if absent < WORLD:
        theirs = address(peers_ptr, owner) + flags(0, tile, phase_bytes, max_tiles, WORLD)
        missing = look(theirs.to(tl.pointer_type(call.dtype)), owner, call, WORLD, True)
        if missing < WORLD:
            report_lost(state_ptr, report_ptr, 0, missing, call, patience)
        else:
            report_lost(state_ptr, report_ptr, 1, owner, call, patience)
        patience = -1
    return patience


@triton.constexpr_function
def part(i, VALUES, COLUMNS, ROW_GROUPS):
    """Which part of a row's buffer its values from i * VALUES on are, as `wire_units.store_parts` takes it."""
    return i * VALUES // GROUP, ROW_GROUPS, (COLUMNS + GROUP - 1) // GROUP


@triton.jit
def load_chunks(row_ptr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, LOW: tl.constexpr):
    """A row at a multiple of 16 bytes, eights of units by chunks of CHUNK values, zeros beyond it."""
    UNIT: tl.constexpr = wire_units.unit_values(LOW)
    chunks = ()
    for i in tl.static_range((COLUMNS + CHUNK - 1) // CHUNK):
        first = tl.multiple_of((row_ptr + i * CHUNK).to(tl.pointer_type(tl.int32)), 16)
        chunks = chunks + (wire_units.load_eights(first, CHUNK // UNIT, UNIT // 8, (COLUMNS - i * CHUNK) // 2),)
    return chunks


@triton.jit
def send(
    to, slot, chunks, KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, ROW_GROUPS: tl.constexpr
):  # fmt: skip
    """Encodes a row (`load_chunks`) and stores it at `slot` of regions; groups beyond the columns do not travel."""
    for i in tl.static_range(len(chunks)):
        parts = wire_units.encode(chunks[i], KIND, LIMIT, CAP, LOW, HIGH, T)
        for turn in tl.static_range(len(to)):
            wire_units.store_parts(
                to[turn] + slot, parts, LOW, HIGH, CHUNK // 32, part(i, CHUNK, COLUMNS, ROW_GROUPS)
            )  # fmt: skip


@triton.jit
def add_row(
    pieces, piece_bytes, BLOCKS: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, T: tl.constexpr, MAX: tl.constexpr, COLUMNS: tl.constexpr, VALUES: tl.constexpr,
    ROW_GROUPS: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """The sum of a row over the ranks, in parts of VALUES: blocks for `finish_row`, or chunks for `send`."""
    sums = tl.tuple([])
    for i in tl.static_range((COLUMNS + VALUES - 1) // VALUES):
        eights = add_pieces(
            pieces, piece_bytes, BLOCKS, KIND, LIMIT, LOW, HIGH, T, MAX, VALUES // 32, WORLD,
            part(i, VALUES, COLUMNS, ROW_GROUPS)
        )  # fmt: skip
        sums += (block_of(eights[0], T) if BLOCKS else eights,)
    return sums


@triton.jit
def block_of(pairs, T: tl.constexpr):
    """T [8 * N] of pairs [N, 4]."""
    halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(halves, (8 * pairs.shape[0],)).to(T, bitcast=True)
