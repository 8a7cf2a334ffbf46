# SPDX-License-Identifier: Apache-2.0
"""Floating-point vector instructions: correctly rounded arithmetic, and the hardware's approximations.

Denormals are kept, as the kernels' descriptors ask for. Exceptions are the transcendental instructions and reciprocals
of 32 bits: they take and give a denormal as a zero of its sign, as LLVM assumes when it scales around them. Their
results here are correctly rounded, which the hardware's are not: it is within 1 ulp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcnsim.registers import U32, U64, Array
from gcnsim.vector import Alu, alu

F16, F32, F64 = np.float16, np.float32, np.float64
TINY = F32(2.0**-126)


# --- fused multiply-add: one rounding


def sum_to_odd(a: Array, b: Array) -> Array:
    """a + b of doubles, rounded to odd: rounding that once more, to any narrower format, is rounding once."""
    total, error = _two_sum(a, b)
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
    """Correctly rounded a * b + c of doubles, by Boldo and Melquiond's sum that rounds to odd first, near 1, where
    nothing over- or underflows. A denormal result is rounded twice."""
    a, b, c = np.broadcast_arrays(a, b, c)
    (a_mantissa, a_exponent), (b_mantissa, b_exponent), (c_mantissa, c_exponent) = (np.frexp(x) for x in (a, b, c))
    exponent = a_exponent + b_exponent
    largest = np.where((a == 0) | (b == 0), c_exponent, np.where(c == 0, exponent, np.maximum(exponent, c_exponent)))
    product, error = (np.ldexp(x, exponent - largest) for x in _two_product(a_mantissa, b_mantissa))
    addend, addend_error = _two_sum(np.ldexp(c_mantissa, c_exponent - largest), error)
    total, total_error = _two_sum(product, addend)
    exact = np.ldexp(total + sum_to_odd(addend_error, total_error), largest)
    return np.where(np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (exact != 0), exact, a * b + c)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded product, and what rounding took from it (Dekker)."""
    product = a * b
    split = F64(2**27 + 1)
    a_high, b_high = a * split - (a * split - a), b * split - (b * split - b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum, and what rounding took from it."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def multiply_add(a: Array, b: Array, c: Array) -> Array:
    """gfx90a's v_mad_f32, which rounds the product and the sum, and takes and gives denormals as zeros."""
    a, b, c = (flushed(x) for x in (a, b, c))
    return flushed(flushed(a * b) + c)


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


def flushed(x: Array) -> Array:
    """Denormals as zeros of their sign."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def approximate(function: Callable[..., Array]) -> Alu:
    """A function computed in double and rounded once, denormal sources and results flushed."""

    def compute(x: Array) -> Array:
        return flushed(np.asarray(function(flushed(x).astype(F64)), F64).astype(F32))

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


@dataclass(frozen=True)
class Division:
    """The division of one width. Quotients from 2^`large` on, and numerators of a biased exponent up to `tiny`, are
    scaled by 2^`shift`; where the exponents are more than `limit` apart, the quotient over- or underflows."""

    kind: type[np.floating]
    large: int
    tiny: int
    shift: int
    limit: int

    @property
    def bits(self) -> np.dtype[Any]:
        return np.dtype(f"u{np.dtype(self.kind).itemsize}")

    def exponent(self, x: Array) -> Array:
        """The biased exponent."""
        info = np.finfo(self.kind)
        mask = self.bits.type((1 << info.nexp) - 1)
        return (x.view(self.bits) >> self.bits.type(info.nmant) & mask).astype(np.int32)

    def is_denormal(self, x: Array) -> Array:
        return (x != 0) & (np.abs(x) < np.finfo(self.kind).tiny)

    def scale(self, value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
        """v_div_scale: the numerator or the denominator (`value` is one of them) scaled so that the steps neither over-
        nor underflow, and whether v_div_fmas has to scale back.

        AMD's manuals multiply a denominator whose reciprocal is denormal, which overflows; here it is divided, which is
        the only way to the correctly rounded quotients that LLVM builds on this instruction."""
        value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
        is_denominator = value.view(self.bits) == denominator.view(self.bits)
        is_numerator = value.view(self.bits) == numerator.view(self.bits)
        reciprocal_denormal = self.is_denormal(1 / denominator)
        quotient_denormal = self.is_denormal(numerator / denominator)
        up, down, one = self.kind(2.0**self.shift), self.kind(2.0**-self.shift), self.kind(1)
        # Each condition with the factor it asks for, and whether v_div_fmas scales back. The first that holds counts.
        cases: list[tuple[Array, Any, bool]] = [
            ((numerator == 0) | (denominator == 0), self.kind(np.nan), False),
            (
                self.exponent(numerator) - self.exponent(denominator) >= self.large,
                np.where(is_denominator, up, one),
                True,
            ),
            (self.is_denormal(denominator), up, False),
            (reciprocal_denormal & quotient_denormal, np.where(is_denominator, down, one), True),
            (reciprocal_denormal, down, False),
            (quotient_denormal, np.where(is_numerator, up, one), True),
            (self.exponent(numerator) <= self.tiny, up, False),
        ]
        conditions, factors, scaled = ([case[n] for case in cases] for n in range(3))
        return value * np.select(conditions, factors, one), np.select(conditions, scaled, False)

    def fmas(self, a: Array, b: Array, c: Array, scale_back: Array) -> Array:
        """v_div_fmas: a * b + c, times a power of two where the quotient was scaled; in fp32 rounded once."""
        bias = np.finfo(self.kind).maxexp - 1
        factor = np.where(self.exponent(c) > bias, 2.0**self.shift, 2.0**-self.shift)
        if self.kind is F32:
            total = sum_to_odd(*np.broadcast_arrays(a.astype(F64) * b, c.astype(F64)))
        else:
            total = fma64(a, b, c)
        return np.where(scale_back, total * factor, total).astype(self.kind)

    def fixup(self, quotient: Array, denominator: Array, numerator: Array) -> Array:
        """v_div_fixup: the quotient with its sign, or what IEEE 754 says of zeros, infinities and NaN. Where the
        exponents alone say that it over- or underflows, it does not count: the steps to it may have been infinite."""
        negative = np.signbit(denominator) != np.signbit(numerator)
        invalid = (numerator == 0) & (denominator == 0) | np.isinf(numerator) & np.isinf(denominator)
        apart = self.exponent(numerator) - self.exponent(denominator)
        numbers = np.isfinite(numerator) & np.isfinite(denominator) & (numerator != 0) & (denominator != 0)
        infinite = (denominator == 0) | np.isinf(numerator) | numbers & (apart > self.limit)
        zero = (numerator == 0) | np.isinf(denominator) | numbers & (apart < -self.limit)
        magnitude = np.select([infinite, zero], [self.kind(np.inf), self.kind(0)], np.abs(quotient))
        result = np.where(negative, -magnitude, magnitude)
        result = np.where(invalid, self.kind(np.nan), result)
        return np.where(np.isnan(numerator), numerator, np.where(np.isnan(denominator), denominator, result))


DIVISION16 = Division(F16, large=0, tiny=0, shift=0, limit=64)  # of which only v_div_fixup exists
DIVISION32 = Division(F32, large=96, tiny=23, shift=64, limit=150)
DIVISION64 = Division(F64, large=768, tiny=53, shift=128, limit=1075)


def _three(function: Callable[..., Array], kind: str) -> Alu:
    return alu(kind, f"{kind} {kind} {kind}", lambda a, b, c: function(function(a, b), c))


def _every_width(kind: str) -> dict[str, Alu]:
    return {
        f"v_add_{kind}": alu(kind, f"{kind} {kind}", np.add),
        f"v_mul_{kind}": alu(kind, f"{kind} {kind}", np.multiply),
        f"v_max_{kind}": alu(kind, f"{kind} {kind}", maximum_number),
        f"v_min_{kind}": alu(kind, f"{kind} {kind}", minimum_number),
        f"v_floor_{kind}": alu(kind, kind, np.floor),
        f"v_ceil_{kind}": alu(kind, kind, np.ceil),
        f"v_trunc_{kind}": alu(kind, kind, np.trunc),
        f"v_rndne_{kind}": alu(kind, kind, np.rint),
        f"v_fract_{kind}": alu(kind, kind, _fraction),
        f"v_cmp_class_{kind}": alu("mask", f"{kind} u32", in_class),
        f"v_cmpx_class_{kind}": alu("mask", f"{kind} u32", in_class),
    }


def _up_to_32_bits(kind: str) -> dict[str, Alu]:
    return {
        f"v_sub_{kind}": alu(kind, f"{kind} {kind}", np.subtract),
        f"v_subrev_{kind}": alu(kind, f"{kind} {kind}", lambda a, b: b - a),
        f"v_max3_{kind}": _three(maximum_number, kind),
        f"v_min3_{kind}": _three(minimum_number, kind),
        f"v_med3_{kind}": alu(kind, f"{kind} {kind} {kind}", median),
    }


FLOATING: dict[str, Alu] = {
    "v_fma_f32": alu("f32", "f32 f32 f32", fma32),
    "v_fmac_f32": alu("f32", "f32 f32 accumulate", fma32),
    "v_fmaak_f32": alu("f32", "f32 f32 f32", fma32),
    "v_fmamk_f32": alu("f32", "f32 f32 f32", fma32),
    "v_mad_f32": alu("f32", "f32 f32 f32", multiply_add),
    "v_mac_f32": alu("f32", "f32 f32 accumulate", multiply_add),
    "v_madak_f32": alu("f32", "f32 f32 f32", multiply_add),
    "v_madmk_f32": alu("f32", "f32 f32 f32", multiply_add),
    "v_fma_f16": alu("f16", "f16 f16 f16", fma16),
    "v_fma_f64": alu("f64", "f64 f64 f64", fma64),
    "v_fmac_f64": alu("f64", "f64 f64 accumulate", fma64),
    "v_ldexp_f32": alu("f32", "f32 i32", scale_by_exponent),
    "v_ldexp_f16": alu("f16", "f16 i16", scale_by_exponent),
    "v_ldexp_f64": alu("f64", "f64 i32", np.ldexp),
    "v_frexp_mant_f16": alu("f16", "f16", _mantissa),
    "v_frexp_mant_f32": alu("f32", "f32", _mantissa),
    "v_frexp_mant_f64": alu("f64", "f64", _mantissa),
    "v_frexp_exp_i16_f16": alu("i16", "f16", _exponent),
    "v_frexp_exp_i32_f32": alu("i32", "f32", _exponent),
    "v_frexp_exp_i32_f64": alu("i32", "f64", _exponent),
    "v_div_scale_f32": alu("f32 mask", "f32 f32 f32", DIVISION32.scale),
    "v_div_scale_f64": alu("f64 mask", "f64 f64 f64", DIVISION64.scale),
    "v_div_fmas_f32": alu("f32", "f32 f32 f32 vcc", DIVISION32.fmas),
    "v_div_fmas_f64": alu("f64", "f64 f64 f64 vcc", DIVISION64.fmas),
    "v_div_fixup_f16": alu("f16", "f16 f16 f16", DIVISION16.fixup),
    "v_div_fixup_f32": alu("f32", "f32 f32 f32", DIVISION32.fixup),
    "v_div_fixup_f64": alu("f64", "f64 f64 f64", DIVISION64.fixup),
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
    **_every_width("f16"),
    **_every_width("f32"),
    **_every_width("f64"),
    **_up_to_32_bits("f16"),
    **_up_to_32_bits("f32"),
}
