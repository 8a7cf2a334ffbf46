# SPDX-License-Identifier: Apache-2.0
"""`formats.wire` in device code, a lane at a time: packing and unpacking never leave a lane.

A unit is what one lane encodes: a group of 32 values; half of one where codes have 8 bits, and 8 values in the codec
FP, so that its words of a plane are at most 16 bytes, and neighbouring lanes write neighbouring bytes. Values travel in
pairs, int32 words of two neighbouring ones, as they lie in memory; a tensor [UNITS, 4] holds the pairs of 8 values of
each of so many units, a power of two, and a tuple of COUNT such tensors, its eights, the values of units. The words of
a plane are one tensor [UNITS, 4], [UNITS, 2] or [UNITS].

What is done alike with several words of a lane is done once, with all of them in one tensor: Triton's passes take the
square of a kernel's operations. But who adds units takes eight after eight: the sums of all at once need more registers
than an AMD GPU has for two waves.

Groups that hold NaN or infinities, or whose scale is so small that its reciprocal might overflow, are rare. A program
looks whether one of its groups is such; only then are these rewritten, to values that need no special care.

Kernels that call `encode` are launched with enable_fp_fusion=False: products round before they are converted.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.wire import Codec, largest_scale

FP, INT, E2M1, E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_KINDS = {"FP": FP, "FP4": E2M1, "FP8": E4M3}
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def constants(codec: Codec, dtype: torch.dtype) -> dict[str, Any]:
    """What kernels know of a codec for values that travel as `dtype`, as constexprs by name.

    KIND: how values become codes; LIMIT: the code of the largest magnitude; CAP: the largest scale; LOW and HIGH: bits
    of the planes, 0 for one that is not there; T: the values' type.
    """
    low, high = (*codec.planes, 0, 0)[:2]
    return {
        "KIND": _KINDS.get(codec.name, INT).value,
        "LIMIT": int(codec.limit),
        "CAP": largest_scale(codec, dtype) if codec.quantizes else 0.0,
        "LOW": low,
        "HIGH": high,
        "T": TYPES[dtype],
    }


@cache
def unit_values_of(codec: Codec) -> int:
    """Values of a unit, for the host."""
    return unit_values(codec.planes[0] if codec.planes else 0)


@triton.constexpr_function
def unit_values(LOW):
    """Values of a unit, by the bits of the low plane (0: codec FP)."""
    return 8 if LOW == 0 else 16 if LOW == 8 else 32


@triton.constexpr_function
def buffer_bytes(GROUPS, LOW, HIGH):
    """Bytes of a buffer."""
    return GROUPS * (64 if LOW == 0 else 4 * (LOW + HIGH) + 2)


@triton.jit
def load_eights(first, UNITS: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr = None):
    """The values of units that lie one after the other from `first` on, an int32 pointer: COUNT eights.

    WORDS are there, by eights, all of them if None; others are 0.
    """
    eights = ()
    for i in tl.static_range(COUNT):
        eights = eights + (load_words(first, UNITS, 4, WORDS, COUNT * 4, i * 4),)
    return eights


@triton.jit
def load_words(
    first, UNITS: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr = None, STRIDE: tl.constexpr = None,
    START: tl.constexpr = 0
):  # fmt: skip
    """COUNT words of each unit, [UNITS, COUNT], or [UNITS] of one; all that a unit has, or those from START on of
    STRIDE. WORDS as in `load_eights`."""
    EVERY: tl.constexpr = COUNT if STRIDE is None else STRIDE
    place = first + places(UNITS, COUNT, EVERY, START)
    if WORDS is None or WORDS >= UNITS * EVERY:
        return tl.load(place)
    else:
        return tl.load(place, mask=places(UNITS, COUNT, EVERY, START, True) < WORDS, other=0)


@triton.jit
def store_words(first, words, WORDS: tl.constexpr = None):
    """Stores what `load_words` loads."""
    UNITS: tl.constexpr = words.shape[0]
    COUNT: tl.constexpr = words.numel // UNITS
    place = first + places(UNITS, COUNT, COUNT, 0)
    if WORDS is None or WORDS >= UNITS * COUNT:
        tl.store(place, words)
    else:
        tl.store(place, words, mask=places(UNITS, COUNT, COUNT, 0, True) < WORDS)


@triton.jit
def places(
    UNITS: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr = False
):  # fmt: skip
    """Where COUNT words of each unit lie, or the FIRST of them: [UNITS, COUNT], or [UNITS, 1], or [UNITS] of one."""
    unit = tl.arange(0, UNITS) * STRIDE + START
    if COUNT == 1:
        return unit
    elif FIRST:
        return unit[:, None]
    else:
        return unit[:, None] + tl.arange(0, COUNT)[None, :]


@triton.jit
def evens_and_odds(x):
    """The columns of even and those of odd numbers of a tensor [..., N], [..., N / 2] each; [...] of two."""
    if x.shape[-1] == 2:
        return tl.split(x)
    else:
        return tl.split(tl.reshape(x, x.shape[:-1] + (x.shape[-1] // 2, 2)))


@triton.jit
def split4(words):
    """The columns of a tensor [..., 4]."""
    even, odd = evens_and_odds(words)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def four_times(word):
    """[N, 4] of what is [N]."""
    twice = tl.join(word, word)
    return tl.reshape(tl.join(twice, twice), (word.shape[0], 4))


@triton.jit
def first_of(pair, T: tl.constexpr):
    """The first values of pairs, fp32."""
    if T.is_bf16():
        return (pair << 16).to(tl.float32, bitcast=True)
    else:
        return pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def second_of(pair, T: tl.constexpr):
    """The second values of pairs, fp32."""
    if T.is_bf16():
        return (pair & -65536).to(tl.float32, bitcast=True)
    else:
        return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pair_of(first, second, T: tl.constexpr):
    """Pairs of fp32 values, rounded to T."""
    if tl.target_info.is_cuda():
        # One instruction, of which Triton makes four
        ptx: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if T.is_bf16() else "cvt.rn.f16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(ptx, "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1)
    elif tl.target_info.is_hip_cdna4():
        amd: tl.constexpr = "v_cvt_pk_bf16_f32 $0, $1, $2" if T.is_bf16() else "v_cvt_pk_f16_f32 $0, $1, $2"
        return tl.inline_asm_elementwise(amd, "=v,v,v", [first, second], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return pair_of_bits(first.to(T).to(tl.int16, bitcast=True), second.to(T).to(tl.int16, bitcast=True))


@triton.jit
def pair_of_bits(first, second):
    """Pairs of int16."""
    return (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)


@triton.jit
def encode(
    x, KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    T: tl.constexpr
):  # fmt: skip
    """The words of the low plane and of the high plane, and the scales [GROUPS] in T, of units `x`, eights of pairs of
    T; () for what the codec has not."""
    if KIND == FP:
        return x[0], (), ()
    else:
        PARTS: tl.constexpr = 32 // unit_values(LOW)
        pairs = pairs_of_units(x)
        positive, negative = extremes(pairs, KIND)
        if PARTS > 1:
            positive, negative = largest(positive, PARTS), largest(negative, PARTS)
        size = tl.maximum(positive, negative)
        top = (second_of(size, T).to(tl.uint32, bitcast=True) << 1) | (negative >= positive).to(tl.uint32)
        scale = scales(top, KIND, LIMIT, CAP, T)
        factor = reciprocal(scale)
        broken = size >= (0x7F800000 if T.is_bf16() else 0x7C000000)
        small = (tl.abs(scale) < 2.0**-100) & (scale != 0.0)
        if tl.max((broken | small).to(tl.int32), axis=0) != 0:
            factor = tl.where(small, reciprocal(scale * 2.0**64), tl.where(broken, 1.0 * LIMIT, factor))
            pairs = plain(pairs, per_unit(small, PARTS), per_unit(broken, PARTS), T)
        low, high = pack(pairs, per_unit(factor, PARTS), KIND, LIMIT, LOW, HIGH, T)
        return low, high, tl.where(broken, float("inf"), scale).to(T)


@triton.jit
def pairs_of_units(eights):
    """int32 [UNITS, COUNT, 4] of COUNT eights."""
    if len(eights) == 2:
        words = tl.join(eights[0], eights[1])
    else:
        words = tl.join(tl.join(eights[0], eights[2]), tl.join(eights[1], eights[3]))
        words = tl.reshape(words, (eights[0].shape[0], 4, 4))
    return tl.permute(words, (0, 2, 1))


@triton.jit
def scales(top, KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, dtype: tl.constexpr):
    """Scales of finite groups, fp32 [GROUPS], from their values of largest magnitude, bits << 1 | sign."""
    size = (top >> 1).to(tl.float32, bitcast=True) * (1.0 / LIMIT)
    if dtype == tl.bfloat16:
        scale = ((size.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    else:
        half = size.to(tl.float16)
        bits = half.to(tl.int16, bitcast=True)
        scale = tl.where(half.to(tl.float32) < size, bits + 1, bits).to(tl.float16, bitcast=True).to(tl.float32)
    scale = tl.minimum(scale, CAP)
    if KIND == INT:
        scale = tl.where((top & 1) != 0, scale, 0.0 - scale)  # 0 - 0 is +0
    return scale


@triton.jit
def extremes(pairs, KIND: tl.constexpr):
    """The largest magnitudes of values that are not negative, and of negative ones, int32 [UNITS]: bits of T in the
    high half. NaN is the largest. Codecs without a signed scale need but one, and get it twice."""
    if KIND == INT:
        # Among signed numbers the largest is a value not negative, if there is one; among unsigned ones a negative one.
        positive = tl.maximum(largest_half(pairs, True), 0)
        negative = largest_half(pairs, False).to(tl.int32, bitcast=True)
        return positive & 0x7FFF0000, tl.where(negative < 0, negative & 0x7FFF0000, 0)
    else:
        size = largest_half(pairs & 0x7FFF7FFF, True) & 0x7FFF0000
        return size, size


@triton.jit
def largest_half(pairs, SIGNED: tl.constexpr):
    """The largest of the halves of the words of units, int32 or uint32, with anything in the low half."""
    UNITS: tl.constexpr = pairs.shape[0]
    COUNT: tl.constexpr = pairs.numel // UNITS
    words = tl.reshape(pairs, (UNITS, COUNT))
    for _ in tl.static_range(3 if COUNT == 8 else 4):
        left, right = evens_and_odds(words)
        words = larger_halves(left, right, SIGNED)
    AS: tl.constexpr = tl.int32 if SIGNED else tl.uint32
    return tl.maximum(words.to(AS, bitcast=True), (words << 16).to(AS, bitcast=True))


@triton.jit
def larger_halves(a, b, SIGNED: tl.constexpr):
    """Words of the larger of either half of two words."""
    if tl.target_info.is_hip():
        amd: tl.constexpr = "v_pk_max_i16 $0, $1, $2" if SIGNED else "v_pk_max_u16 $0, $1, $2"
        return tl.inline_asm_elementwise(amd, "=v,v,v", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    elif tl.target_info.cuda_capability_geq(9):
        ptx: tl.constexpr = "max.s16x2 $0, $1, $2;" if SIGNED else "max.u16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(ptx, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        AS: tl.constexpr = tl.int32 if SIGNED else tl.uint32
        high = tl.maximum(a.to(AS, bitcast=True), b.to(AS, bitcast=True)).to(tl.int32, bitcast=True)
        low = tl.maximum((a << 16).to(AS, bitcast=True), (b << 16).to(AS, bitcast=True)).to(tl.int32, bitcast=True)
        return (high & -65536) | ((low >> 16) & 0xFFFF)


@triton.jit
def largest(size, PARTS: tl.constexpr):
    """The maxima of groups [UNITS / PARTS]."""
    return tl.max(tl.reshape(size, (size.shape[0] // PARTS, PARTS)), axis=1)


@triton.jit
def per_unit(value, PARTS: tl.constexpr):
    """What belongs to groups, for their units."""
    if PARTS == 1:
        return value
    else:
        wide = tl.broadcast_to(value[:, None], (value.shape[0], PARTS))
        return tl.reshape(wide, (value.shape[0] * PARTS,))


@triton.jit
def reciprocal(scale):
    """1 / scale to nearest, of bf16 or fp16 numbers that have one; 0 of 0."""
    # One step makes any guess within 4 units of the last place exact, for every significand of 11 bits.
    guess = 1.0 / scale
    error = tl.fma(-scale, guess, tl.full(scale.shape, 1.0, tl.float32))
    return tl.where(scale == 0.0, 0.0, tl.fma(guess, error, guess))


@triton.jit
def plain(pairs, small, broken, T: tl.constexpr):
    """Pairs of units where small ones are larger by 2**64, and in broken ones infinities 1 or -1 and all else 0."""
    INFINITE: tl.constexpr = 0x7F807F80 if T.is_bf16() else 0x7C007C00
    ONE: tl.constexpr = 0x3F80 if T.is_bf16() else 0x3C00
    # The top bits of halves that are infinite: all others differ, and what differs sets it in the sum.
    infinite = ~(((pairs & 0x7FFF7FFF) ^ INFINITE) + 0x7FFF7FFF) & -2147450880
    marks = (((infinite >> 15) & 0x00010001) * ONE) | (pairs & infinite)
    if T.is_bf16():  # no scale in fp16 is so small
        larger = pair_of(first_of(pairs, T) * 2.0**64, second_of(pairs, T) * 2.0**64, T)
        pairs = tl.where(small[:, None, None], larger, pairs)
    return tl.where(broken[:, None, None], marks, pairs)


@triton.jit
def pack(
    pairs, factor, KIND: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """The words of both planes of units times `factor` [UNITS], whose products are at most LIMIT and a little.

    Args:
        pairs: as of `pairs_of_units`.
    """
    sizes = pairs & 0x7FFF7FFF if KIND == E2M1 else pairs
    first, second = codes(first_of(sizes, T), factor, KIND, LIMIT), codes(second_of(sizes, T), factor, KIND, LIMIT)
    if HIGH != 0:
        low, high = fields(first, second, LOW, 0, (1 << LOW) - 1), fields(first, second, HIGH, LOW, (1 << HIGH) - 1)
        return plane_words(low, LOW), plane_words(high, HIGH)
    elif LOW == 8:
        # 2**23's exponent, added by each field of an integer
        low = fields(first, second, LOW, 0, -1) - (0 if KIND == E4M3 else 0x4B000000)
        return tl.reshape(low, (low.shape[0], 4)), ()
    else:
        # The same: 0x4B000000 and, shifted by 4, 0xB0000000
        low = fields(first, second, LOW, 0, -1) + 0x05000000
        if KIND == E2M1:
            low |= e2m1_signs(pairs)
        return plane_words(low, LOW), ()


@triton.jit
def fields(first, second, BITS: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """The fields of the codes of both values of pairs [UNITS, COUNT, 4], (code >> SHIFT) & MASK each, where they lie in
    words of a plane: [UNITS, COUNT, 2] of 8 bits; else [UNITS, COUNT], in the first word."""
    i = tl.arange(0, 4)[None, None, :]
    place = 16 * (i % 2) if BITS == 8 else 16 * (i // 2) + 2 * BITS * (i % 2)
    bits = (((first >> SHIFT) & MASK) << place) + (((second >> SHIFT) & MASK) << (place + BITS))
    even, odd = evens_and_odds(bits)
    if BITS == 8:
        return even + odd
    else:
        left, right = tl.split(even + odd)
        return left + right


@triton.jit
def plane_words(eights, BITS: tl.constexpr):
    """The words of a plane of at most 4 bits, of the `fields` of units' eights [UNITS, 4]."""
    if BITS == 4:
        return eights
    else:
        even, odd = evens_and_odds(eights)
        words = even | (odd << (4 * BITS))
        if BITS == 2:
            return words
        else:
            left, right = tl.split(words)
            return left | (right << (8 * BITS))


