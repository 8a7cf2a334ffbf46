# SPDX-License-Identifier: Apache-2.0
"""`formats.wire` in device code: the same bytes, on every GPU.

A tile is [GROUPS, 32] values in registers, GROUPS a power of two and a multiple of 8. Its encoding is a tuple of
tensors, the parts of a buffer in their order: one or two planes, int32 [GROUPS, bits] each, and the scales [GROUPS] in
the values' type; for the codec FP the values alone.

Kernels that call `encode` are launched with enable_fp_fusion=False: products round before they are converted.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.wire import Codec, largest_scale

FP, INT, E2M1, E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_KINDS = {"FP": FP, "FP4": E2M1, "FP8": E4M3}
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
        "T": _TYPES[dtype],
    }


@triton.jit
def encode(x, KIND: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The parts of values x [GROUPS, 32], bf16 or fp16."""
    if KIND == FP:
        return (x,)
    else:
        wide = x.to(tl.float32)
        bits = wide.to(tl.uint32, bitcast=True)
        # By magnitude, and of two that are equal the negative one: it gives INT codes a positive scale.
        top = tl.max((bits << 1) | (bits >> 31), axis=1)
        broken = (top >> 1) >= 0x7F800000  # by infinities and NaN
        scale = scales(top, KIND, LIMIT, CAP, x.dtype)
        lifted = scale
        if x.dtype == tl.bfloat16:
            # 1 / scale might overflow
            lift = tl.where(tl.abs(scale) < 2.0**-64, 2.0**64, 1.0)
            wide = wide * lift[:, None]
            lifted = scale * lift
        factor = tl.where(scale == 0.0, 0.0, tl.math.div_rn(1.0, lifted))
        infinity = (bits << 1) == 0xFF000000
        mark = tl.where(infinity, tl.where(bits >= 0x80000000, -LIMIT, LIMIT), 0)
        if KIND == INT:
            wide, factor = tl.broadcast(wide, factor[:, None])
            # One FMA rounds the exact product to an integer in the low bits of 1.5 * 2**23 + product.
            q = (
                tl.fma(wide, factor, tl.full(wide.shape, 12582912.0, tl.float32)).to(tl.int32, bitcast=True)
                - 0x4B400000
            )
            q = tl.where(broken[:, None], mark, q)
            codes = tl.minimum(tl.maximum(q, -LIMIT), LIMIT - 1) + LIMIT
        else:
            y = tl.where(broken[:, None], mark.to(tl.float32), wide * factor[:, None])
            codes = e2m1_codes(y) if KIND == E2M1 else e4m3_codes(y)
        scale = tl.where(broken, float("inf"), scale).to(x.dtype)
        low = pack(codes & ((1 << LOW) - 1), LOW)
        if HIGH == 0:
            return low, scale
        else:
            return low, pack(codes >> LOW, HIGH), scale


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
def e2m1_codes(y):
    """FP4 codes (int32) of y, fp32 up to 6 and a little, to nearest even."""
    size = tl.abs(y)
    # The code is the nearest integer to the least of 2 size, size + 2 and size / 2 + 4. All are exact; 2**23 rounds.
    code = tl.minimum(tl.minimum(size * 2.0 + 8388608.0, size + 8388610.0), size * 0.5 + 8388612.0)
    return (code.to(tl.int32, bitcast=True) & 7) | ((y.to(tl.int32, bitcast=True) >> 28) & 8)


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
def decode(parts, KIND: tl.constexpr, LIMIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The values, fp32 [GROUPS, 32], and what is infinite or NaN where they are: their scales, [GROUPS, 1], or in FP
    they themselves. A zero of an INT codec may be -0."""
    if KIND == FP:
        wide = parts[0].to(tl.float32)
        return wide, wide
    else:
        codes = unpack(parts[0], LOW)
        if HIGH != 0:
            codes |= unpack(parts[1], HIGH) << LOW
        scale = parts[len(parts) - 1].to(tl.float32)[:, None]
        if KIND == INT:
            return (codes - LIMIT).to(tl.float32) * scale, scale
        elif KIND == E2M1:
            # The fp16 with these bits is the number / 2**14.
            half = (((codes & 7) << 9) | ((codes & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)
            return half.to(tl.float32) * 16384.0 * scale, scale
        else:
            half = (((codes & 127) << 7) | ((codes & 128) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
            return half.to(tl.float32) * 256.0 * scale, scale


@triton.jit
def places(BITS: tl.constexpr):
    """Where the fields of a word of a plane begin: int32 [1, 1, 32 / BITS]."""
    field = tl.arange(0, 32 // BITS)
    half, word_part, value = field // 4 % 2, field // 8, field % 4
    place = 8 * field if BITS == 8 else 16 * half + 4 * BITS * word_part + BITS * value
    return place[None, None, :]


@triton.jit
def pack(fields, BITS: tl.constexpr):
    """The words [GROUPS, BITS] of a plane of fields [GROUPS, 32], int32."""
    return tl.sum(tl.reshape(fields, (fields.shape[0], BITS, 32 // BITS)) << places(BITS), axis=2)


@triton.jit
def unpack(words, BITS: tl.constexpr):
    """The fields [GROUPS, 32] of the words [GROUPS, BITS] of a plane, int32.

    Joined, so that a lane keeps all fields of its words; broadcast, they would go one to a lane.
    """
    COUNT: tl.constexpr = 32 // BITS
    fields = tl.tuple([])
    for field in tl.static_range(COUNT):
        start = 8 * field if BITS == 8 else 16 * (field // 4 % 2) + 4 * BITS * (field // 8) + BITS * (field % 4)
        fields += ((words >> start) & ((1 << BITS) - 1),)
    return tl.reshape(joined(fields), (words.shape[0], 32))


@triton.jit
def joined(fields):
    """Tensors, a power of two of them, as the last dimensions of one, in their order."""
    if len(fields) == 1:
        return fields[0]
    else:
        HALF: tl.constexpr = len(fields) // 2
        pairs = tl.tuple([])
        for i in tl.static_range(HALF):
            pairs += (tl.join(fields[i], fields[i + HALF]),)
        return joined(pairs)


@triton.jit
def store_parts(buffer, parts, LOW: tl.constexpr, HIGH: tl.constexpr, GROUPS: tl.constexpr):
    """Stores the parts of a whole buffer of GROUPS groups at `buffer`, an address (int64) that 16 divides."""
    if LOW == 0:
        tl.store(part_pointers(buffer, parts[0].dtype, GROUPS, 32), parts[0])
    else:
        tl.store(part_pointers(buffer, tl.int32, GROUPS, LOW), parts[0])
        if HIGH != 0:
            tl.store(part_pointers(buffer + GROUPS * 4 * LOW, tl.int32, GROUPS, HIGH), parts[1])
        scale = parts[len(parts) - 1]
        at = address(buffer + GROUPS * 4 * (LOW + HIGH), scale.dtype)
        tl.store(at + tl.arange(0, GROUPS), scale)


@triton.jit
def load_parts(buffer, T: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, GROUPS: tl.constexpr):
    """The parts of a whole buffer of GROUPS groups at `buffer`, an address (int64) that 16 divides."""
    if LOW == 0:
        return (tl.load(part_pointers(buffer, T, GROUPS, 32)),)
    else:
        low = tl.load(part_pointers(buffer, tl.int32, GROUPS, LOW))
        scale = tl.load(address(buffer + GROUPS * 4 * (LOW + HIGH), T) + tl.arange(0, GROUPS))
        if HIGH == 0:
            return low, scale
        else:
            return low, tl.load(part_pointers(buffer + GROUPS * 4 * LOW, tl.int32, GROUPS, HIGH)), scale


@triton.jit
def part_pointers(start, T: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers [GROUPS, WIDTH] to a part of T that begins at the address `start`."""
    return address(start, T) + tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def address(start, T: tl.constexpr):
    """An address (int64) that 16 divides, as a pointer to T."""
    # Said of the pointer: what is said of an argument is lost when the function is inlined.
    return tl.multiple_of(start.to(tl.pointer_type(T)), 16)
