# SPDX-License-Identifier: Apache-2.0
"""Rows that travel between GPUs without flags: a word of two values is there once it is not zero.

A flag costs two latencies: its release, a round trip over the link, and its own way. Lamport's queue needs neither, as
what is awaited says itself that it is there.

**Memory.** At the end of `quick_reduce`'s region, zeros at first as all of it:

    lamport[parity of the call][rank that sends][row][columns]        pairs of values, 32-bit words

**Words.** Zero is what is not there, so the word of two +0.0 travels as two -0.0. No bit of a sum depends on it: sums
begin with +0.0, and rounding to nearest makes -0.0 of two -0.0 alone, so no sum ever is one, and zeros of either sign
leave all others as they are. Everything else, NaN's bits too, travels as it is.

Two shots need no more memory: in the first a row lies at its owner alone, in the second its sum lies at everybody else,
where that owner's row would. A sum keeps the sign of its zeros, so it travels with all bits inverted; what were zero
then, two NaNs of all bits, its owner makes two other NaNs.

**Calls** are those of `quick_reduce`, which may come between: here too every rank awaits every rank, in row 0, or the
sum from its owner, who has. Who has received a row makes its words zero again. So who writes to a parity in call k + 2
finds zeros: it has finished call k + 1, so everybody has begun that one, and finished call k and its zeros. Calls may
have other numbers of rows and columns, and shots, since each leaves zeros alone.

**Order.** None is needed between words; each is written once and read until it is there, and the values that were seen
are those that are used. Words are written and read at the scope of the system: 32 bits of a vector are never torn.
NVIDIA: stores .wt and volatile loads, in machine code both STRONG.SYS, which no L1 holds. AMD: stores are written
through (sc0 sc1), as nobody would write a dirty line of an L2 back; gfx90a, whose stores cannot say so, is told to
write its L2 back, and not awaited. A look invalidates as an acquire of a flag does, before plain loads. The zeros,
stores like the others, are done when their kernel ends, before the rank's next call begins, and so before all that it
sends there.

**Lost ranks** are looked for and reported as in `quick_reduce`, by the words that are not there. A look at words takes
longer than one at a flag, whose time patience is counted by. What did come of a row stays then, so that those who await
its sum see in the owner's memory for whom it waits.
"""

import triton
import triton.language as tl

from llm_quant_rocm.kernels import wire_units

# The word of two -0.0, which adds nothing.
ZEROS = tl.constexpr(-2147450880)  # 0x80008000


@triton.jit
def place(call, source, row, lamport_at, LAMPORT_BYTES: tl.constexpr, WORLD: tl.constexpr, COLUMNS: tl.constexpr):
    """Where in a region a row of `source` lies."""
    piece = ((call & 1) * WORLD + source) * LAMPORT_BYTES
    return tl.cast(lamport_at, tl.int64) + piece + row * (COLUMNS * 2)


@triton.jit
def not_zero(words):
    """Words that add as much, ZEROS for zero."""
    return tl.where(words == 0, ZEROS, words)


