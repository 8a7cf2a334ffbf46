# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce between GPUs that reach each other's memory: the bits of `reference.quick_reduce`.

**Tiles.** A message is cut into tiles of one piece an owner. A piece is one or more whole buffers of `formats.wire`. A
program takes every so-manieth tile, and works on three at once, so that links carry one while others are encoded:

    send      its tile t: encodes the owners' pieces and stores each to its owner's inbox, then sets a flag there
    own       tile t - 1: awaits all ranks' pieces of its own, adds them in the order of ranks, encodes the sum, stores
              it to everybody's second inbox and sets flags there
    receive   tile t - 2: awaits the owners' sums, decodes and stores them

The one-shot sends every piece to everybody, who adds for itself.

**Memory.** Each rank has one such region, which all reach; it starts as zeros:

    inbox[parity of the call][phase][slot][rank that sends][bytes of a piece]
    flag[phase][tile][rank that sends]        int64: the number of the last call whose piece is there
    what `kernels.lamport` says

A program has SLOTS slots, which its tiles take in turn, so that inboxes are small and stay in the caches. That is safe:
a rank's flag of a tile says that it is done with all that its program did before. Two-shot: who sends tile t has
received t - 3, whose flags the owners set after they read all pieces of t - 3. Who stores the sum of t has seen
everybody's flag of t, set after everybody received t - 3. One-shot: who sends t has seen everybody's flag of t - 2, set
after everybody received t - 4.

**Calls** are counted in the device's own memory, so that a captured graph counts when it is replayed; one program of a
kernel counts, when all have read the number. Inboxes are used again in the call after the next one. That is safe: in
every call all ranks await the flags of tile 0 of all others. Who has finished call k knows that every rank has begun
call k, so every rank has finished call k - 1, and nobody reads what call k - 1 left or k + 1 may overwrite. A flag that
is awaited may be ahead by that one call. Codec, size, algorithm and grid may change between calls. A rank's calls
follow one another, on one stream or on several that await each other. Groups whose calls may meet on a GPU need one
order of them on all ranks, as NCCL's do: a kernel may fill its GPU while it waits.

**Order.** All waves of a program have stored before one of them releases its flags to the system, and a flag is
acquired before what it guards is loaded. In PTX's model: weak stores, to any rank's memory, happen before the barrier,
that before `atom.release.sys` of the flag, that before the `ld.acquire.sys` that sees it, that before the barrier after
which all waves load. Loads of a slot happen before its next stores by the same chain, as they precede the flags of a
later tile. No line of an L1 is stale, since every acquire invalidates it (CCTL.IVALL). On AMD a release at system scope
writes the L2 back (buffer_wbl2) once the waves' stores have left them, which `await_stores` awaits by hand, and the
flags of other ranks follow the one that did so; an acquire invalidates the L1, and what of the L2 may be stale
(buffer_inv); no wave issues a load before the barrier that follows, and a compute unit's loads go the way of its
invalidation, behind it.

**Lost ranks.** Who has looked at a flag `max_spins` times says in `report` whose it was, waits no more, sends no more,
and ends, with anything in `out`; so do all later calls. A rank that comes late after all finds what was sent to it
unchanged.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.wire import BLOCK, GROUP, Codec
from llm_quant_rocm.hardware import Hardware, units_of
from llm_quant_rocm.kernels import wire_units
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2

# int32 words of `Mailbox.state`. CALL is an int64, of two words, and so are flags: in 32 bits an engine's calls come to
# their first number again within days, and a flag that is that old, of a tile that only large messages have, looks new.
CALL, DONE, LOST = (tl.constexpr(word) for word in (0, 2, 3))
STATE_WORDS = 4
# AMD: the int64 at CALL, and that of DONE and LOST.
READ_STATE = tl.constexpr("s_load_dwordx2 $0, $2, 0\ns_load_dwordx2 $1, $2, 8\ns_waitcnt lgkmcnt(0)")
FLAG_BYTES = tl.constexpr(8)
PHASES, PARITIES = 2, 2
SLOTS = tl.constexpr(4)
# A pointer to an int64 that no kernel changes, as LLVM's AMD backend knows it. Triton 3.6 numbers kinds of memory.
CONSTANT = tl.constexpr(
    tl.pointer_type(tl.int64, "constant" if tl.pointer_type(tl.int64).address_space == "global" else 4)
)
# Not Triton's own: SGLang puts a function of the host in its place.
_power_of_2 = triton.constexpr_function(next_power_of_2)