@triton.jit
def codes(values, factor, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """The codes of values of units times `factor`: below the bits of the float 2**23, or for E4M3 alone; of E2M1
    without sign."""
    factor = tl.broadcast_to(factor[:, None, None], values.shape)
    if KIND == INT:
        # One FMA rounds the exact product to an integer
        rounded = tl.fma(values, factor, tl.full(values.shape, 8388608.0 + LIMIT, tl.float32))
        return tl.minimum(rounded, 8388607.0 + 2 * LIMIT).to(tl.int32, bitcast=True)
    elif KIND == E2M1:
        # The code is the nearest integer to the least of 2 y, y + 2 and y / 2 + 4
        y = values * factor
        twice = tl.fma(y, tl.full(y.shape, 2.0, tl.float32), tl.full(y.shape, 8388608.0, tl.float32))
        half = tl.fma(y, tl.full(y.shape, 0.5, tl.float32), tl.full(y.shape, 8388612.0, tl.float32))
        return tl.minimum(tl.minimum(twice, y + 8388610.0), half).to(tl.int32, bitcast=True)
    else:
        return e4m3_codes(values * factor)


@triton.jit
def e4m3_codes(y):
    """E4M3 codes (int32, OCP) of y, fp32 up to 256 and a little, to nearest even; -0 becomes 0."""
    size = tl.abs(y)
    raw = size.to(tl.int32, bitcast=True)
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 15  # 16384's last bit is 2**-9
    code = tl.where(size < 2.0**-6, subnormal, normal)
    return tl.where(code == 0, 0, code | ((y.to(tl.int32, bitcast=True) >> 24) & 128))


@triton.jit
def e2m1_signs(pairs):
    """The sign bits of the words [UNITS, COUNT] of codes of eights, from those of their pairs."""
    first, second, third, fourth = split4(pairs)
    left, right = bytes_of(first, second, 0x7351), bytes_of(third, fourth, 0x7351)
    even, odd = bytes_of(left, right, 0x5410), bytes_of(left, right, 0x7632)
    return ((even >> 4) & 0x08080808) | (odd & -2139062144)


@triton.jit
def bytes_of(a, b, SELECT: tl.constexpr):
    """Words of four of the bytes of a (0 to 3) and b (4 to 7), which SELECT's digits name, the lowest byte's last."""
    if tl.target_info.is_cuda():
        select = tl.full(a.shape, SELECT, tl.int32)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, select], tl.int32, is_pure=True, pack=1
        )
    elif SELECT == 0x7351:
        return ((a >> 8) & 0x00FF00FF) | (b & -16711936)
    elif SELECT == 0x5410:
        return (a & 0xFFFF) | (b << 16)
    else:
        tl.static_assert(SELECT == 0x7632)
        return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def numbers(low, high, KIND: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr):
    """What 8 neighbouring codes stand for, the first four and the last, fp32 [N, 4]; in the codec FP the values, the
    even and the odd ones.

    Args:
        low: what holds them of the low plane: of FP pairs [N, 4], of planes of 8 bits two words [N], a tuple, and else
            one, shifted so that theirs are the lowest fields of both halves.
        high: the word of the high plane, shifted likewise, or ().
    """
    if KIND == FP:
        return first_of(low, T), second_of(low, T)
    elif LOW == 8:
        return byte_numbers(low[0], KIND, LIMIT), byte_numbers(low[1], KIND, LIMIT)
    else:
        # Pairs of values i and i + 4, as bf16
        i = tl.arange(0, 4)[None, :]
        word = four_times(low)
        if KIND == E2M1:
            # The bf16 with these bits is the number / 2**126
            size = (word << tl.maximum(6 - 4 * i, 0)) >> tl.maximum(4 * i - 6, 0)
            pairs = (size & 0x01C001C0) | ((word << (12 - 4 * i)) & -2147450880)
            return first_of(pairs, tl.bfloat16) * 2.0**126, second_of(pairs, tl.bfloat16) * 2.0**126
        else:
            pairs = (word >> (LOW * i)) & (((1 << LOW) - 1) * 0x00010001)
            if HIGH != 0:
                pairs |= ((four_times(high) >> (HIGH * i)) & (((1 << HIGH) - 1) * 0x00010001)) << LOW
            pairs |= 0x43004300  # 128
            return first_of(pairs, tl.bfloat16) - (128.0 + LIMIT), second_of(pairs, tl.bfloat16) - (128.0 + LIMIT)


