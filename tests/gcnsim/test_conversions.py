# SPDX-License-Identifier: Apache-2.0
"""Conversion instructions against ml_dtypes and numpy."""

import gcnsim
import ml_dtypes
import numpy as np
import pytest

from tests.gcnsim.harness import execute, random_bits, same_floats, special_values

F16, F32 = np.float16, np.float32
FP8 = {
    ("gfx942", "fp8"): ml_dtypes.float8_e4m3fnuz,
    ("gfx942", "bf8"): ml_dtypes.float8_e5m2fnuz,
    ("gfx950", "fp8"): ml_dtypes.float8_e4m3fn,
    ("gfx950", "bf8"): ml_dtypes.float8_e5m2,
}
OVERFLOW_CLAMPS = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
eight_bits = pytest.mark.parametrize("arch, kind", FP8, ids="-".join)


def words(*parts, bits):
    """Codes of `bits` bits, first in the lowest, to one word a lane."""
    return sum(part.astype(np.uint32) << np.uint32(bits * n) for n, part in enumerate(parts))


def floats(count=4096, seed=0, scale=1.0):
    return np.concatenate([special_values(F32), random_bits(count, F32, seed) * F32(scale)])


# --- integers and floats


def saturated(dtype):
    limits = np.iinfo(dtype)

    def convert(x):
        return np.array(
            [0 if np.isnan(v) else int(np.clip(np.trunc(v), limits.min, limits.max)) for v in x.astype(float)]
        )

    return convert


TO_INTEGER = {"v_cvt_u32_f32 v0, v1": np.uint32, "v_cvt_i32_f32 v0, v1": np.int32}