@dataclass(frozen=True)
class Config:
    """How a message is cut.

    Attributes:
        blocks: blocks of 256 values in a buffer, a power of two: 4 a wave's 32 lanes, so that each has a group.
        programs: the most that run, about as many as the GPU runs at once. None waits for one of a higher number, of
            any rank, so further ones begin when others end; all ranks must have as many.
        num_warps: at least 2 (with one, Triton 3.9 makes a loop with two entries of a spin).
        buffers: the most buffers of a piece: larger messages are more tiles.
        buffers_at_once: the most, if more than `buffers`, where a program then has one tile.
        registers: the most that a lane gets on an NVIDIA GPU, so that `programs` run at once; None: what it asks for.
    """

    blocks: int
    programs: int
    num_warps: int
    buffers: int = 8
    buffers_at_once: int = 0
    registers: int | None = None

    @property
    def buffer_values(self) -> int:
        return self.blocks * BLOCK

    def buffer_bytes(self, codec: Codec) -> int:
        return self.buffer_values // GROUP * codec.group_bytes


@dataclass(frozen=True)
class Cut:
    """How one message is cut: `buffers` of a piece, `tiles` of a message and `programs` that share them."""

    buffers: int
    tiles: int
    programs: int


@dataclass(frozen=True)
class Mailbox:
    """What a rank's kernels know of the memory that all ranks reach.

    Attributes:
        peers: int64 [ranks], the addresses of the ranks' regions of `region_bytes`, multiples of 16.
        state: int32 [STATE_WORDS], this rank's own, zeros at first. Word LOST becomes 1 once a rank did not arrive.
        report: int64 [1], zero at first, memory of the host that the GPU writes to: `lost` reads it.
        rank: this one.
        phase_bytes: bytes of an inbox of one phase, a multiple of 16.
        max_tiles: tiles that have flags.
        lamport_bytes: bytes of rows that travel without flags, of one rank in one call, a multiple of 16.
    """

    peers: torch.Tensor
    state: torch.Tensor
    report: torch.Tensor
    rank: int
    phase_bytes: int
    max_tiles: int
    lamport_bytes: int = 0

    @cached_property
    def world(self) -> int:
        return self.peers.numel()

    def region_bytes(self) -> int:
        """Bytes of each rank's region."""
        return region_bytes(self.world, self.phase_bytes, self.max_tiles, self.lamport_bytes)

    @cached_property
    def lamport_at(self) -> int:
        """Where in a region the rows that travel without flags begin."""
        return region_bytes(self.world, self.phase_bytes, self.max_tiles)

    def lost(self) -> tuple[int, int, int] | None:
        """(call, rank, phase 0 or 1) of the first flag that a kernel gave up, or None. It waits for nothing, and calls
        no driver: kernels that have not ended may still find a rank lost."""
        report = int(self.report)
        return (report & 0xFFFFFFFF, (report >> 32) % 16 - 1, report >> 36) if report else None

    def cut(self, count: int, codec: Codec, config: Config, shots: int) -> Cut:
        """How `count` values, at least one, are cut.

        Raises:
            ValueError: inboxes or flags are too few for them, or they are too many to be counted in 32 bits.
        """
        room = self.phase_bytes // (self.world * config.buffer_bytes(codec))
        values = config.buffer_values * (self.world if shots == 2 else 1)
        pieces = cdiv(count, values)  # of one buffer
        slots = SLOTS.value * config.programs

        def fits(buffers: int) -> bool:
            return min(cdiv(pieces, buffers), slots) * buffers <= room

        # As few rounds as the largest pieces allow, as waits are a tile's; then the smallest pieces that need no more.
        rounds = cdiv(pieces, config.programs * config.buffers)
        once = cdiv(pieces, config.programs)
        if once <= config.buffers_at_once and fits(once):
            rounds = 1
        wanted = cdiv(pieces, config.programs * rounds)
        # Where inboxes are small, pieces are, and not the number of programs.
        fitting = next((buffers for buffers in range(wanted, 1, -1) if fits(buffers)), 1)
        buffers = max(fitting, cdiv(pieces, self.max_tiles))
        programs = config.programs if fits(buffers) else room // (SLOTS.value * buffers)
        if programs == 0:
            raise ValueError(
                f"inboxes of {self.phase_bytes} bytes with flags of {self.max_tiles} tiles do not serve {count} values "
                f"of {codec.name} between {self.world} ranks: enlarge them"
            )
        tiles = cdiv(count, values * buffers)
        if tiles * values * buffers >= 2**31:
            raise ValueError(
                f"{count} values are too many for one quantized all-reduce, which counts in 32 bits: split them"
            )
        return Cut(buffers, tiles, min(tiles, programs))