@triton.jit
def send(to, at, blocks, sending, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores a row, blocks of words [BLOCK / 8, 4], at `at` of regions, if `sending`.

    A mask and no branch, behind which its loads would begin when those of the state have ended."""
    for i in tl.static_range(len(blocks)):
        for turn in tl.static_range(len(to)):
            store_fours(to[turn] + at, 0, blocks[i], i, sending, COLUMNS, BLOCK)
    if is_cdna2():
        tl.inline_asm_elementwise("buffer_wbl2", "=v,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def receive(
    first, patience, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LAMPORT_BYTES: tl.constexpr, SOURCES: tl.constexpr,
    BEYOND: tl.constexpr = ZEROS
):  # fmt: skip
    """Awaits a row from SOURCES ranks, the first one's at the address `first`. Words beyond it are BEYOND, which is not
    zero.

    Returns blocks of all ranks' words [BLOCK / 8, 4], one rank's after another's, and the first rank whose words did
    not come, or SOURCES. Whoever reports a lost rank does so before `clear`: behind its stores, Triton's AMD backend
    would hold the addresses of a look in vector registers, and look at one rank after another."""
    words = ()
    for _ in tl.static_range(SOURCES * ((COLUMNS + BLOCK - 1) // BLOCK)):
        words = words + (tl.zeros((BLOCK // 8, 4), tl.int32),)
    absent, looks = 0, 0
    while (absent < SOURCES) & (looks <= patience):
        words, absent = look(first, COLUMNS, BLOCK, LAMPORT_BYTES, SOURCES, BEYOND)
        looks += 1
    return words, absent


@triton.jit
def look(
    first, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LAMPORT_BYTES: tl.constexpr, SOURCES: tl.constexpr,
    BEYOND: tl.constexpr = ZEROS
):  # fmt: skip
    """The words that are in a row's place by now, and the first rank of which one is not there; SOURCES if none."""
    if tl.target_info.is_hip():
        FRESH: tl.constexpr = "buffer_invl2\nbuffer_wbinvl1_vol" if is_cdna2() else "buffer_inv sc0 sc1"
        tl.inline_asm_elementwise(FRESH, "=v,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)
    words = ()
    absent = tl.full((BLOCK // 8, 4), SOURCES, tl.int32)
    for i in tl.static_range((COLUMNS + BLOCK - 1) // BLOCK):
        for source in tl.static_range(SOURCES):
            found = load_fours(first, source * LAMPORT_BYTES, i, COLUMNS, BLOCK, BEYOND)
            absent = tl.minimum(absent, tl.where(found == 0, source, SOURCES))
            words = words + (found,)
    return words, tl.min(tl.reshape(absent, (BLOCK // 2,)), axis=0)


@triton.jit
def clear(
    first, clearing, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LAMPORT_BYTES: tl.constexpr, SOURCES: tl.constexpr
):  # fmt: skip
    """Zeros for ranks' words of a row, if `clearing`."""
    zeros = tl.zeros((BLOCK // 8, 4), tl.int32)
    for i in tl.static_range((COLUMNS + BLOCK - 1) // BLOCK):
        for source in tl.static_range(SOURCES):
            store_fours(first, source * LAMPORT_BYTES, zeros, i, clearing, COLUMNS, BLOCK)


@triton.constexpr_function
def is_cdna2():
    """Whether this is for gfx90a."""
    info = tl.target_info
    return info.is_hip() and not (info.is_hip_cdna3() or info.is_hip_cdna4())


@triton.jit
def fours(row, OFFSET: tl.constexpr, i: tl.constexpr, BLOCK: tl.constexpr):
    """Where the words of block i of a row lie that begins OFFSET bytes behind an address.

    One offset to one pointer, of which Triton makes AMD's buffer instructions; those to global memory that are written
    through are waited for one by one."""
    place = tl.arange(0, BLOCK // 8)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return wire_units.pointer(row, tl.int32, OFFSET + i * BLOCK * 2) + place


@triton.jit
def there(i: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Which words of block i are in a row."""
    return i * (BLOCK // 2) + tl.arange(0, BLOCK // 8)[:, None] * 4 + tl.arange(0, 4)[None, :] < COLUMNS // 2


@triton.jit
def load_fours(
    row, OFFSET: tl.constexpr, i: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BEYOND: tl.constexpr
):  # fmt: skip
    """The words [BLOCK / 8, 4] of block i of a row (`fours`), BEYOND beyond it."""
    VOLATILE: tl.constexpr = not tl.target_info.is_hip()
    place = fours(row, OFFSET, i, BLOCK)
    if (i + 1) * BLOCK <= COLUMNS:
        return tl.load(place, volatile=VOLATILE)
    else:
        return tl.load(place, mask=there(i, COLUMNS, BLOCK), other=BEYOND, volatile=VOLATILE)


@triton.jit
def store_fours(
    row, OFFSET: tl.constexpr, words, i: tl.constexpr, storing, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores what `load_fours` loads, if `storing`."""
    place = fours(row, OFFSET, i, BLOCK)
    if (i + 1) * BLOCK <= COLUMNS:
        tl.store(place, words, mask=storing, cache_modifier=".wt")
    else:
        tl.store(place, words, mask=there(i, COLUMNS, BLOCK) & storing, cache_modifier=".wt")
