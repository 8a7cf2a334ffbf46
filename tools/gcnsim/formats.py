# SPDX-License-Identifier: Apache-2.0
"""Number formats of at most 16 bits: what their codes mean, and rounding to them."""

from dataclasses import dataclass, field

import numpy as np

from gcnsim.registers import U32, Array


@dataclass(frozen=True)
class SmallFloat:
    """A format of at most eight bits: sign, exponent, mantissa.

    `specials` says which codes are no numbers: "fn" (only all ones is NaN), "fnuz" (only -0 is NaN), "ieee" (the top
    exponent is infinity and NaN) or "finite" (none). `values` decodes: fp32 by code.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str
    values: Array = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        codes = np.arange(1 << self.bits)
        exponent = codes >> self.mantissa_bits & (1 << self.exponent_bits) - 1
        mantissa = codes & (1 << self.mantissa_bits) - 1
        fraction = np.where(exponent > 0, 1.0, 0.0) + mantissa / (1 << self.mantissa_bits)
        values = np.ldexp(fraction, np.maximum(exponent, 1) - self.bias)
        if self.specials == "ieee":
            top = exponent == (1 << self.exponent_bits) - 1
            values = np.where(top, np.where(mantissa == 0, np.inf, np.nan), values)
        values = np.where(codes >> (self.bits - 1) == 1, -values, values)
        if self.specials == "fnuz":
            values[1 << (self.bits - 1)] = np.nan
        elif self.specials == "fn":
            values[[self.sign - 1, 2 * self.sign - 1]] = np.nan
        object.__setattr__(self, "values", values.astype(np.float32))

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def largest_code(self) -> int:
        """The code of the largest finite value."""
        top = self.sign - 1
        return {"fn": top - 1, "fnuz": top, "finite": top, "ieee": top - (1 << self.mantissa_bits)}[self.specials]

    def decode(self, codes: Array) -> Array:
        return self.values[codes]

    def encode(self, x: Array, saturate: Array | bool) -> Array:
        """Codes (uint32) of x, rounded to nearest even. What is too large, infinities included, becomes the largest
        number where `saturate`, else NaN (infinity in an "ieee" format). A "finite" format always saturates, NaN too.
        """
        magnitude = np.abs(x.astype(np.float64))
        smallest = 1 - self.bias
        magnitude = np.where(np.isfinite(magnitude), magnitude, 0)
        exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, smallest), smallest)
        steps = np.rint(np.ldexp(magnitude, self.mantissa_bits - exponent)).astype(np.int64)
        code = ((exponent - smallest) << self.mantissa_bits) + steps
        too_large = (code > self.largest_code) | np.isinf(x)
        nan = self.sign if self.specials == "fnuz" else self.sign - 1
        infinite = self.largest_code + 1 if self.specials == "ieee" else nan
        saturate = True if self.specials == "finite" else saturate
        code = np.where(too_large, np.where(saturate, self.largest_code, infinite), code)
        code = np.where(np.isnan(x), nan, code)
        signed = code | np.where(np.signbit(x), self.sign, 0)
        if self.specials == "fnuz":
            signed = np.where((code == 0) | (code == self.sign), code, signed)
        return signed.astype(U32)


E4M3 = SmallFloat("E4M3", 4, 3, 7, "fn")
E4M3_FNUZ = SmallFloat("E4M3FNUZ", 4, 3, 8, "fnuz")
E5M2 = SmallFloat("E5M2", 5, 2, 15, "ieee")
E5M2_FNUZ = SmallFloat("E5M2FNUZ", 5, 2, 16, "fnuz")
E2M3 = SmallFloat("E2M3", 2, 3, 1, "finite")
E3M2 = SmallFloat("E3M2", 3, 2, 3, "finite")
E2M1 = SmallFloat("E2M1", 2, 1, 1, "finite")


def small_floats(arch: str) -> dict[str, SmallFloat]:
    """The formats that fp8, bf8 and so on are on an architecture: gfx942 has the FNUZ flavours, gfx950 OCP's."""
    fnuz = arch == "gfx942"
    return {
        "fp8": E4M3_FNUZ if fnuz else E4M3,
        "bf8": E5M2_FNUZ if fnuz else E5M2,
        "fp6": E2M3,
        "bf6": E3M2,
        "fp4": E2M1,
    }


def bf16_to_f32(codes: Array) -> Array:
    return (codes.astype(U32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """bf16 bits (uint32), rounded to nearest even; a NaN keeps its sign and top bits, and is quiet."""
    bits = x.view(U32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), bits >> np.uint32(16) | np.uint32(0x40), rounded)


def f32_to_f16_toward_zero(x: Array) -> Array:
    """fp16 values, rounded toward zero: an overflow becomes the largest number."""
    nearest = x.astype(np.float16)
    away = np.abs(nearest.astype(np.float64)) > np.abs(x.astype(np.float64))
    return np.where(away, (nearest.view(np.uint16) - away).view(np.float16), nearest)


def scale_e8m0(codes: Array) -> Array:
    """E8M0 block scales (uint8) as doubles: 2^(code - 127), NaN for 255."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127))