def region_bytes(world: int, phase_bytes: int, max_tiles: int, lamport_bytes: int = 0) -> int:
    """Bytes of a rank's region."""
    flag_bytes = PHASES * max_tiles * world * FLAG_BYTES.value
    return PARITIES * (PHASES * phase_bytes + world * lamport_bytes) + flag_bytes


@cache
def default_config(hardware: Hardware, world: int, shots: int) -> Config:
    """What serves messages between `world` ranks best, as far as it was measured: the two-shot between two and between
    four H200s, with codecs of 4.5 bits.

    Each lane has a group, and as many programs run at once as their registers allow, so that enough loads are under
    way. Larger pieces await fewer flags, but what is on its way leaves the caches: 1 GiB wants small pieces, while a
    message that could be one round loses more by a second round of few tiles. Three ranks are taken to be as four.

    Everything else has 4 programs for each multiprocessor, or compute unit of the largest AMD GPU of its kind, and is
    not measured but for the one-shot on H200s: a lane needs up to 128 registers, with which no more programs run at
    once, and those that begin when others have ended take as long again.
    """
    units = units_of(hardware.arch)
    if hardware.arch == "sm_90" and shots == 2 and world == 2:
        return Config(16, 7 * units, num_warps=4, buffers=6, registers=72)
    if hardware.arch == "sm_90" and shots == 2 and world <= 4:
        return Config(16, 6 * units, num_warps=4, buffers=3, buffers_at_once=16, registers=80)
    return Config(16, 4 * units, num_warps=128 // hardware.lanes)


def two_shot(
    x: torch.Tensor, out: torch.Tensor, mailbox: Mailbox, codec: Codec, config: Config, max_spins: int,
    cast_bf16_to_fp16: bool = False,
) -> None:  # fmt: skip
    """out = the sum of x over the ranks, on every rank with the same bits. All ranks call with as many values.

    Args:
        x, out: bf16 or fp16, of one shape, contiguous, at multiples of 16 bytes.
        max_spins: looks at a flag until its rank counts as lost.
        cast_bf16_to_fp16: bf16 travels as fp16.

    Raises:
        ValueError: `mailbox` is too small (`Mailbox.cut`).
    """
    _launch(two_shot_kernel, 2, x, out, mailbox, codec, config, max_spins, cast_bf16_to_fp16)


def one_shot(
    x: torch.Tensor, out: torch.Tensor, mailbox: Mailbox, codec: Codec, config: Config, max_spins: int,
    cast_bf16_to_fp16: bool = False,
) -> None:  # fmt: skip
    """`two_shot`, where everybody sends to everybody and adds for itself."""
    _launch(one_shot_kernel, 1, x, out, mailbox, codec, config, max_spins, cast_bf16_to_fp16)


def _launch(
    kernel: Any, shots: int, x: torch.Tensor, out: torch.Tensor, mailbox: Mailbox, codec: Codec, config: Config,
    max_spins: int, cast_bf16_to_fp16: bool,
) -> None:  # fmt: skip
    carried = torch.float16 if cast_bf16_to_fp16 else x.dtype
    cut = mailbox.cut(x.numel(), codec, config, shots)
    launch(
        kernel,
        (cut.programs,),
        x,
        out,
        mailbox.peers,
        mailbox.state,
        mailbox.report,
        x.numel(),
        cut.tiles,
        cut.buffers,
        mailbox.rank,
        mailbox.phase_bytes,
        mailbox.max_tiles,
        max_spins,
        **_constants(codec, carried, config, mailbox.world),
    )


def warm_up(shots: int, dtype: torch.dtype, codec: Codec, config: Config, world: int) -> None:
    """Compiles the kernel of such calls for the current GPU into Triton's cache; launches nothing.

    Args:
        shots: 1 or 2.
        dtype: of the values, which travel in it.
    """
    kernel = two_shot_kernel if shots == 2 else one_shot_kernel
    kernel.warmup(
        dtype, dtype, torch.int64, torch.int32, torch.int64, *[1] * len(_RUNTIME), grid=(1,),
        **_constants(codec, dtype, config, world),
    )  # fmt: skip


@cache
def _constants(codec: Codec, carried: torch.dtype, config: Config, world: int) -> dict[str, Any]:
    """What kernels are compiled for."""
    return {
        **wire_units.constants(codec, carried),
        "MAX": torch.finfo(carried).max,
        "GROUPS": config.buffer_values // GROUP,
        "WORLD": world,
        "num_warps": config.num_warps,
        "enable_fp_fusion": False,
        **({"maxnreg": config.registers} if config.registers else {}),
    }


_RUNTIME = ["count", "tiles", "buffers", "rank", "phase_bytes", "max_tiles", "max_spins"]


@triton.jit(do_not_specialize=_RUNTIME)
def two_shot_kernel(
    x_ptr, out_ptr, peers_ptr, state_ptr, report_ptr, count, tiles, buffers, rank, phase_bytes, max_tiles, max_spins,
    KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr,
    MAX: tl.constexpr, GROUPS: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    VALUES: tl.constexpr = GROUPS * 32
    BYTES: tl.constexpr = wire_units.buffer_bytes(GROUPS, LOW, HIGH)
    call, patience = begin_call(state_ptr, max_spins)
    mine = address(peers_ptr, rank)
    to = addresses(peers_ptr, rank, WORLD) if tl.target_info.is_hip() else None
    programs = tl.num_programs(0)
    piece_bytes = buffers * BYTES
    turn = 0
    for tile in range(tl.program_id(0), tiles + 2 * programs, programs):
        if (tile < tiles) & (patience >= 0):
            at = inbox(call, 0, slot_of(turn), rank, phase_bytes, piece_bytes, WORLD)
            for step in range(WORLD):
                owner = (rank + 1 + step) % WORLD  # not all to one
                piece = address(peers_ptr, owner) + at
                for index in range(buffers):
                    begin = ((tile * WORLD + owner) * buffers + index) * VALUES
                    if begin < count:
                        x = load_values(x_ptr, begin, count, T, MAX, GROUPS, LOW)
                        parts = wire_units.encode(x, KIND, LIMIT, CAP, LOW, HIGH, T)
                        wire_units.store_parts(piece + index * BYTES, parts, LOW, HIGH, GROUPS)
            set_flags(to, peers_ptr, 0, tile, rank, call, patience, phase_bytes, max_tiles, WORLD)

        owned = tile - programs
        if (owned >= 0) & (owned < tiles):
            patience = await_flags(mine, state_ptr, report_ptr, 0, owned, call, patience, phase_bytes, max_tiles, WORLD)
            if patience >= 0:
                slot = slot_of(turn - 1)
                pieces = mine + inbox(call, 0, slot, 0, phase_bytes, piece_bytes, WORLD)
                at = inbox(call, 1, slot, rank, phase_bytes, piece_bytes, WORLD)
                for index in range(buffers):
                    if ((owned * WORLD + rank) * buffers + index) * VALUES < count:
                        first = pieces + index * BYTES
                        total = add_pieces(first, piece_bytes, False, KIND, LIMIT, LOW, HIGH, T, MAX, GROUPS, WORLD)
                        parts = wire_units.encode(total, KIND, LIMIT, CAP, LOW, HIGH, T)
                        send(to, peers_ptr, rank, at, index * BYTES, parts, LOW, HIGH, GROUPS, WORLD)
            set_flags(to, peers_ptr, 1, owned, rank, call, patience, phase_bytes, max_tiles, WORLD)

        received = tile - 2 * programs
        if received >= 0:
            patience = await_flags(
                mine, state_ptr, report_ptr, 1, received, call, patience, phase_bytes, max_tiles, WORLD
            )
            pieces = mine + inbox(call, 1, slot_of(turn - 2), 0, phase_bytes, piece_bytes, WORLD)
            for index in range(WORLD * buffers):
                begin = (received * WORLD * buffers + index) * VALUES
                if begin < count:
                    buffer = pieces + index * BYTES
                    pairs = wire_units.decode(buffer, KIND, LIMIT, LOW, HIGH, T, out_ptr.dtype.element_ty, GROUPS)
                    store_values(out_ptr, pairs, begin, count, GROUPS)
        turn += 1  # noqa: SIM113 - Triton has no enumerate
    end_call(state_ptr, call)


@triton.jit(do_not_specialize=_RUNTIME)
def one_shot_kernel(
    x_ptr, out_ptr, peers_ptr, state_ptr, report_ptr, count, tiles, buffers, rank, phase_bytes, max_tiles, max_spins,
    KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr,
    MAX: tl.constexpr, GROUPS: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    VALUES: tl.constexpr = GROUPS * 32
    BYTES: tl.constexpr = wire_units.buffer_bytes(GROUPS, LOW, HIGH)
    call, patience = begin_call(state_ptr, max_spins)
    mine = address(peers_ptr, rank)
    to = addresses(peers_ptr, rank, WORLD) if tl.target_info.is_hip() else None
    programs = tl.num_programs(0)
    piece_bytes = buffers * BYTES
    turn = 0
    for tile in range(tl.program_id(0), tiles + programs, programs):
        if (tile < tiles) & (patience >= 0):
            at = inbox(call, 0, slot_of(turn), rank, phase_bytes, piece_bytes, WORLD)
            for index in range(buffers):
                begin = (tile * buffers + index) * VALUES
                if begin < count:
                    x = load_values(x_ptr, begin, count, T, MAX, GROUPS, LOW)
                    parts = wire_units.encode(x, KIND, LIMIT, CAP, LOW, HIGH, T)
                    send(to, peers_ptr, rank, at, index * BYTES, parts, LOW, HIGH, GROUPS, WORLD)
            set_flags(to, peers_ptr, 0, tile, rank, call, patience, phase_bytes, max_tiles, WORLD)

        received = tile - programs
        if received == tl.program_id(0):
            end_call(state_ptr, call)
        if received >= 0:
            patience = await_flags(
                mine, state_ptr, report_ptr, 0, received, call, patience, phase_bytes, max_tiles, WORLD
            )
            pieces = mine + inbox(call, 0, slot_of(turn - 1), 0, phase_bytes, piece_bytes, WORLD)
            for index in range(buffers):
                begin = (received * buffers + index) * VALUES
                if begin < count:
                    first = pieces + index * BYTES
                    (total,) = add_pieces(first, piece_bytes, True, KIND, LIMIT, LOW, HIGH, T, MAX, GROUPS, WORLD)
                    store_values(out_ptr, recast(total, T, out_ptr.dtype.element_ty), begin, count, GROUPS)
        turn += 1  # noqa: SIM113 - Triton has no enumerate


@triton.jit
def addresses(peers_ptr, rank, WORLD: tl.constexpr):
    """The regions of all ranks, the next one's first, so that not all send to one."""
    found = ()
    for turn in tl.static_range(WORLD):
        found = found + (address(peers_ptr, (rank + 1 + turn) % WORLD),)
    return found


@triton.jit
def address(peers_ptr, rank):
    """The region of a rank, on AMD in scalar registers.

    A store to an address in vector registers is a loop over those that its lanes may have, of 12 instructions for one.
    By itself LLVM has scalar registers only for what is loaded before all that may write to memory: another branch that
    it puts before counts as that, and so does the mode that Triton sets first where a kernel converts to FP8. What is
    said to be constant is loaded by scalar instructions anywhere, which wait for no store either.
    """
    if tl.target_info.is_hip():
        # By integers, as Triton 3.9 drops a cast between kinds of pointers.
        place = peers_ptr.to(tl.int64, bitcast=True) + tl.cast(rank, tl.int64) * 8
        return tl.load(place.to(CONSTANT, bitcast=True))
    else:
        return tl.load(peers_ptr + rank)


@triton.jit
def send(
    to, peers_ptr, rank, at, offset, parts, LOW: tl.constexpr, HIGH: tl.constexpr, GROUPS: tl.constexpr,
    WORLD: tl.constexpr
):  # fmt: skip
    """Stores a buffer in the regions of all ranks, whose addresses are `to` where these were loaded before, as on AMD:
    there they are in scalar registers, and no store waits for the next one's."""
    if to is None:
        for step in range(WORLD):
            buffer = address(peers_ptr, (rank + 1 + step) % WORLD) + at + offset
            wire_units.store_parts(buffer, parts, LOW, HIGH, GROUPS)
    else:
        for step in tl.static_range(WORLD):
            wire_units.store_parts(to[step] + at + offset, parts, LOW, HIGH, GROUPS)


@triton.jit
def slot_of(turn):
    """Where the pieces of this program's tile of a turn lie, among those of all programs: tiles take slots in order."""
    return tl.program_id(0) + turn % SLOTS * tl.num_programs(0)


@triton.jit
def inbox(call, PHASE: tl.constexpr, tile, source, phase_bytes, PIECE_BYTES: tl.constexpr, WORLD: tl.constexpr):
    """Where in a region the piece of `source` lies."""
    return ((call & 1) * 2 + PHASE).to(tl.int64) * phase_bytes + (tile * WORLD + source).to(tl.int64) * PIECE_BYTES


@triton.jit
def flags(PHASE: tl.constexpr, tile, phase_bytes, max_tiles, WORLD: tl.constexpr):
    """Where in a region the flags [WORLD] of a tile lie."""
    return tl.cast(phase_bytes, tl.int64) * 4 + (PHASE * max_tiles + tile).to(tl.int64) * (WORLD * FLAG_BYTES)


@triton.jit
def begin_call(state_ptr, max_spins):
    """This call's number, and how often a flag may be looked at: -1 once a rank is lost."""
    if tl.target_info.is_hip():
        # Both at once: LLVM loads each by vector instructions where a branch needs it, and waits there. The call stores
        # another number when all have read this one, so LLVM must not read it again, as it may what is constant.
        at = state_ptr.to(tl.int64, bitcast=True)
        last, done_and_lost = tl.inline_asm_elementwise(
            READ_STATE, "=&s,=&s,s", [at], dtype=(tl.int64, tl.int64), is_pure=False, pack=1
        )
        lost = done_and_lost >> 32 != 0
    else:
        lost = tl.load(state_ptr + LOST) != 0
        last = tl.load(call_pointer(state_ptr))
    return last + 1, tl.where(lost, -1, max_spins)


@triton.jit
def call_pointer(state_ptr):
    return (state_ptr + CALL).to(tl.pointer_type(tl.int64))


@triton.jit
def set_flags(
    to, peers_ptr, PHASE: tl.constexpr, tile, rank, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr,
    only=-1
):  # fmt: skip
    """Tells every rank, or `only` one, that this one's pieces of a tile are there, unless a rank is lost. On AMD `to`
    are the regions of those that are told."""
    await_stores()
    peer = tl.arange(0, _power_of_2(WORLD))
    place = flags(PHASE, tile, phase_bytes, max_tiles, WORLD) + rank * FLAG_BYTES
    if tl.target_info.is_hip():
        # One lane sets all flags, and the first one's release is every one's. With a lane for each, Triton's AMD
        # backend would look for those that have one address, by permutes and a loop: 140 instructions on MI300.
        for i in tl.static_range(len(to)):
            flag = (to[i] + place).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flag, call, mask=patience >= 0, sem="relaxed" if i else "release", scope="sys")
    else:
        # One lane a rank, so that what is released is released once.
        flag = tl.load(peers_ptr + peer, mask=peer < WORLD, other=0) + place
        told = (peer < WORLD) & ((peer == only) | (only < 0)) & (patience >= 0)
        tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), call, mask=told, sem="release", scope="sys")