@triton.jit
def byte_numbers(word, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """What the 4 codes of words [N] stand for, fp32 [N, 4]."""
    field = (four_times(word) >> (8 * tl.arange(0, 4))[None, :]) & 0xFF
    if KIND == INT:
        return (field | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LIMIT)
    else:
        # The fp16 with these bits is the number / 2**8
        bits = ((field & 127) << 7) | ((field & 128) << 8)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def pairs_of_numbers(first, second, KIND: tl.constexpr, T: tl.constexpr):
    """The pairs of T, int32 [N, 4], of what `numbers` returns."""
    if KIND == FP:
        return pair_of(first, second, T)
    else:
        pairs = tl.join(pairs_of_four(first, T), pairs_of_four(second, T))
        return tl.reshape(tl.permute(pairs, (0, 2, 1)), (first.shape[0], 4))


@triton.jit
def pairs_of_four(values, T: tl.constexpr):
    even, odd = evens_and_odds(values)
    return pair_of(even, odd, T)


@triton.constexpr_function
def there(GROUPS, PART):
    """Groups of a tensor of GROUPS, which stands for a PART of a buffer, that are in the buffer and travel."""
    return GROUPS if PART is None else max(0, min(GROUPS, PART[2] - PART[0]))


@triton.constexpr_function
def plane_start(GROUPS, PART, BYTES, BEFORE):
    """Where in a buffer what a tensor of GROUPS has of a plane of BYTES a group begins, with BEFORE a group before."""
    first, groups = (0, GROUPS) if PART is None else PART[:2]
    return groups * BEFORE + first * BYTES


@triton.jit
def store_parts(buffer, parts, LOW: tl.constexpr, HIGH: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr = None):
    """Stores what `encode` returns at `buffer`, an address (int64) that 16 divides.

    Args:
        PART: (first, groups, sent) where the GROUPS are but a part of a buffer: its first group, and the buffer's
            groups, multiples of 8, of which only the first `sent` travel. None: they are the buffer.
    """
    low, high, scale = parts
    THERE: tl.constexpr = there(GROUPS, PART)
    BITS: tl.constexpr = 16 if LOW == 0 else LOW
    store_words(pointer(buffer, tl.int32, plane_start(GROUPS, PART, 4 * BITS, 0)), low, THERE * BITS)
    if LOW != 0:
        if HIGH != 0:
            first = pointer(buffer, tl.int32, plane_start(GROUPS, PART, 4 * HIGH, 4 * LOW))
            store_words(first, high, THERE * HIGH)
        scales_at = pointer(buffer, scale.dtype, plane_start(GROUPS, PART, 2, 4 * (LOW + HIGH)))
        group = tl.arange(0, GROUPS)
        if THERE == GROUPS:
            tl.store(scales_at + group, scale)
        else:
            tl.store(scales_at + group, scale, mask=group < THERE)


@triton.jit
def load_parts(
    buffer, EIGHTS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr, GROUPS: tl.constexpr,
    PART: tl.constexpr = None
):  # fmt: skip
    """What `encode` returns, from `buffer`, an address (int64) that 16 divides, for units, or for every 8 values; the
    scales are fp32 and as many. FP has none. What does not travel (PART, as in `store_parts`) decodes to zeros."""
    VALUES: tl.constexpr = 8 if EIGHTS else unit_values(LOW)
    lane = tl.arange(0, GROUPS * 32 // VALUES)
    low = load_plane(buffer, VALUES, LOW if LOW != 0 else 16, 0, GROUPS, PART)
    if LOW == 0:
        return low, (), ()
    else:
        high = ()
        if HIGH != 0:
            high = load_plane(buffer, VALUES, HIGH, 4 * LOW, GROUPS, PART)
        START: tl.constexpr = plane_start(GROUPS, PART, 2, 4 * (LOW + HIGH))
        group = lane // (32 // VALUES)
        # With fewer values than a group's a lane, so that decoded values need not move: no hint at the alignment
        scale_ptr = pointer(buffer, T, START) if VALUES == 32 else (buffer + START).to(tl.pointer_type(T))
        if there(GROUPS, PART) == GROUPS:
            return low, high, tl.load(scale_ptr + group).to(tl.float32)
        else:
            return low, high, tl.load(scale_ptr + group, mask=group < there(GROUPS, PART), other=0.0).to(tl.float32)


@triton.jit
def load_plane(
    buffer, VALUES: tl.constexpr, BITS: tl.constexpr, BEFORE: tl.constexpr, GROUPS: tl.constexpr,
    PART: tl.constexpr
):  # fmt: skip
    """The words that lanes of VALUES values need of the plane behind BEFORE bytes a group."""
    START: tl.constexpr = plane_start(GROUPS, PART, 4 * BITS, BEFORE)
    WORDS: tl.constexpr = there(GROUPS, PART) * BITS
    LANES: tl.constexpr = GROUPS * 32 // VALUES
    if VALUES * BITS > 32:
        return load_words(pointer(buffer, tl.int32, START), LANES, VALUES * BITS // 32, WORDS)
    elif VALUES * BITS == 32:
        # One word a lane, so that decoded values need not move: no hint at the alignment
        return load_words((buffer + START).to(tl.pointer_type(tl.int32)), LANES, 1, WORDS)
    else:
        # Several lanes share a word
        lane = tl.arange(0, LANES)
        SHARE: tl.constexpr = 32 // (VALUES * BITS)
        first = (buffer + START).to(tl.pointer_type(tl.int32))
        if there(GROUPS, PART) == GROUPS:
            word = tl.load(first + lane // SHARE)
        else:
            word = tl.load(first + lane // SHARE, mask=lane // SHARE < WORDS, other=0)
        return word >> (16 // SHARE * (lane % SHARE))


@triton.jit
def eighth(parts, index: tl.constexpr, EIGHTS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Of parts of units (or of EIGHTS) what `numbers` needs for their 8 values of this index, and the scales."""
    low, high, scale = parts
    if LOW == 0:
        return low, (), ()
    elif LOW == 8:
        if EIGHTS:
            return tl.split(low), (), scale
        else:
            words = split4(low)
            return (words[2 * index], words[2 * index + 1]), (), scale
    elif EIGHTS:
        return low, high, scale
    elif HIGH == 0:
        return word_of(low, index, LOW), (), scale
    else:
        return word_of(low, index, LOW), word_of(high, index, HIGH), scale


@triton.jit
def word_of(words, index: tl.constexpr, BITS: tl.constexpr):
    """Of the words of a plane of at most 4 bits, the one that holds an eight's fields, which are shifted down."""
    if BITS == 4:
        return split4(words)[index]
    elif BITS == 2:
        return tl.split(words)[index // 2] >> (8 * (index % 2))
    else:
        return words >> (4 * index)


@triton.jit
def decode(
    buffer, KIND: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr,
    TO: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr = None
):  # fmt: skip
    """The values in a buffer, pairs of TO: an eight of every 8, int32 [4 * GROUPS, 4]. PART as in `load_parts`."""
    parts = load_parts(buffer, True, LOW, HIGH, T, GROUPS, PART)
    if KIND == FP and T == TO:
        return parts[0]
    else:
        low, high, scale = eighth(parts, 0, True, LOW, HIGH)
        first, second = numbers(low, high, KIND, LIMIT, LOW, HIGH, T)
        if KIND != FP:
            scales = four_times(scale)
            first, second = scaled(first, scales, KIND), scaled(second, scales, KIND)
        return pairs_of_numbers(first, second, KIND, TO)


@triton.jit
def scaled(number, scale, KIND: tl.constexpr):
    if KIND == INT:
        return tl.fma(number, scale, tl.zeros(number.shape, tl.float32))  # no -0
    else:
        return number * scale


@triton.jit
def pointer(start, T: tl.constexpr, OFFSET: tl.constexpr = 0):
    """A pointer to T, OFFSET bytes behind an address (int64); 16 divides both.

    OFFSET is added to the pointer: Triton's AMD backend forgets the alignment of an address plus a constant.
    """
    return tl.multiple_of(start.to(tl.pointer_type(T)), 16) + OFFSET // (T.primitive_bitwidth // 8)