@pytest.mark.parametrize("code", TO_INTEGER)
def test_float_to_integer(code):
    x = np.concatenate([floats(), floats(seed=2, scale=2**28), F32([2**31, -(2**31), 2**32, 2**32 - 256, -0.99, -1])])
    x = x[: len(x) // 64 * 64]
    dtype = TO_INTEGER[code]
    assert np.array_equal(execute("gfx942", code, {"v1": x}, "v0").view(dtype), saturated(dtype)(x))


def test_half_to_integer():
    codes = np.arange(65536, dtype=np.uint16)
    for name, dtype in (("u16", np.uint16), ("i16", np.int16)):
        result = execute("gfx942", f"v_cvt_{name}_f16 v0, v1", {"v1": codes}, "v0")
        assert np.array_equal(result.astype(np.uint16).view(dtype), saturated(dtype)(codes.view(F16)))


def test_integer_to_float():
    x = random_bits(4096, np.uint32, 1)
    same_floats(execute("gfx942", "v_cvt_f32_u32 v0, v1", {"v1": x}, "v0"), x.astype(F32))
    same_floats(execute("gfx942", "v_cvt_f32_i32 v0, v1", {"v1": x}, "v0"), x.view(np.int32).astype(F32))
    for byte in range(4):
        result = execute("gfx942", f"v_cvt_f32_ubyte{byte} v0, v1", {"v1": x}, "v0")
        same_floats(result, x.view(np.uint8)[byte::4].astype(F32))
    codes = np.arange(65536, dtype=np.uint16)
    same_floats(execute("gfx942", "v_cvt_f16_u16 v0, v1", {"v1": codes}, "v0").astype(np.uint16), codes.astype(F16))
    same_floats(
        execute("gfx942", "v_cvt_f16_i16 v0, v1", {"v1": codes}, "v0").astype(np.uint16), codes.view("i2").astype(F16)
    )


def test_doubles():
    x = random_bits(4096, np.float64, 1) * 2.0**20
    same_floats(execute("gfx942", "v_cvt_f32_f64 v0, v[2:3]", {"v[2:3]": x}, "v0"), x.astype(F32))
    for dtype, name in ((np.int32, "i32"), (np.uint32, "u32")):
        result = execute("gfx942", f"v_cvt_{name}_f64 v0, v[2:3]", {"v[2:3]": x}, "v0")
        assert np.array_equal(result.view(dtype), saturated(dtype)(x))
    y = random_bits(4096, np.uint32, 2)
    same_floats(execute("gfx942", "v_cvt_f64_u32 v[0:1], v2", {"v2": y}, "v[0:1]"), y.astype(np.float64))
    same_floats(execute("gfx942", "v_cvt_f64_i32 v[0:1], v2", {"v2": y}, "v[0:1]"), y.view(np.int32).astype(np.float64))
    z = floats()
    same_floats(execute("gfx942", "v_cvt_f64_f32 v[0:1], v2", {"v2": z}, "v[0:1]")[: len(z)], z.astype(np.float64))


# --- 16 bits


def test_half_to_float_is_exact_for_every_code():
    codes = np.arange(65536, dtype=np.uint16)
    same_floats(execute("gfx942", "v_cvt_f32_f16 v0, v1", {"v1": codes}, "v0"), codes.view(F16).astype(F32))
    high = codes.astype(np.uint32) << 16
    result = execute(
        "gfx942", "v_cvt_f32_f16_sdwa v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1", {"v1": high}, "v0"
    )
    same_floats(result, codes.view(F16).astype(F32))


def test_float_to_half():
    x = floats(scale=2.0**-8)[:4096]
    result = execute("gfx942", "v_cvt_f16_f32 v0, v1", {"v1": x, "v0": np.full(64, 0xFFFFFFFF, np.uint32)}, "v0")
    assert (result >> 16 == 0).all()
    same_floats(result.astype(np.uint16), x.astype(F16))


@pytest.mark.parametrize("clamps", [False, True], ids=["overflow-is-infinite", "overflow-clamps"])
def test_overflow_of_half(clamps):
    """Under FP16_OVFL what overflows is the largest number, but an infinity stays one."""
    x = np.resize(F32([65519, 65520, 1e9, -1e9, np.inf, -np.inf, np.nan, 1]), 64)
    with np.errstate(all="ignore"):
        plain = x.astype(F16)
    expected = np.where(clamps & np.isfinite(x) & np.isinf(plain), np.copysign(F16(65504), plain), plain)
    prefix = OVERFLOW_CLAMPS if clamps else ""
    same_floats(execute("gfx942", prefix + "v_cvt_f16_f32 v0, v1", {"v1": x}, "v0").astype(np.uint16), expected)
    pair = execute("gfx950", prefix + "v_cvt_pk_f16_f32 v0, v1, v1", {"v1": x}, "v0")
    same_floats(pair.view(np.uint16)[1::2].copy(), expected)


def test_pairs_of_16_bits():
    a, b = floats(seed=1)[:4096], floats(seed=2)[:4096]
    inputs = {"v1": a, "v2": b}
    result = execute("gfx950", "v_cvt_pk_bf16_f32 v0, v1, -v2", inputs, "v0")
    same_floats(
        result.view(ml_dtypes.bfloat16).astype(F32).reshape(-1, 2)[:, 0].copy(),
        a.astype(ml_dtypes.bfloat16).astype(F32),
    )
    same_floats(result.view(ml_dtypes.bfloat16).astype(F32)[1::2].copy(), (-b).astype(ml_dtypes.bfloat16).astype(F32))
    result = execute("gfx950", "v_cvt_pk_f16_f32 v0, |v1|, v2", inputs, "v0").view(np.uint16)
    same_floats(result[::2].copy(), np.abs(a).astype(F16))
    same_floats(result[1::2].copy(), b.astype(F16))
    result = execute("gfx90a", "v_cvt_pkrtz_f16_f32 v0, v1, v2", inputs, "v0").view(F16)
    nearest = a.astype(F16)
    assert (np.abs(result[::2]) <= np.abs(a))[np.isfinite(a)].all()
    exact = nearest.astype(F32) == a
    assert np.array_equal(result[::2][exact], nearest[exact])


@pytest.mark.parametrize("select, shift", [("WORD_0", 0), ("WORD_1", 16)])
def test_bf16_to_float(select, shift):
    codes = np.arange(65536, dtype=np.uint32)
    code = f"v_cvt_f32_bf16_sdwa v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{select}"
    expected = codes.astype(np.uint16).view(ml_dtypes.bfloat16).astype(F32)
    same_floats(execute("gfx950", code, {"v1": codes << shift | 0x1234 << (16 - shift)}, "v0"), expected)


# --- 8 bits


@eight_bits
def test_every_fp8_code(arch, kind):
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(FP8[arch, kind]).astype(F32)
    word = words(codes, codes[::-1], np.roll(codes, 1), np.roll(codes, 2), bits=8)
    lanes = [values, values[::-1], np.roll(values, 1), np.roll(values, 2)]
    for byte in range(4):
        text = f"v_cvt_f32_{kind}_sdwa v0, v1 src0_sel:BYTE_{byte}" if byte else f"v_cvt_f32_{kind} v0, v1"
        same_floats(execute(arch, text, {"v1": word}, "v0"), lanes[byte])
    for half, text in enumerate(
        (f"v_cvt_pk_f32_{kind} v[2:3], v1", f"v_cvt_pk_f32_{kind}_sdwa v[2:3], v1 src0_sel:WORD_1")
    ):
        low, high = execute(arch, text, {"v1": word}, "v2 v3")
        same_floats(low, lanes[2 * half])
        same_floats(high, lanes[2 * half + 1])


def test_unpacking_over_its_own_source():
    codes = np.arange(256, dtype=np.uint32) | np.arange(256, dtype=np.uint32)[::-1] << 8
    low, high = execute("gfx942", "v_cvt_pk_f32_fp8 v[2:3], v2", {"v2": codes}, "v2 v3")
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fnuz).astype(F32)
    same_floats(low, values)
    same_floats(high, values[::-1])


