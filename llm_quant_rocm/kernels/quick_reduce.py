# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce between GPUs that reach each other's memory: the bits of `reference.quick_reduce`.

**Tiles.** A message is cut into tiles of one piece an owner, each piece a whole buffer of `formats.wire`. A program
takes every so-manieth tile, and works on three at once, so that links carry one while others are encoded:

    send      its tile t: encodes the owners' pieces and stores each to its owner's inbox, then sets a flag there
    own       tile t - 1: awaits all ranks' pieces of its own, adds them in the order of ranks, encodes the sum, stores
              it to everybody's second inbox and sets flags there
    receive   tile t - 2: awaits the owners' sums, decodes and stores them

The one-shot sends every piece to everybody, who adds for itself.

**Memory.** Each rank has one such region, which all reach; it starts as zeros:

    inbox[parity of the call][phase][tile][rank that sends][bytes of a piece]
    flag[phase][tile][rank that sends]        int32: the number of the last call whose piece is there

**Calls** are counted in the device's own memory, so that a captured graph counts when it is replayed; the last program
of a kernel counts. Inboxes are used again in the call after the next one. That is safe: in every call all ranks await
the flags of tile 0 of all others. Who has finished call k knows that every rank has begun call k, so every rank has
finished call k - 1, and nobody reads what call k - 1 left or k + 1 may overwrite. Codec, size, algorithm and grid may
change between calls.

**Order.** All waves of a program have stored before one of them releases its flags to the system, and a flag is
acquired before what it guards is loaded. Who has looked at a flag `max_spins` times says in `state` whose it was, waits
no more, sends no more, and ends, with anything in `out`; so do all later calls. A rank that comes late after all finds
what was sent to it unchanged.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.wire import BLOCK, GROUP, Codec
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import wire

# int32 words of `Mailbox.state`.
CALL, DONE, FAILED_CALL, FAILED_PEER, FAILED_PHASE = (tl.constexpr(word) for word in range(5))
STATE_WORDS = 8
PHASES, PARITIES = 2, 2


@dataclass(frozen=True)
class Config:
    """How a message is cut.

    Attributes:
        blocks: blocks of 256 values in a piece, a power of two.
        programs: about as many as the GPU runs at once. None waits for one of a higher number, of any rank, so further
            ones begin when others end; all ranks must have as many.
        num_warps: at least 2 (with one, Triton 3.9 makes a loop with two entries of a spin).
    """

    blocks: int
    programs: int
    num_warps: int

    @property
    def piece_values(self) -> int:
        return self.blocks * BLOCK

    def piece_bytes(self, codec: Codec) -> int:
        return self.piece_values // GROUP * codec.group_bytes


