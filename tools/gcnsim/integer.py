# SPDX-License-Identifier: Apache-2.0
"""Integer and bit vector instructions, and the selects and compares of every type."""

from collections.abc import Callable

import numpy as np

from gcnsim.registers import U32, U64, Array
from gcnsim.vector import Alu, alu

B5 = np.uint32(31)
M24 = np.uint32(0xFFFFFF)
W32 = np.uint64(32)
ALL_ONES = np.uint32(0xFFFFFFFF)


def bit_reverse(x: Array) -> Array:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        amount, bits = np.uint32(shift), np.uint32(mask)
        x = (x >> amount & bits) | (x & bits) << amount
    return x


def count_ones(x: Array) -> Array:
    return np.bitwise_count(x).astype(U32)


def first_one_high(x: Array) -> Array:
    """Leading zeros of each word, -1 where there is no one (v_ffbh_u32, s_flbit_i32_b32)."""
    exponent = np.frexp(x.astype(np.float64))[1]
    return np.where(x == 0, ALL_ONES, (32 - exponent).astype(U32))


def first_sign_change(x: Array) -> Array:
    """Leading bits that equal the sign, -1 where all do (v_ffbh_i32, s_flbit_i32)."""
    return first_one_high(x ^ (x.view(np.int32) >> 31).view(U32))


def first_one_low(x: Array) -> Array:
    """Trailing zeros of each word, -1 where there is no one (v_ffbl_b32, s_ff1_i32_b32)."""
    return np.where(x == 0, ALL_ONES, count_ones((x & (~x + np.uint32(1))) - np.uint32(1)))


def field_unsigned(x: Array, offset: Array, width: Array) -> Array:
    return x >> (offset & B5) & ((np.uint32(1) << (width & B5)) - np.uint32(1))


def field_signed(x: Array, offset: Array, width: Array) -> Array:
    """The field's top bit repeated; a field of no bits is 0, and what lies beyond bit 31 is the sign (v_bfe_i32)."""
    offset, width = (offset & B5).astype(np.int64), (width & B5).astype(np.int64)
    value = x.view(np.int32).astype(np.int64) >> offset
    spare = 64 - width
    return np.where(width == 0, 0, value << spare.clip(max=63) >> spare.clip(max=63)).astype(np.int32).view(U32)


def permute_bytes(high: Array, low: Array, selector: Array) -> Array:
    """v_perm_b32: each selector byte picks one of eight bytes, a sign of one of four halves, 0 or 255."""
    both = high.astype(U64) << W32 | low
    result = np.zeros(1, U32)
    for byte in range(4):
        choice = (selector >> np.uint32(8 * byte) & np.uint32(255)).astype(U64)
        picked = both >> np.minimum(choice, 7) * np.uint64(8) & np.uint64(255)
        sign = both >> (choice.clip(8, 11) - np.uint64(8)) * np.uint64(16) + np.uint64(15) & np.uint64(1)
        constant = np.where(choice == 12, np.uint64(0), np.uint64(255))
        value = np.where(choice < 8, picked, np.where(choice < 12, sign * np.uint64(255), constant))
        result = result | value.astype(U32) << np.uint32(8 * byte)
    return result


def _half(x: Array) -> Array:
    return x.view(np.uint16).astype(U32)


def _wide(a: Array, b: Array) -> Array:
    return a.astype(U64) << W32 | b


def _multiply_high_unsigned(a: Array, b: Array) -> Array:
    return (a.astype(U64) * b.astype(U64) >> W32).astype(U32)


def _multiply_high_signed(a: Array, b: Array) -> Array:
    return (a.astype(np.int64) * b.astype(np.int64) >> 32).astype(np.int32)


def _signed24(x: Array) -> Array:
    return x << 8 >> 8


def _add_with_carry(a: Array, b: Array, carry: Array | None = None) -> tuple[Array, Array]:
    total = a.astype(U64) + b
    if carry is not None:
        total = total + carry.astype(U64)
    return total.astype(U32), total >> W32 != 0