@eight_bits
@pytest.mark.parametrize("clamps", [False, True], ids=["overflow", "clamps"])
def test_float_to_fp8(arch, kind, clamps):
    oracle = FP8[arch, kind]
    a, b = floats(seed=1)[:4096], floats(seed=2, scale=100)[:4096]
    largest = F32(ml_dtypes.finfo(oracle).max)

    def expected(x):
        limited = np.where(np.isnan(x), x, np.clip(x, -largest, largest)) if clamps else x
        return limited.astype(oracle).astype(F32)

    old = {"v0": np.full(4096, 0x12345678, np.uint32), "v1": a, "v2": b}
    for select, shift in (("", 0), (" op_sel:[0,0,1]", 16)):
        text = (OVERFLOW_CLAMPS if clamps else "") + f"v_cvt_pk_{kind}_f32 v0, v1, v2{select}"
        result = execute(arch, text, old, "v0")
        assert (result >> (16 - shift) & 0xFFFF == 0x12345678 >> (16 - shift) & 0xFFFF).all()
        codes = (result >> shift).astype(np.uint16).view(np.uint8)
        same_floats(codes[::2].copy().view(oracle).astype(F32), expected(a))
        same_floats(codes[1::2].copy().view(oracle).astype(F32), expected(b))


# --- scaled, gfx950: the scale counts by its exponent

SCALES = F32([1, 2, 0.25, 1.99, 2.0**-10, -4, 3e8, 2.0**-126])
KINDS = {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2, "fp4": ml_dtypes.float4_e2m1fn}
TARGETS = {"f32": F32, "f16": F16, "bf16": ml_dtypes.bfloat16}