@dataclass(frozen=True)
class Mailbox:
    """What a rank's kernels know of the memory that all ranks reach.

    Attributes:
        peers: int64 [ranks], the addresses of the ranks' regions of `region_bytes`, multiples of 16.
        state: int32 [STATE_WORDS], this rank's own, zeros at first. Word FAILED_CALL becomes the number of the first
            call in which a rank did not arrive, FAILED_PEER that rank, and FAILED_PHASE 0 or 1.
        rank: this one.
        phase_bytes: bytes of an inbox of one phase, a multiple of 16.
        max_tiles: tiles that have flags.
    """

    peers: torch.Tensor
    state: torch.Tensor
    rank: int
    phase_bytes: int
    max_tiles: int

    @property
    def world(self) -> int:
        return self.peers.numel()

    def region_bytes(self) -> int:
        """Bytes of each rank's region."""
        return region_bytes(self.world, self.phase_bytes, self.max_tiles)

    def capacity(self, codec: Codec, config: Config, shots: int) -> int:
        """The most values that one call can carry."""
        tiles = min(self.max_tiles, self.phase_bytes // (self.world * config.piece_bytes(codec)))
        return tiles * config.piece_values * (self.world if shots == 2 else 1)


def region_bytes(world: int, phase_bytes: int, max_tiles: int) -> int:
    """Bytes of a rank's region."""
    return PARITIES * PHASES * phase_bytes + PHASES * max_tiles * world * 4


def default_config(hardware: Hardware) -> Config:
    """16 values a lane and piece, and a program for each compute unit of the largest GPU of its kind. Not measured."""
    programs = {"gfx90a": 104, "gfx942": 304, "gfx950": 256}.get(hardware.arch, 128)
    return Config(blocks=16, programs=programs, num_warps=256 // hardware.lanes)


def two_shot(
    x: torch.Tensor, out: torch.Tensor, mailbox: Mailbox, codec: Codec, config: Config, max_spins: int,
    cast_bf16_to_fp16: bool = False,
) -> None:  # fmt: skip
    """out = the sum of x over the ranks, on every rank with the same bits. All ranks call with as many values.

    Args:
        x, out: bf16 or fp16 [values], contiguous, x at a multiple of 16 bytes; at most `Mailbox.capacity` values.
        max_spins: looks at a flag until its rank counts as lost.
        cast_bf16_to_fp16: bf16 travels as fp16.
    """
    _launch(two_shot_kernel, mailbox.world, x, out, mailbox, codec, config, max_spins, cast_bf16_to_fp16)


def one_shot(
    x: torch.Tensor, out: torch.Tensor, mailbox: Mailbox, codec: Codec, config: Config, max_spins: int,
    cast_bf16_to_fp16: bool = False,
) -> None:  # fmt: skip
    """`two_shot`, where everybody sends to everybody and adds for itself."""
    _launch(one_shot_kernel, 1, x, out, mailbox, codec, config, max_spins, cast_bf16_to_fp16)


def _launch(
    kernel: Any, pieces: int, x: torch.Tensor, out: torch.Tensor, mailbox: Mailbox, codec: Codec, config: Config,
    max_spins: int, cast_bf16_to_fp16: bool,
) -> None:  # fmt: skip
    carried = torch.float16 if cast_bf16_to_fp16 else x.dtype
    tiles = triton.cdiv(x.numel(), pieces * config.piece_values)
    kernel[(min(tiles, config.programs),)](
        x,
        out,
        mailbox.peers,
        mailbox.state,
        x.numel(),
        mailbox.rank,
        mailbox.phase_bytes,
        mailbox.max_tiles,
        max_spins,
        MAX=torch.finfo(carried).max,
        PIECE_BYTES=config.piece_bytes(codec),
        GROUPS=config.piece_values // GROUP,
        WORLD=mailbox.world,
        **wire.constants(codec, carried),
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )


_RUNTIME = ["count", "rank", "phase_bytes", "max_tiles", "max_spins"]


@triton.jit(do_not_specialize=_RUNTIME)
def two_shot_kernel(
    x_ptr, out_ptr, peers_ptr, state_ptr, count, rank, phase_bytes, max_tiles, max_spins,
    KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr,
    MAX: tl.constexpr, PIECE_BYTES: tl.constexpr, GROUPS: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    VALUES: tl.constexpr = GROUPS * 32
    call, patience = begin_call(state_ptr, max_spins)
    mine = tl.load(peers_ptr + rank)
    tiles = tl.cdiv(count, WORLD * VALUES)
    programs = tl.num_programs(0)
    for tile in range(tl.program_id(0), tiles + 2 * programs, programs):
        if (tile < tiles) & (patience >= 0):
            slot = inbox(call, 0, tile, rank, phase_bytes, PIECE_BYTES, WORLD)
            for owner in range(WORLD):
                begin = (tile * WORLD + owner) * VALUES
                if begin < count:
                    parts = wire.encode(load_values(x_ptr, begin, count, T, MAX, GROUPS), KIND, LIMIT, CAP, LOW, HIGH)
                    wire.store_parts(tl.load(peers_ptr + owner) + slot, parts, LOW, HIGH, GROUPS)
            set_flags(peers_ptr, 0, tile, rank, call, patience, phase_bytes, max_tiles, WORLD)

        owned = tile - programs
        if (owned >= 0) & (owned < tiles):
            patience = await_flags(mine, state_ptr, 0, owned, call, patience, phase_bytes, max_tiles, WORLD)
            if ((owned * WORLD + rank) * VALUES < count) & (patience >= 0):
                slots = mine + inbox(call, 0, owned, 0, phase_bytes, PIECE_BYTES, WORLD)
                total = add_pieces(slots, KIND, LIMIT, LOW, HIGH, T, MAX, PIECE_BYTES, GROUPS, WORLD)
                parts = wire.encode(total, KIND, LIMIT, CAP, LOW, HIGH)
                slot = inbox(call, 1, owned, rank, phase_bytes, PIECE_BYTES, WORLD)
                for peer in range(WORLD):
                    wire.store_parts(tl.load(peers_ptr + peer) + slot, parts, LOW, HIGH, GROUPS)
            set_flags(peers_ptr, 1, owned, rank, call, patience, phase_bytes, max_tiles, WORLD)

        received = tile - 2 * programs
        if received >= 0:
            patience = await_flags(mine, state_ptr, 1, received, call, patience, phase_bytes, max_tiles, WORLD)
            slots = mine + inbox(call, 1, received, 0, phase_bytes, PIECE_BYTES, WORLD)
            for owner in range(WORLD):
                begin = (received * WORLD + owner) * VALUES
                if begin < count:
                    parts = wire.load_parts(slots + owner * PIECE_BYTES, T, LOW, HIGH, GROUPS)
                    value, _ = wire.decode(parts, KIND, LIMIT, LOW, HIGH)
                    if KIND == wire.INT:
                        value += 0.0  # no -0
                    store_values(out_ptr, value, begin, count, GROUPS)
    end_call(state_ptr, call)


@triton.jit(do_not_specialize=_RUNTIME)
def one_shot_kernel(
    x_ptr, out_ptr, peers_ptr, state_ptr, count, rank, phase_bytes, max_tiles, max_spins,
    KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr,
    MAX: tl.constexpr, PIECE_BYTES: tl.constexpr, GROUPS: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    VALUES: tl.constexpr = GROUPS * 32
    call, patience = begin_call(state_ptr, max_spins)
    mine = tl.load(peers_ptr + rank)
    tiles = tl.cdiv(count, VALUES)
    programs = tl.num_programs(0)
    for tile in range(tl.program_id(0), tiles + programs, programs):
        if (tile < tiles) & (patience >= 0):
            slot = inbox(call, 0, tile, rank, phase_bytes, PIECE_BYTES, WORLD)
            x = load_values(x_ptr, tile * VALUES, count, T, MAX, GROUPS)
            parts = wire.encode(x, KIND, LIMIT, CAP, LOW, HIGH)
            for peer in range(WORLD):
                wire.store_parts(tl.load(peers_ptr + peer) + slot, parts, LOW, HIGH, GROUPS)
            set_flags(peers_ptr, 0, tile, rank, call, patience, phase_bytes, max_tiles, WORLD)

        received = tile - programs
        if received >= 0:
            patience = await_flags(mine, state_ptr, 0, received, call, patience, phase_bytes, max_tiles, WORLD)
            slots = mine + inbox(call, 0, received, 0, phase_bytes, PIECE_BYTES, WORLD)
            total = add_pieces(slots, KIND, LIMIT, LOW, HIGH, T, MAX, PIECE_BYTES, GROUPS, WORLD)
            store_values(out_ptr, total.to(tl.float32), received * VALUES, count, GROUPS)
    end_call(state_ptr, call)


@triton.jit
def inbox(call, PHASE: tl.constexpr, tile, source, phase_bytes, PIECE_BYTES: tl.constexpr, WORLD: tl.constexpr):
    """Where in a region the piece of `source` lies."""
    return ((call & 1) * 2 + PHASE).to(tl.int64) * phase_bytes + (tile * WORLD + source).to(tl.int64) * PIECE_BYTES


@triton.jit
def flags(PHASE: tl.constexpr, tile, phase_bytes, max_tiles, WORLD: tl.constexpr):
    """Where in a region the flags [WORLD] of a tile lie."""
    return tl.cast(phase_bytes, tl.int64) * 4 + (PHASE * max_tiles + tile).to(tl.int64) * (WORLD * 4)


@triton.jit
def begin_call(state_ptr, max_spins):
    """This call's number, and how often a flag may be looked at: -1 once a rank is lost."""
    lost = tl.load(state_ptr + FAILED_CALL) != 0
    return tl.load(state_ptr + CALL) + 1, tl.where(lost, -1, max_spins)


@triton.jit
def set_flags(
    peers_ptr, PHASE: tl.constexpr, tile, rank, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr
):  # fmt: skip
    """Tells every rank that this one's pieces of a tile are there, unless a rank is lost."""
    place = flags(PHASE, tile, phase_bytes, max_tiles, WORLD) + rank * 4
    if tl.target_info.is_hip():
        # Triton 3.9's barrier waits for LDS alone, and a release for the stores of its own wave.
        tl.inline_asm_elementwise("s_waitcnt vmcnt(0)", "=v", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    # One lane a rank, so that what is released is released once.
    peer = tl.arange(0, triton.next_power_of_2(WORLD))
    flag = tl.load(peers_ptr + peer, mask=peer < WORLD, other=0) + place
    told = (peer < WORLD) & (patience >= 0)
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int32)), call, mask=told, sem="release", scope="sys")


@triton.jit
def await_flags(
    mine, state_ptr, PHASE: tl.constexpr, tile, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr
):  # fmt: skip
    """Waits until every rank's pieces of a tile are here. Returns the patience left: -1 where a rank is lost."""
    first = (mine + flags(PHASE, tile, phase_bytes, max_tiles, WORLD)).to(tl.pointer_type(tl.int32))
    for source in range(WORLD):
        spins = 0
        while (tl.atomic_add(first + source, 0, sem="acquire", scope="sys") - call < 0) & (spins <= patience):
            spins += 1
        if spins > patience:
            # The first of all programs to lose a rank says so.
            if (patience >= 0) & (tl.atomic_cas(state_ptr + FAILED_CALL, 0, call) == 0):
                tl.store(state_ptr + FAILED_PEER, source)
                tl.store(state_ptr + FAILED_PHASE, PHASE)
            patience = -1
    return patience


@triton.jit
def end_call(state_ptr, call):
    """The last program of the kernel counts the call."""
    if tl.atomic_add(state_ptr + DONE, 1) == tl.num_programs(0) - 1:
        tl.store(state_ptr + DONE, 0)
        tl.store(state_ptr + CALL, call)


@triton.jit
def add_pieces(
    slots, KIND: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr,
    MAX: tl.constexpr, PIECE_BYTES: tl.constexpr, GROUPS: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """The sum, T [GROUPS, 32], of the pieces of all ranks in their order; finite where all of them are."""
    total = tl.zeros([GROUPS, 32], tl.float32)
    finite = tl.full([GROUPS, 32 if KIND == wire.FP else 1], True, tl.int1)
    for source in range(WORLD):
        parts = wire.load_parts(slots + source * PIECE_BYTES, T, LOW, HIGH, GROUPS)
        value, extent = wire.decode(parts, KIND, LIMIT, LOW, HIGH)
        total += value
        finite = finite & (tl.abs(extent) < float("inf"))
    total = tl.where(finite & (total > MAX), MAX, total)
    return tl.where(finite & (total < -MAX), -MAX, total).to(T)


@triton.jit
def load_values(x_ptr, begin, count, T: tl.constexpr, MAX: tl.constexpr, GROUPS: tl.constexpr):
    """The piece of x that begins at a value, [GROUPS, 32], as it travels; zeros beyond the end."""
    place = begin + tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if begin + GROUPS * 32 <= count:
        x = tl.load(x_ptr + place)
    else:
        x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    if x.dtype != T:
        wide = x.to(tl.float32)
        finite = tl.abs(wide) < float("inf")
        wide = tl.where(finite, tl.minimum(tl.maximum(wide, -MAX), MAX), wide)
        return wide.to(T)
    else:
        return x


@triton.jit
def store_values(out_ptr, value, begin, count, GROUPS: tl.constexpr):
    """Rounds a piece [GROUPS, 32] to the type of `out` and stores what of it is not beyond the end."""
    place = begin + tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = value.to(out_ptr.dtype.element_ty)
    if begin + GROUPS * 32 <= count:
        tl.store(out_ptr + place, value)
    else:
        tl.store(out_ptr + place, value, mask=place < count)