def _subtract_with_borrow(a: Array, b: Array, borrow: Array | None = None) -> tuple[Array, Array]:
    total = a.astype(np.int64) - b
    if borrow is not None:
        total = total - borrow
    return total.astype(U32), total < 0


def _multiply_add_u64(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = a.astype(U64) * b.astype(U64)
    total = product + c
    return total, total < product


def _multiply_add_i64(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = a.astype(np.int64) * b.astype(np.int64)
    total = product + c
    return total, (product < 0) & (c < 0) & (total >= 0) | (product >= 0) & (c >= 0) & (total < 0)


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _sum_of_differences(a: Array, b: Array, c: Array) -> Array:
    total = c
    for byte in range(4):
        shift = np.uint32(8 * byte)
        x, y = ((v >> shift & np.uint32(255)).astype(np.int32) for v in (a, b))
        total = total + np.abs(x - y).astype(U32)
    return total


def _dot4_signed(a: Array, b: Array, c: Array) -> Array:
    total = c
    for byte in range(4):
        x, y = (v << (24 - 8 * byte) >> 24 for v in (a, b))
        total = total + x * y
    return total


def _dot4_unsigned(a: Array, b: Array, c: Array) -> Array:
    total = c
    for byte in range(4):
        x, y = (v >> np.uint32(8 * byte) & np.uint32(255) for v in (a, b))
        total = total + x * y
    return total


def _dot2_signed(a: Array, b: Array, c: Array) -> Array:
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16) + c


def bit_operation(table: int, kind: str) -> Alu:
    """v_bitop3: any function of three bits, by its truth table; `kind` is the type of all operands."""

    def compute(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(1, a.dtype)
        for row in range(8):
            if table >> row & 1:
                result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result

    return alu(kind, f"{kind} {kind} {kind}", compute)


COMPARES: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: ~(a < b),
}

# The conditions that each kind of number has.
CONDITIONS = {
    "u": "lt eq le gt ne ge",
    "i": "lt eq le gt ne ge",
    "f": "lt eq le gt lg ge o u nge nlg ngt nle neq nlt",
}

INTEGER: dict[str, Alu] = {
    # moves and selects
    "v_mov_b32": alu("u32", "u32", lambda a: a),
    "v_mov_b64": alu("u64", "u64", lambda a: a),
    "v_accvgpr_read_b32": alu("u32", "u32", lambda a: a),
    "v_accvgpr_write_b32": alu("u32", "u32", lambda a: a),
    "v_accvgpr_mov_b32": alu("u32", "u32", lambda a: a),
    "v_cndmask_b32": alu("u32", "u32 u32 mask", lambda a, b, choose: np.where(choose, b, a)),
    # 32-bit arithmetic
    "v_add_u32": alu("u32", "u32 u32", np.add),
    "v_sub_u32": alu("u32", "u32 u32", np.subtract),
    "v_subrev_u32": alu("u32", "u32 u32", lambda a, b: b - a),
    "v_add_i32": alu("i32", "i32 i32", np.add),
    "v_sub_i32": alu("i32", "i32 i32", np.subtract),
    "v_add_i16": alu("i16", "i16 i16", np.add),
    "v_sub_i16": alu("i16", "i16 i16", np.subtract),
    "v_add3_u32": alu("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": alu("u32", "u32 u32 u32", lambda a, b, c: (a << (b & B5)) + c),
    "v_add_lshl_u32": alu("u32", "u32 u32 u32", lambda a, b, c: (a + b) << (c & B5)),
    "v_xad_u32": alu("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_mul_lo_u32": alu("u32", "u32 u32", np.multiply),
    "v_mul_hi_u32": alu("u32", "u32 u32", _multiply_high_unsigned),
    "v_mul_hi_i32": alu("i32", "i32 i32", _multiply_high_signed),
    "v_mul_u32_u24": alu("u32", "u32 u32", lambda a, b: (a & M24) * (b & M24)),
    "v_mul_hi_u32_u24": alu("u32", "u32 u32", lambda a, b: _multiply_high_unsigned(a & M24, b & M24)),
    "v_mul_i32_i24": alu("i32", "i32 i32", lambda a, b: _signed24(a) * _signed24(b)),
    "v_mad_u32_u24": alu("u32", "u32 u32 u32", lambda a, b, c: (a & M24) * (b & M24) + c),
    "v_mad_i32_i24": alu("i32", "i32 i32 i32", lambda a, b, c: _signed24(a) * _signed24(b) + c),
    "v_mul_hi_i32_i24": alu("i32", "i32 i32", lambda a, b: _multiply_high_signed(_signed24(a), _signed24(b))),
    "v_sad_u32": alu("u32", "u32 u32 u32", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c),
    "v_sad_u8": alu("u32", "u32 u32 u32", _sum_of_differences),
    "v_dot4_u32_u8": alu("u32", "u32 u32 u32", _dot4_unsigned),
    "v_dot2_i32_i16": alu("i32", "i32 i32 i32", _dot2_signed),
    "v_dot4_i32_i8": alu("i32", "i32 i32 i32", _dot4_signed),
    "v_dot4c_i32_i8": alu("i32", "i32 i32 accumulate", _dot4_signed),
    "v_max_u32": alu("u32", "u32 u32", np.maximum),
    "v_min_u32": alu("u32", "u32 u32", np.minimum),
    "v_max_i32": alu("i32", "i32 i32", np.maximum),
    "v_min_i32": alu("i32", "i32 i32", np.minimum),
    "v_max3_u32": alu("u32", "u32 u32 u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_u32": alu("u32", "u32 u32 u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": alu("i32", "i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": alu("i32", "i32 i32 i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_med3_u32": alu("u32", "u32 u32 u32", _median),
    "v_med3_i32": alu("i32", "i32 i32 i32", _median),
    # carries and 64 bits
    "v_add_co_u32": alu("u32 mask", "u32 u32", _add_with_carry),
    "v_addc_co_u32": alu("u32 mask", "u32 u32 mask", _add_with_carry),
    "v_sub_co_u32": alu("u32 mask", "u32 u32", _subtract_with_borrow),
    "v_subrev_co_u32": alu("u32 mask", "u32 u32", lambda a, b: _subtract_with_borrow(b, a)),
    "v_subb_co_u32": alu("u32 mask", "u32 u32 mask", _subtract_with_borrow),
    "v_subbrev_co_u32": alu("u32 mask", "u32 u32 mask", lambda a, b, c: _subtract_with_borrow(b, a, c)),
    "v_mad_u64_u32": alu("u64 mask", "u32 u32 u64", _multiply_add_u64),
    "v_mad_i64_i32": alu("i64 mask", "i32 i32 i64", _multiply_add_i64),
    "v_lshl_add_u64": alu("u64", "u64 u32 u64", lambda a, b, c: (a << (b & np.uint32(7)).astype(U64)) + c),
    "v_lshlrev_b64": alu("u64", "u32 u64", lambda a, b: b << (a & np.uint32(63)).astype(U64)),
    "v_lshrrev_b64": alu("u64", "u32 u64", lambda a, b: b >> (a & np.uint32(63)).astype(U64)),
    "v_ashrrev_i64": alu("i64", "u32 i64", lambda a, b: b >> (a & np.uint32(63)).astype(np.int64)),
    # bits
    "v_and_b32": alu("u32", "u32 u32", np.bitwise_and),
    "v_or_b32": alu("u32", "u32 u32", np.bitwise_or),
    "v_xor_b32": alu("u32", "u32 u32", np.bitwise_xor),
    "v_xnor_b32": alu("u32", "u32 u32", lambda a, b: ~(a ^ b)),
    "v_not_b32": alu("u32", "u32", np.invert),
    "v_or3_b32": alu("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
    "v_and_or_b32": alu("u32", "u32 u32 u32", lambda a, b, c: a & b | c),
    "v_lshl_or_b32": alu("u32", "u32 u32 u32", lambda a, b, c: a << (b & B5) | c),
    "v_lshlrev_b32": alu("u32", "u32 u32", lambda a, b: b << (a & B5)),
    "v_lshrrev_b32": alu("u32", "u32 u32", lambda a, b: b >> (a & B5)),
    "v_ashrrev_i32": alu("i32", "i32 i32", lambda a, b: b >> (a & 31)),
    "v_bfe_u32": alu("u32", "u32 u32 u32", field_unsigned),
    "v_bfe_i32": alu("u32", "u32 u32 u32", field_signed),
    "v_bfi_b32": alu("u32", "u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    "v_bfm_b32": alu("u32", "u32 u32", lambda a, b: ((np.uint32(1) << (a & B5)) - np.uint32(1)) << (b & B5)),
    "v_bfrev_b32": alu("u32", "u32", bit_reverse),
    "v_bcnt_u32_b32": alu("u32", "u32 u32", lambda a, b: count_ones(a) + b),
    "v_ffbh_i32": alu("u32", "u32", first_sign_change),
    "v_ffbh_u32": alu("u32", "u32", first_one_high),
    "v_ffbl_b32": alu("u32", "u32", first_one_low),
    "v_perm_b32": alu("u32", "u32 u32 u32", permute_bytes),
    "v_alignbit_b32": alu("u32", "u32 u32 u32", lambda a, b, c: (_wide(a, b) >> (c & B5).astype(U64)).astype(U32)),
    "v_alignbyte_b32": alu(
        "u32", "u32 u32 u32", lambda a, b, c: (_wide(a, b) >> (c & np.uint32(3)).astype(U64) * np.uint64(8)).astype(U32)
    ),
    # 16 bits
    "v_add_u16": alu("u16", "u16 u16", np.add),
    "v_sub_u16": alu("u16", "u16 u16", np.subtract),
    "v_subrev_u16": alu("u16", "u16 u16", lambda a, b: b - a),
    "v_mul_lo_u16": alu("u16", "u16 u16", np.multiply),
    "v_mad_i16": alu("u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    "v_mad_u16": alu("u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    "v_mad_legacy_u16": alu("u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    "v_lshlrev_b16": alu("u16", "u16 u16", lambda a, b: b << (a & np.uint16(15))),
    "v_lshrrev_b16": alu("u16", "u16 u16", lambda a, b: b >> (a & np.uint16(15))),
    "v_ashrrev_i16": alu("i16", "i16 i16", lambda a, b: b >> (a & np.int16(15))),
    "v_max_u16": alu("u16", "u16 u16", np.maximum),
    "v_min_u16": alu("u16", "u16 u16", np.minimum),
    "v_max_i16": alu("i16", "i16 i16", np.maximum),
    "v_min_i16": alu("i16", "i16 i16", np.minimum),
    "v_pack_b32_f16": alu("u32", "f16 f16", lambda a, b: _half(a) | _half(b) << np.uint32(16)),
    "v_mad_u32_u16": alu("u32", "u16 u16 u32", lambda a, b, c: a.astype(U32) * b.astype(U32) + c),
    "v_mad_i32_i16": alu("i32", "i16 i16 i32", lambda a, b, c: a.astype(np.int32) * b.astype(np.int32) + c),
    **{
        f"v_{prefix}_{condition}_{kind}{width}": alu("mask", f"{kind}{width} {kind}{width}", COMPARES[condition])
        for prefix in ("cmp", "cmpx")
        for kind, conditions in CONDITIONS.items()
        for condition in conditions.split()
        for width in (16, 32, 64)
    },
}