@triton.jit
def await_stores():
    """All waves of the program have stored what they store before this."""
    if tl.target_info.is_hip():
        # Triton 3.9's barrier waits for LDS alone, and a release for the stores of its own wave.
        tl.inline_asm_elementwise("s_waitcnt vmcnt(0)", "=v", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def await_flags(
    mine, state_ptr, report_ptr, PHASE: tl.constexpr, tile, call, patience, phase_bytes, max_tiles,
    WORLD: tl.constexpr, AT_ONCE: tl.constexpr = False
):  # fmt: skip
    """Waits until every rank's pieces of a tile are here. Returns the patience left: -1 where a rank is lost.

    AT_ONCE looks at the flags of all ranks together, by one lane each, and not at one after the other: fewer looks, and
    more registers.
    """
    first = (mine + flags(PHASE, tile, phase_bytes, max_tiles, WORLD)).to(tl.pointer_type(tl.int64))
    for source in range(1 if AT_ONCE else WORLD):
        spins = 0
        absent = look(first, source, call, WORLD, AT_ONCE)
        while (absent < WORLD) & (spins < patience):
            absent = look(first, source, call, WORLD, AT_ONCE)
            spins += 1
        if absent < WORLD:
            report_lost(state_ptr, report_ptr, PHASE, absent, call, patience)
            patience = -1
    return patience


@triton.jit
def report_lost(state_ptr, report_ptr, PHASE: tl.constexpr, absent, call, patience):
    """The first of all programs to lose a rank says so."""
    if (patience >= 0) & (tl.atomic_cas(state_ptr + LOST, 0, 1) == 0):
        # In one store, which needs no order
        told = (call & 0xFFFFFFFF) | ((absent + (1 + 16 * PHASE)).to(tl.int64) << 32)
        tl.store(report_ptr, told)


@triton.jit
def look(first, source, call, WORLD: tl.constexpr, AT_ONCE: tl.constexpr):
    """The first rank, of all or of `source` alone, whose flag in [WORLD] from `first` on is not set; WORLD if none."""
    if AT_ONCE:
        lane = tl.arange(0, _power_of_2(WORLD))
        flag = tl.atomic_add(first + lane, 0, mask=lane < WORLD, sem="acquire", scope="sys")
        return tl.min(tl.where((lane < WORLD) & (flag < call), lane, WORLD), axis=0)
    else:
        return tl.where(tl.atomic_add(first + source, 0, sem="acquire", scope="sys") < call, source, WORLD)


@triton.jit
def end_call(state_ptr, call):
    """The last program of the kernel to come here counts the call: all have read its number. In the one-shot they come
    here before they await their first tile, as its flags are on their way; the two-shot would need more registers.

    It orders nothing: who comes here has used the number, and who reads the next one begins when this kernel has ended.
    A release would wait until the flags that were just set have arrived."""
    if tl.atomic_add(state_ptr + DONE, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(state_ptr + DONE, 0)
        tl.store(call_pointer(state_ptr), call)


@triton.jit
def add_pieces(
    first, piece_bytes, EIGHTS: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, T: tl.constexpr, MAX: tl.constexpr, GROUPS: tl.constexpr, WORLD: tl.constexpr,
    PART: tl.constexpr = None
):  # fmt: skip
    """The sums, eights of pairs of T, of the buffers of all ranks in their order; finite where all of them are.

    Args:
        first: the address of rank 0's buffer; the others' are `piece_bytes` apart.
        EIGHTS: whether lanes have 8 values, or units.
        PART: which GROUPS of larger buffers these are, as in `wire_units.store_parts`.
    """
    pieces = ()
    piece = first
    for _ in tl.static_range(WORLD):
        pieces = pieces + (wire_units.load_parts(piece, EIGHTS, LOW, HIGH, T, GROUPS, PART),)
        piece += piece_bytes
    return add_loaded(pieces, EIGHTS, KIND, LIMIT, LOW, HIGH, T, MAX, WORLD)


@triton.jit
def add_loaded(
    pieces, EIGHTS: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    T: tl.constexpr, MAX: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """`add_pieces` of what `wire_units.load_parts` loads."""
    rare = True
    if KIND == wire_units.FP:
        every = tl.full(pieces[0][0].shape, True, tl.int1)
    else:
        # No sum is beyond this
        finite, bound = tl.full(pieces[0][2].shape, True, tl.int1), tl.zeros(pieces[0][2].shape, tl.float32)
        for source in tl.static_range(WORLD):
            size = tl.abs(pieces[source][2])
            finite = finite & (size < float("inf"))
            bound += size * LIMIT
        rare = tl.max((bound < MAX).to(tl.int32) ^ 1, axis=0) != 0
        every = wire_units.four_times(finite)
    eights = ()
    for eight in tl.static_range(1 if EIGHTS else wire_units.unit_values(LOW) // 8):
        first, second = tl.zeros(every.shape, tl.float32), tl.zeros(every.shape, tl.float32)
        every_first, every_second = every, every
        for source in tl.static_range(WORLD):
            low, high, scale = wire_units.eighth(pieces[source], eight, EIGHTS, LOW, HIGH)
            found = wire_units.numbers(low, high, KIND, LIMIT, LOW, HIGH, T)
            if KIND == wire_units.FP:
                first, second = first + found[0], second + found[1]
                every_first = every_first & (tl.abs(found[0]) < float("inf"))
                every_second = every_second & (tl.abs(found[1]) < float("inf"))
            else:
                # Products of a code and a scale are exact
                scales = wire_units.four_times(scale)
                first, second = tl.fma(found[0], scales, first), tl.fma(found[1], scales, second)
        if rare:
            first, second = limited(first, every_first, MAX), limited(second, every_second, MAX)
        eights = eights + (wire_units.pairs_of_numbers(first, second, KIND, T),)
    return eights


@triton.jit
def limited(total, finite, MAX: tl.constexpr):
    """`total`, sums of `finite` values within MAX."""
    total = tl.where(finite & (total > MAX), MAX, total)
    return tl.where(finite & (total < -MAX), -MAX, total)


@triton.jit
def load_values(
    x_ptr, begin, count, T: tl.constexpr, MAX: tl.constexpr, GROUPS: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """The buffer of x that begins at a value, eights of units, as it travels; zeros beyond the end."""
    UNIT: tl.constexpr = wire_units.unit_values(LOW)
    UNITS: tl.constexpr = GROUPS * 32 // UNIT
    if begin + GROUPS * 32 <= count:
        first = (x_ptr + begin).to(tl.pointer_type(tl.int32))
        eights = wire_units.load_eights(tl.multiple_of(first, 16), UNITS, UNIT // 8)
    else:
        eights = load_ragged(x_ptr.to(tl.pointer_type(tl.int16)), begin, count, UNIT, UNITS)
    if x_ptr.dtype.element_ty == T:
        return eights
    else:
        return narrowed(eights, x_ptr.dtype.element_ty, T, MAX)


@triton.jit
def load_ragged(x_ptr, begin, count, UNIT: tl.constexpr, UNITS: tl.constexpr):
    """Eights of a buffer that is not whole.

    Eight values an access, as to Triton each access is one: the time that it takes to compile grows with their number
    times the square of the kernel's size.
    """
    eights = ()
    for first in tl.static_range(0, UNIT, 8):
        at = begin + first + (tl.arange(0, UNITS) * UNIT)[:, None] + tl.arange(0, 8)[None, :]
        values = tl.load(x_ptr + at, mask=at < count, other=0)
        even, odd = wire_units.evens_and_odds(values)
        eights = eights + (wire_units.pair_of_bits(even, odd),)
    return eights


@triton.jit
def narrowed(eights, FROM: tl.constexpr, T: tl.constexpr, MAX: tl.constexpr):
    """Pairs of FROM as pairs of T, finite values at most MAX."""
    found = ()
    for i in tl.static_range(len(eights)):
        first = narrow(wire_units.first_of(eights[i], FROM), MAX)
        second = narrow(wire_units.second_of(eights[i], FROM), MAX)
        found = found + (wire_units.pair_of(first, second, T),)
    return found


@triton.jit
def narrow(value, MAX: tl.constexpr):
    finite = tl.abs(value) < float("inf")
    return tl.where(finite, tl.minimum(tl.maximum(value, -MAX), MAX), value)


@triton.jit
def recast(pairs, T: tl.constexpr, TO: tl.constexpr):
    """Pairs of T as pairs of TO."""
    if T == TO:
        return pairs
    else:
        return wire_units.pair_of(wire_units.first_of(pairs, T), wire_units.second_of(pairs, T), TO)


@triton.jit
def store_values(out_ptr, pairs, begin, count, GROUPS: tl.constexpr):
    """Stores the pairs [GROUPS * 4, 4] of a buffer, but for what is beyond the end."""
    if begin + GROUPS * 32 <= count:
        first = (out_ptr + begin).to(tl.pointer_type(tl.int32))
        wire_units.store_words(tl.multiple_of(first, 16), pairs)
    else:
        values = tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), (GROUPS * 4, 8))
        at = begin + (tl.arange(0, GROUPS * 4) * 8)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(out_ptr.to(tl.pointer_type(tl.int16)) + at, values, mask=at < count)