def power_of_two(scale):
    return np.ldexp(1.0, np.frexp(np.abs(scale))[1] - 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_scaled_unpacking(kind, target):
    """Every code under every scale, from every part of the source."""
    width = 4 if kind == "fp4" else 8
    codes = np.tile(np.arange(1 << width, dtype=np.uint8), 256 >> width)
    scales = np.repeat(SCALES, 256)
    codes = np.tile(codes, len(SCALES))
    other = codes[::-1]
    with np.errstate(all="ignore"):
        expected = [
            (c.view(KINDS[kind]).astype(np.float64) * power_of_two(scales))
            .astype(F32)
            .astype(TARGETS[target])
            .astype(F32)
            for c in (codes, other)
        ]
    parts = ["", "op_sel:[1,0,0]", "op_sel:[0,1,0]", "op_sel:[1,1,0]"] if width == 4 else ["", "op_sel:[1,0,0]"]
    destination = "v[2:3]" if target == "f32" else "v2"
    for part, select in enumerate(parts):
        word = (codes.astype(np.uint32) | other.astype(np.uint32) << width) << 2 * width * part
        text = f"v_cvt_scalef32_pk_{target}_{kind} {destination}, v0, v1 {select}"
        result = execute("gfx950", text, {"v0": word, "v1": scales}, "v2 v3" if target == "f32" else "v2")
        halves = result if target == "f32" else (result.astype(np.uint16), (result >> 16).astype(np.uint16))
        for half, value in zip(halves, expected, strict=True):
            actual = half.view(F32) if target == "f32" else half.view(TARGETS[target]).astype(F32)
            same_floats(actual, value)


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_scaled_unpacking_of_one(kind):
    codes = np.tile(np.arange(256, dtype=np.uint8), len(SCALES))
    scales = np.repeat(SCALES, 256)
    with np.errstate(all="ignore"):
        value = (codes.view(KINDS[kind]).astype(np.float64) * power_of_two(scales)).astype(F32)
    for byte, (low, high) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        inputs = {"v0": codes.astype(np.uint32) << 8 * byte, "v1": scales, "v2": np.full(64, 0x11112222, np.uint32)}
        text = f"v_cvt_scalef32_f32_{kind} v2, v0, v1 op_sel:[{low},{high},0]"
        same_floats(execute("gfx950", text, inputs, "v2"), value)
        text = f"v_cvt_scalef32_f16_{kind} v2, v0, v1 op_sel:[{low},{high},1]"
        result = execute("gfx950", text, inputs, "v2")
        assert (result & 0xFFFF == 0x2222).all()
        with np.errstate(all="ignore"):
            same_floats((result >> 16).astype(np.uint16), value.astype(F16))


@pytest.mark.parametrize("origin", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_scaled_packing(kind, origin):
    """Divided by the scale, rounded once, and placed where op_sel says; overflow clamps."""
    oracle, width = KINDS[kind], 4 if kind == "fp4" else 8
    a, b = (random_bits(4096, F32, seed).astype(TARGETS[origin]) for seed in (5, 6))
    if kind == "fp4":  # which has no NaN
        a, b = (np.where(np.isnan(x.astype(F32)), TARGETS[origin](0), x) for x in (a, b))
    scales = np.resize(SCALES[:5], 4096)
    largest = float(ml_dtypes.finfo(oracle).max)

    def expected(x):
        with np.errstate(all="ignore"):
            scaled = x.astype(np.float64) / power_of_two(scales)
        # ml_dtypes rounds doubles to these formats twice; these are wide enough to round once.
        return np.where(np.isnan(scaled), scaled, np.clip(scaled, -largest, largest)).astype(oracle).astype(F32)

    if origin == "f32":
        inputs, sources, zeros = {"v1": a, "v2": b}, "v1, v2, v3", "0,0"
    else:
        pair = np.stack([a, b], 1).copy().view(np.uint32)[:, 0]
        inputs, sources, zeros = {"v1": pair}, "v1, v3", "0,0"
    inputs |= {"v3": scales, "v0": np.full(64, 0xABCDEF98, np.uint32)}
    if kind == "fp4":
        parts = [(f"op_sel:[{zeros},{n & 1},{n >> 1}]", 8 * n) for n in range(4)]
    else:
        parts = [("", 0), ("op_sel:[0,0,0,1]" if origin == "f32" else "op_sel:[0,0,1]", 16)]
    for select, shift in parts:
        text = f"{OVERFLOW_CLAMPS}v_cvt_scalef32_pk_{kind}_{origin} v0, {sources} {select}"
        result = execute("gfx950", text, inputs, "v0")
        mask = np.uint32((1 << 2 * width) - 1 << shift)
        assert (result & ~mask == 0xABCDEF98 & ~mask).all()
        for n, value in enumerate((a, b)):
            codes = (result >> np.uint32(shift + n * width) & np.uint32((1 << width) - 1)).astype(np.uint8)
            same_floats(codes.view(oracle).astype(F32), expected(value))


def test_other_architectures_have_no_scaled_conversions():
    with pytest.raises(gcnsim.UnknownInstruction, match="gfx942 has no"):
        execute("gfx942", "v_cvt_scalef32_pk_f32_fp4 v[2:3], v0, v1", {}, "v2", check=False)


def test_the_scale_reaches_down_to_2_to_the_minus_127():
    """A scale whose exponent field is 0 is E8M0's smallest, not zero, and 255 is NaN."""
    codes = np.full(64, 0x07, np.uint32)  # E2M1's 6 and 0
    scales = np.resize(np.array([0, 0x7F800000], np.uint32), 64)
    result = execute("gfx950", "v_cvt_scalef32_pk_f32_fp4 v[2:3], v0, v1", {"v0": codes, "v1": scales}, "v2")
    same_floats(result, np.resize(F32([6 * 2.0**-127, np.nan]), 64))
