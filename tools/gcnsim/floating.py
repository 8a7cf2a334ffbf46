# SPDX-License-Identifier: Apache-2.0
"""Floating-point vector instructions: correctly rounded arithmetic, and the hardware's approximations.

Denormals are kept, as the kernels' descriptors ask for. Exceptions are the transcendental instructions and reciprocals
of 32 bits: they take and give a denormal as a zero of its sign, as LLVM assumes when it scales around them. Their
results here are correctly rounded, which the hardware's are not: it is within 1 ulp.
"""

from collections.abc import Callable

import numpy as np

from gcnsim.registers import U32, U64, Array
from gcnsim.vector import Alu, alu

F16, F32, F64 = np.float16, np.float32, np.float64
TINY = F32(2.0**-126)


# --- fused multiply-add: one rounding


def sum_to_odd(a: Array, b: Array) -> Array:
    """a + b of doubles, rounded to odd: rounding that once more, to any narrower format, is rounding once."""
    total = a + b
    back = total - a
    error = (a - (total - back)) + (b - back)
    bits = total.view(U64)
    inexact = (error != 0) & np.isfinite(total)
    # Where the last bit is even the true sum lies between two neighbours of which the odd one is on the error's side.
    toward_zero = np.signbit(error) != np.signbit(total)
    nudged = bits + np.where(toward_zero, np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1))
    return np.where(inexact & (bits & np.uint64(1) == 0), nudged, bits).view(F64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """Correctly rounded a * b + c. The product is exact in double; its sum with c may sit on a tie it is not."""
    product, c = np.broadcast_arrays(a.astype(F64) * b, c.astype(F64))
    total = product + c
    doubtful = (total.view(U64) & np.uint64(0x1FFFFFFF) == 0x10000000) | (np.abs(total) < TINY) & (total != 0)
    if doubtful.any():
        total = sum_to_odd(product, c)
    return total.astype(F32)


def fma16(a: Array, b: Array, c: Array) -> Array:
    product = a.astype(F64) * b
    return sum_to_odd(*np.broadcast_arrays(product, c.astype(F64))).astype(F16)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of doubles by error-free transformations: correctly rounded but for ties between neighbours."""
    product = a * b
    split = F64(134217729)
    a_high, b_high = a * split - (a * split - a), b * split - (b * split - b)
    a_low, b_low = a - a_high, b - b_high
    product_error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total = product + c
    back = total - product
    sum_error = (product - (total - back)) + (c - back)
    better = total + (product_error + sum_error)
    return np.where(np.isfinite(better), better, total)


# --- minimum and maximum: a NaN loses (min, max) or wins (minimum, maximum), and -0 is less than 0


def _fix_zeros(result: Array, a: Array, b: Array, pick: Callable[..., Array]) -> Array:
    zeros = (a == 0) & (b == 0)
    if not zeros.any():
        return result
    bits = np.dtype(f"u{result.dtype.itemsize}")
    return np.where(zeros, pick(a.view(bits), b.view(bits)).view(result.dtype), result)


def maximum_number(a: Array, b: Array) -> Array:
    return _fix_zeros(np.fmax(a, b), a, b, np.bitwise_and)


def minimum_number(a: Array, b: Array) -> Array:
    return _fix_zeros(np.fmin(a, b), a, b, np.bitwise_or)


def maximum(a: Array, b: Array) -> Array:
    return _fix_zeros(np.maximum(a, b), a, b, np.bitwise_and)


def minimum(a: Array, b: Array) -> Array:
    return _fix_zeros(np.minimum(a, b), a, b, np.bitwise_or)


def median(a: Array, b: Array, c: Array) -> Array:
    """v_med3: the middle of three; with a NaN among them, their minimum."""
    middle = maximum_number(minimum_number(a, b), minimum_number(maximum_number(a, b), c))
    least = minimum_number(minimum_number(a, b), c)
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), least, middle)


# --- approximations


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x)


def approximate(function: Callable[..., Array]) -> Alu:
    """A function computed in double and rounded once, denormal sources and results flushed."""

    def compute(x: Array) -> Array:
        return _flushed(np.asarray(function(_flushed(x).astype(F64)), F64).astype(F32))

    return alu("f32", "f32", compute)


def approximate16(function: Callable[..., Array]) -> Alu:
    return alu("f16", "f16", lambda x: np.asarray(function(x.astype(F64)), F64).astype(F16))


def approximate64(function: Callable[..., Array]) -> Alu:
    return alu("f64", "f64", function)


def _reciprocal(x: Array) -> Array:
    return 1 / x


def _reciprocal_root(x: Array) -> Array:
    return 1 / np.sqrt(x)


def _sine(turns: Array) -> Array:
    """The source counts full turns; beyond +-256 of them the hardware gives 0."""
    return np.where(np.abs(turns) <= 256, np.sin(2 * np.pi * np.remainder(turns, 1)), 0 * turns)


def _cosine(turns: Array) -> Array:
    return np.where(np.abs(turns) <= 256, np.cos(2 * np.pi * np.remainder(turns, 1)), 1 + 0 * turns)


def _fraction(x: Array) -> Array:
    """x - floor(x), kept below 1."""
    below_one = np.nextafter(x.dtype.type(1), x.dtype.type(0))
    return np.minimum(x - np.floor(x), below_one)


def scale_by_exponent(x: Array, exponent: Array) -> Array:
    return np.ldexp(x.astype(F64), exponent.clip(-600, 600)).astype(x.dtype)


def _mantissa(x: Array) -> Array:
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def _exponent(x: Array) -> Array:
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(np.int32)


def in_class(x: Array, wanted: Array) -> Array:
    """v_cmp_class: `wanted` has a bit for each of signaling NaN, quiet NaN, -inf, -normal, -denormal, -0, and the
    positive ones in mirrored order."""
    bits = x.view(f"u{x.dtype.itemsize}")
    quiet_bit = {2: 0x200, 4: 0x400000, 8: 0x8000000000000}[x.dtype.itemsize]
    smallest = np.finfo(x.dtype).tiny
    negative, magnitude = np.signbit(x), np.abs(x)
    quiet = (bits & bits.dtype.type(quiet_bit)) != 0
    rank = np.where(np.isinf(x), 2, np.where(magnitude >= smallest, 3, np.where(magnitude > 0, 4, 5)))
    number = np.where(np.isnan(x), quiet.astype(np.int64), np.where(negative, rank, 11 - rank))
    return (wanted >> number.astype(U32) & np.uint32(1)).astype(bool)


# --- division: v_div_scale, v_div_fmas and v_div_fixup, the pieces of an exact quotient


def _biased_exponent(x: Array) -> Array:
    return (x.view(U32) >> np.uint32(23) & np.uint32(255)).astype(np.int32)


def _is_denormal(x: Array) -> Array:
    return (x != 0) & (np.abs(x) < TINY)


def divide_scale(value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """The numerator or the denominator (`value` is one of them) scaled so that the steps neither over- nor underflow,
    and whether v_div_fmas has to scale back.

    AMD's manuals multiply a denominator above 2^126 by 2^64, which overflows; here it is divided by 2^64, which is the
    only way to the correctly rounded quotients that LLVM builds on this instruction."""
    value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
    is_denominator = value.view(U32) == denominator.view(U32)
    is_numerator = value.view(U32) == numerator.view(U32)
    quotient_range = _biased_exponent(numerator) - _biased_exponent(denominator)
    reciprocal_denormal = _is_denormal((1 / denominator.astype(F64)).astype(F32))
    quotient_denormal = _is_denormal((numerator.astype(F64) / denominator).astype(F32))
    cases = [
        (numerator == 0) | (denominator == 0),
        quotient_range >= 96,
        _is_denormal(denominator),
        reciprocal_denormal & quotient_denormal,
        reciprocal_denormal,
        quotient_denormal,
        _biased_exponent(numerator) <= 23,
    ]
    up, down = F32(2.0**64), F32(2.0**-64)
    one = F32(1)
    factor = np.select(
        cases,
        [
            F32(np.nan),
            np.where(is_denominator, up, one),
            up,
            np.where(is_denominator, down, one),
            down,
            np.where(is_numerator, up, one),
            up,
        ],
        one,
    )
    scale_back = np.select(cases, [False, True, False, True, False, True, False], False)
    return value * factor, scale_back


def divide_fmas(a: Array, b: Array, c: Array, scale_back: Array) -> Array:
    """a * b + c, times a power of two where the quotient was scaled; rounded once."""
    total = sum_to_odd(*np.broadcast_arrays(a.astype(F64) * b, c.astype(F64)))
    factor = np.where(_biased_exponent(c) > 127, 2.0**64, 2.0**-64)
    return np.where(scale_back, total * factor, total).astype(F32)


def divide_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The quotient with its sign, or what IEEE 754 says of zeros, infinities and NaN. Where the exponents alone say
    that it over- or underflows, the quotient does not count: the steps to it may have been infinite."""
    negative = np.signbit(denominator) != np.signbit(numerator)
    invalid = (numerator == 0) & (denominator == 0) | np.isinf(numerator) & np.isinf(denominator)
    exponent = _biased_exponent(numerator) - _biased_exponent(denominator)
    both_numbers = np.isfinite(numerator) & np.isfinite(denominator) & (numerator != 0) & (denominator != 0)
    infinite = (denominator == 0) | np.isinf(numerator) | both_numbers & (exponent > 150)
    zero = (numerator == 0) | np.isinf(denominator) | both_numbers & (exponent < -150)
    magnitude = np.select([infinite, zero], [F32(np.inf), F32(0)], np.abs(quotient))
    result = np.where(negative, -magnitude, magnitude)
    result = np.where(invalid, F32(np.nan), result)
    return np.where(np.isnan(numerator), numerator, np.where(np.isnan(denominator), denominator, result))


def _three(function: Callable[..., Array], kind: str) -> Alu:
    return alu(kind, f"{kind} {kind} {kind}", lambda a, b, c: function(function(a, b), c))


FLOATING: dict[str, Alu] = {
    "v_fma_f32": alu("f32", "f32 f32 f32", fma32),
    "v_fmac_f32": alu("f32", "f32 f32 accumulate", fma32),
    "v_fmaak_f32": alu("f32", "f32 f32 f32", fma32),
    "v_fmamk_f32": alu("f32", "f32 f32 f32", fma32),
    "v_fma_f16": alu("f16", "f16 f16 f16", fma16),
    "v_fmac_f16": alu("f16", "f16 f16 accumulate", fma16),
    "v_fma_f64": alu("f64", "f64 f64 f64", fma64),
    "v_ldexp_f32": alu("f32", "f32 i32", scale_by_exponent),
    "v_ldexp_f16": alu("f16", "f16 i16", scale_by_exponent),
    "v_ldexp_f64": alu("f64", "f64 i32", np.ldexp),
    "v_frexp_mant_f32": alu("f32", "f32", _mantissa),
    "v_frexp_exp_i32_f32": alu("i32", "f32", _exponent),
    "v_div_scale_f32": alu("f32 mask", "f32 f32 f32", divide_scale),
    "v_div_fmas_f32": alu("f32", "f32 f32 f32 vcc", divide_fmas),
    "v_div_fixup_f32": alu("f32", "f32 f32 f32", divide_fixup),
    "v_rcp_f32": approximate(_reciprocal),
    "v_rcp_iflag_f32": approximate(_reciprocal),
    "v_rsq_f32": approximate(_reciprocal_root),
    "v_sqrt_f32": approximate(np.sqrt),
    "v_exp_f32": approximate(np.exp2),
    "v_log_f32": approximate(np.log2),
    "v_sin_f32": approximate(_sine),
    "v_cos_f32": approximate(_cosine),
    "v_rcp_f16": approximate16(_reciprocal),
    "v_rsq_f16": approximate16(_reciprocal_root),
    "v_sqrt_f16": approximate16(np.sqrt),
    "v_exp_f16": approximate16(np.exp2),
    "v_log_f16": approximate16(np.log2),
    "v_rcp_f64": approximate64(_reciprocal),
    "v_rsq_f64": approximate64(_reciprocal_root),
    "v_sqrt_f64": approximate64(np.sqrt),
    "v_maximum3_f32": _three(maximum, "f32"),
    "v_minimum3_f32": _three(minimum, "f32"),
    **{
        name.replace("K", kind): entry
        for kind in ("f16", "f32", "f64")
        for name, entry in {
            "v_add_K": alu(kind, f"{kind} {kind}", np.add),
            "v_sub_K": alu(kind, f"{kind} {kind}", np.subtract),
            "v_subrev_K": alu(kind, f"{kind} {kind}", lambda a, b: b - a),
            "v_mul_K": alu(kind, f"{kind} {kind}", np.multiply),
            "v_max_K": alu(kind, f"{kind} {kind}", maximum_number),
            "v_min_K": alu(kind, f"{kind} {kind}", minimum_number),
            "v_max3_K": _three(maximum_number, kind),
            "v_min3_K": _three(minimum_number, kind),
            "v_med3_K": alu(kind, f"{kind} {kind} {kind}", median),
            "v_floor_K": alu(kind, kind, np.floor),
            "v_ceil_K": alu(kind, kind, np.ceil),
            "v_trunc_K": alu(kind, kind, np.trunc),
            "v_rndne_K": alu(kind, kind, np.rint),
            "v_fract_K": alu(kind, kind, _fraction),
            "v_cmp_class_K": alu("mask", f"{kind} u32", in_class),
            "v_cmpx_class_K": alu("mask", f"{kind} u32", in_class),
        }.items()
    },
}
