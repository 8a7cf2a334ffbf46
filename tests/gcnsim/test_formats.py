# SPDX-License-Identifier: Apache-2.0
"""Number formats against ml_dtypes: every code, and rounding at every midpoint and around it."""

import ml_dtypes
import numpy as np
import pytest
from gcnsim import formats

from tests.gcnsim.harness import random_bits, same_floats

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PAIRS = {
    "E4M3": (formats.E4M3, ml_dtypes.float8_e4m3fn),
    "E4M3FNUZ": (formats.E4M3_FNUZ, ml_dtypes.float8_e4m3fnuz),
    "E5M2": (formats.E5M2, ml_dtypes.float8_e5m2),
    "E5M2FNUZ": (formats.E5M2_FNUZ, ml_dtypes.float8_e5m2fnuz),
    "E2M3": (formats.E2M3, ml_dtypes.float6_e2m3fn),
    "E3M2": (formats.E3M2, ml_dtypes.float6_e3m2fn),
    "E2M1": (formats.E2M1, ml_dtypes.float4_e2m1fn),
}


def boundaries(fmt: formats.SmallFloat) -> np.ndarray:
    """Every value of the format, every midpoint between two, and the neighbours of both, with both signs."""
    values = np.unique(fmt.values[np.isfinite(fmt.values)]).astype(np.float64)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    around = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    return np.concatenate([*around, -points])


@pytest.mark.parametrize("name", PAIRS)
def test_every_code_means_what_ml_dtypes_says(name):
    fmt, oracle = PAIRS[name]
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    same_floats(fmt.decode(codes), codes.view(oracle).astype(np.float32))


@pytest.mark.parametrize("name", PAIRS)
def test_rounding(name):
    """To nearest even, denormals too. Whatever is in range must have the code ml_dtypes gives it."""
    fmt, oracle = PAIRS[name]
    x = np.concatenate([boundaries(fmt), random_bits(20000, np.float32, 1), random_bits(20000, np.float32, 2) * 2**8])
    limit = fmt.values[fmt.largest_code]
    x = x[np.abs(x) <= limit]
    assert len(x) > 1000
    expected = x.astype(oracle)
    codes = fmt.encode(x, False)
    assert np.array_equal(codes, expected.view(np.uint8).astype(np.uint32))


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_too_large(name):
    """The first value that rounds beyond the largest is a NaN or infinity, or the largest number where saturating."""
    fmt, _ = PAIRS[name]
    largest = np.float64(fmt.values[fmt.largest_code])
    below = np.float64(fmt.values[fmt.largest_code - 1])
    midpoint = np.float32(largest + (largest - below) / 2)
    # A tie with the next code, which would be even where the largest code is odd.
    first = midpoint if fmt.largest_code & 1 else np.nextafter(midpoint, np.float32(np.inf))
    x = np.array([first, np.nextafter(first, np.float32(0)), 1e30, np.inf, -first, -np.inf], np.float32)
    saturated = fmt.decode(fmt.encode(x, True))
    assert saturated.tolist() == [largest, largest, largest, largest, -largest, -largest]
    plain = fmt.decode(fmt.encode(x, False))
    if fmt.specials == "finite":
        assert np.array_equal(plain, saturated)
    elif fmt.specials == "ieee":
        assert plain.tolist() == [np.inf, largest, np.inf, np.inf, -np.inf, -np.inf]
    else:
        assert np.isnan(plain).tolist() == [True, False, True, True, True, True]
        assert plain[1] == largest


def test_nan_and_negative_zero():
    x = np.array([np.nan, -0.0, -1e-30], np.float32)
    assert formats.E4M3.encode(x, True).tolist() == [0x7F, 0x80, 0x80]
    assert formats.E4M3_FNUZ.encode(x, True).tolist() == [0x80, 0, 0]
    assert formats.E5M2_FNUZ.encode(x, False).tolist() == [0x80, 0, 0]
    assert np.isnan(formats.E5M2.decode(formats.E5M2.encode(x[:1], True))).all()


def test_flavours_by_architecture():
    assert formats.small_floats("gfx942")["fp8"] is formats.E4M3_FNUZ
    assert formats.small_floats("gfx942")["bf8"] is formats.E5M2_FNUZ
    assert formats.small_floats("gfx950")["fp8"] is formats.E4M3
    assert formats.small_floats("gfx950")["bf8"] is formats.E5M2


def test_bf16():
    x = random_bits(50000, np.float32, 3)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    x = np.concatenate([x, ties])
    same_floats(formats.f32_to_bf16(x).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32), _bf16(x))
    codes = np.arange(1 << 16, dtype=np.uint16)
    same_floats(formats.bf16_to_f32(codes), codes.view(ml_dtypes.bfloat16).astype(np.float32))


def _bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_fp16_toward_zero():
    x = random_bits(50000, np.float32, 4)
    x = np.concatenate([x, np.float32([65504, 65519, 65520, 1e9, -1e9, np.inf, -np.inf, 6e-8, 5.9e-8, -1e-10])])
    result = formats.f32_to_f16_toward_zero(x).astype(np.float64)
    finite = np.isfinite(x)
    inside = finite & (np.abs(x) < 65536)
    exact = x.astype(np.float64)
    step = np.where(np.abs(exact) < 2.0**-14, 2.0**-24, 2.0 ** (np.frexp(exact)[1] - 11.0))
    assert np.array_equal(result[inside], np.copysign(np.floor(np.abs(exact) / step) * step, exact)[inside])
    assert np.array_equal(result[finite & ~inside], np.copysign(65504, exact)[finite & ~inside])
    assert np.array_equal(np.isinf(result), np.isinf(x))


def test_e8m0():
    codes = np.arange(256, dtype=np.uint8)
    same_floats(formats.scale_e8m0(codes).astype(np.float32), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
