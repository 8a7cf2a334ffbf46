# SPDX-License-Identifier: Apache-2.0
"""Packed math: pairs of fp16, of 16-bit integers and of fp32, with op_sel and neg, and the mixed-precision forms."""

import gcnsim
import ml_dtypes
import numpy as np
import pytest

from tests.gcnsim.harness import execute, random_bits, same_floats
from tests.gcnsim.test_vector_float import elementwise, fused, number_of

F16, F32 = np.float16, np.float32
COUNT = 1024
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HALF = {
    "add": (2, np.add),
    "mul": (2, np.multiply),
    "fma": (3, fused),
    "max": (2, elementwise(number_of(max))),
    "min": (2, elementwise(number_of(min))),
}
# op_sel and op_sel_hi choose the half of each source for the low and for the high result, neg_lo and neg_hi negate it.
CHOICES = {
    "": ((0, 0, 0), (1, 1, 1), (0, 0, 0), (0, 0, 0)),
    "op_sel:[1,0,0]": ((1, 0, 0), (1, 1, 1), (0, 0, 0), (0, 0, 0)),
    "op_sel_hi:[0,1,1]": ((0, 0, 0), (0, 1, 1), (0, 0, 0), (0, 0, 0)),
    "op_sel:[0,1,1] op_sel_hi:[1,0,0]": ((0, 1, 1), (1, 0, 0), (0, 0, 0), (0, 0, 0)),
    "neg_lo:[1,0,0] neg_hi:[0,1,0]": ((0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 1, 0)),
}


def for_two(text: str) -> str:
    return " ".join(f"{name}:[{','.join(values.strip('[]').split(',')[:2])}]" for name, values in _parts(text))


def _parts(text: str):
    return [part.split(":") for part in text.split()]


def halves(dtype, seed):
    return random_bits(2 * COUNT, dtype, seed).reshape(COUNT, 2)


@pytest.mark.parametrize("choice", CHOICES, ids=[choice or "plain" for choice in CHOICES])
@pytest.mark.parametrize("op", HALF)
def test_pairs_of_half(op, choice):
    count, function = HALF[op]
    sources = [halves(F16, seed) for seed in range(count)]
    low, high, negate_low, negate_high = CHOICES[choice]
    text = (
        f"v_pk_{op}_f16 v0, {', '.join(f'v{n + 1}' for n in range(count))} {choice if count == 3 else for_two(choice)}"
    )
    inputs = {f"v{n + 1}": pair.copy().view(np.uint32)[:, 0] for n, pair in enumerate(sources)}
    result = execute("gfx942", text, inputs, "v0").view(F16).reshape(-1, 2)
    for column, (pick, negate) in enumerate(((low, negate_low), (high, negate_high))):
        chosen = [np.where(negate[n], -pair[:, pick[n]], pair[:, pick[n]]) for n, pair in enumerate(sources)]
        same_floats(result[:, column].copy(), function(*chosen))


def test_half_that_keeps_nan():
    a, b, c = (halves(F16, seed) for seed in range(3))
    inputs = {f"v{n + 1}": pair.copy().view(np.uint32)[:, 0] for n, pair in enumerate((a, b, c))}
    result = execute("gfx950", "v_pk_maximum3_f16 v0, v1, v2, v3", inputs, "v0").view(F16)
    any_nan = (np.isnan(a) | np.isnan(b) | np.isnan(c)).ravel()
    expected = elementwise(number_of(max))(a.ravel(), b.ravel(), c.ravel())
    same_floats(result, np.where(any_nan, F16(np.nan), expected))
    result = execute("gfx950", "v_pk_minimum3_f16 v0, v1, v2, v3", inputs, "v0").view(F16)
    expected = elementwise(number_of(min))(a.ravel(), b.ravel(), c.ravel())
    same_floats(result, np.where(any_nan, F16(np.nan), expected))


def test_half_with_constants():
    """An inline constant is in the low half; the assembler's op_sel_hi takes it for both."""
    a = halves(F16, 1)
    inputs = {"v1": a.copy().view(np.uint32)[:, 0], "s4": 0x40003C00}
    result = execute("gfx942", "v_pk_mul_f16 v0, v1, 2.0 op_sel_hi:[1,0]", inputs, "v0").view(F16)
    same_floats(result, a.ravel() * F16(2))
    result = execute("gfx942", "v_pk_mul_f16 v0, v1, s4", inputs, "v0").view(F16).reshape(-1, 2)
    same_floats(result[:, 0].copy(), a[:, 0])
    same_floats(result[:, 1].copy(), a[:, 1] * F16(2))


def test_overflow_of_half_under_its_mode():
    large = np.full(64, 0x7BFF7BFF, np.uint32)  # 65504
    infinite = np.full(64, 0x7C007BFF, np.uint32)
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    assert (execute("gfx942", "v_pk_add_f16 v0, v1, v1", {"v1": large}, "v0") == 0x7C007C00).all()
    assert (execute("gfx942", mode + "v_pk_add_f16 v0, v1, v1", {"v1": large}, "v0") == 0x7BFF7BFF).all()
    assert (execute("gfx942", mode + "v_pk_add_f16 v0, v1, v1", {"v1": infinite}, "v0") == 0x7C007BFF).all()


INTEGERS = {
    "v_pk_add_u16": (np.uint16, np.add),
    "v_pk_sub_u16": (np.uint16, np.subtract),
    "v_pk_add_i16": (np.int16, np.add),
    "v_pk_sub_i16": (np.int16, np.subtract),
    "v_pk_mul_lo_u16": (np.uint16, np.multiply),
    "v_pk_max_u16": (np.uint16, np.maximum),
    "v_pk_min_u16": (np.uint16, np.minimum),
    "v_pk_max_i16": (np.int16, np.maximum),
    "v_pk_min_i16": (np.int16, np.minimum),
    "v_pk_lshlrev_b16": (np.uint16, lambda a, b: [int(y) << (x & 15) for x, y in zip(a, b, strict=True)]),
    "v_pk_lshrrev_b16": (np.uint16, lambda a, b: [int(y) >> (x & 15) for x, y in zip(a, b, strict=True)]),
    "v_pk_ashrrev_i16": (np.int16, lambda a, b: [int(y) >> (x & 15) for x, y in zip(a, b, strict=True)]),
}


@pytest.mark.parametrize("op", INTEGERS)
def test_pairs_of_integers(op):
    dtype, function = INTEGERS[op]
    a, b = (random_bits(2 * COUNT, dtype, seed) for seed in (1, 2))
    result = execute("gfx90a", f"{op} v0, v1, v2", {"v1": a.view(np.uint32), "v2": b.view(np.uint32)}, "v0").view(dtype)
    expected = np.array([int(x) & 0xFFFF for x in function(a, b)], np.uint16)
    assert np.array_equal(result.view(np.uint16), expected)


def test_multiply_add_of_integers():
    a, b, c = (random_bits(2 * COUNT, np.uint16, seed) for seed in (1, 2, 3))
    inputs = {f"v{n + 1}": x.view(np.uint32) for n, x in enumerate((a, b, c))}
    for op in ("v_pk_mad_u16", "v_pk_mad_i16"):
        assert np.array_equal(execute("gfx942", f"{op} v0, v1, v2, v3", inputs, "v0").view(np.uint16), a * b + c)


WIDE = {"add": (2, np.add), "mul": (2, np.multiply), "fma": (3, fused)}


@pytest.mark.parametrize("choice", CHOICES, ids=[choice or "plain" for choice in CHOICES])
@pytest.mark.parametrize("op", WIDE)
def test_pairs_of_float(op, choice):
    count, function = WIDE[op]
    sources = [halves(F32, seed) for seed in range(count)]
    low, high, negate_low, negate_high = CHOICES[choice]
    names = [f"v[{2 * n + 2}:{2 * n + 3}]" for n in range(count)]
    text = f"v_pk_{op}_f32 v[0:1], {', '.join(names)} {choice if count == 3 else for_two(choice)}"
    inputs = {name: pair.copy().view(np.uint64)[:, 0] for name, pair in zip(names, sources, strict=True)}
    results = execute("gfx90a", text, inputs, "v0 v1")
    for result, pick, negate in zip(results, (low, high), (negate_low, negate_high), strict=True):
        chosen = [np.where(negate[n], -pair[:, pick[n]], pair[:, pick[n]]) for n, pair in enumerate(sources)]
        same_floats(result, function(*chosen))


def test_pair_of_float_with_scalars():
    a = halves(F32, 1)
    inputs = {"v[2:3]": a.copy().view(np.uint64)[:, 0], "s[4:5]": 0x4040000040000000}  # 2 and 3
    low, high = execute("gfx942", "v_pk_mul_f32 v[2:3], v[2:3], s[4:5]", inputs, "v2 v3")
    same_floats(low, a[:, 0] * F32(2))
    same_floats(high, a[:, 1] * F32(3))
    low, high = execute("gfx942", "v_pk_mul_f32 v[2:3], v[2:3], s[4:5] op_sel_hi:[1,0]", inputs, "v2 v3")
    same_floats(high, a[:, 1] * F32(2))


def test_moves():
    inputs = {"v[2:3]": np.full(64, 2 << 32 | 1, np.uint64), "v[4:5]": np.full(64, 4 << 32 | 3, np.uint64)}
    low, high = execute("gfx90a", "v_pk_mov_b32 v[2:3], v[2:3], v[4:5] op_sel:[1,0]", inputs, "v2 v3")
    assert (low == 2).all() and (high == 3).all()


MIXED = {
    "v_fma_mix_f32 v0, v1, v2, v3": lambda w, f: fused(f[0], f[1], f[2]),
    "v_fma_mix_f32 v0, v1, v2, v3 op_sel_hi:[1,0,0]": lambda w, f: fused(w[0][0], f[1], f[2]),
    "v_fma_mix_f32 v0, v1, v2, v3 op_sel:[1,0,1] op_sel_hi:[1,0,1]": lambda w, f: fused(w[0][1], f[1], w[2][1]),
    "v_fma_mix_f32 v0, -v1, |v2|, v3 op_sel_hi:[1,1,0]": lambda w, f: fused(-w[0][0], np.abs(w[1][0]), f[2]),
    "v_fma_mixlo_f16 v0, v1, v2, v3 op_sel_hi:[1,0,0]": lambda w, f: once(w[0][0], f[1], f[2]),
    "v_fma_mixhi_f16 v0, v1, v2, v3 op_sel_hi:[1,0,0]": lambda w, f: once(w[0][0], f[1], f[2]),
}


def once(a, b, c):
    """The fused sum in fp32, and that as fp16: as v_fma_mixlo_f16 rounds."""
    return fused(a, b, c).astype(F16)


@pytest.mark.parametrize("code", MIXED)
def test_mixed_precision(code):
    """Each source fp32, or a half of fp16: v_fma_mix, with what it keeps of the destination."""
    values = [random_bits(COUNT, F32, seed) for seed in (1, 2, 3)]
    halves_of = [[x.view(F16)[n::2].astype(F32) for n in range(2)] for x in values]
    inputs = {f"v{n + 1}": x for n, x in enumerate(values)} | {"v0": np.full(64, 0x12345678, np.uint32)}
    result = execute("gfx942", code, inputs, "v0")
    expected = MIXED[code](halves_of, values)
    if "mixlo" in code:
        assert (result >> 16 == 0x1234).all()
        result = result.astype(np.uint16)
    elif "mixhi" in code:
        assert (result & 0xFFFF == 0x5678).all()
        result = (result >> 16).astype(np.uint16)
    same_floats(result, expected)


@pytest.mark.parametrize(
    "arch, kind, dtype", [("gfx942", "f16", F16), ("gfx950", "bf16", ml_dtypes.bfloat16)], ids=["f16", "bf16"]
)
def test_dot_products(arch, kind, dtype):
    random = np.random.default_rng(1)
    a, b = (random.standard_normal((COUNT, 2)).astype(dtype) for _ in range(2))
    c = random.standard_normal(COUNT).astype(F32)
    inputs = {"v1": a.view(np.uint32)[:, 0], "v2": b.view(np.uint32)[:, 0], "v3": c, "v0": c}
    expected = ((a.astype(float) * b.astype(float)).sum(1) + c).astype(F32)
    same_floats(execute(arch, f"v_dot2_f32_{kind} v0, v1, v2, v3", inputs, "v0"), expected)
    same_floats(execute(arch, f"v_dot2c_f32_{kind} v0, v1, v2", inputs, "v0"), expected)


@pytest.mark.parametrize("arch, flushes", [("gfx90a", True), ("gfx942", False)])
def test_dot_products_flush_denormals_on_gfx90a_alone(arch, flushes):
    tiny = np.full(64, np.float16([2.0**-20, 0]).view(np.uint32)[0])
    large = np.full(64, np.float16([2.0**10, 0]).view(np.uint32)[0])
    result = execute(arch, "v_dot2_f32_f16 v0, v1, v2, v3", {"v1": tiny, "v2": large, "v3": np.zeros(64, F32)}, "v0")
    assert (result.view(F32) == (0 if flushes else 2.0**-10)).all()
    addend = np.full(64, F32(2.0**-140))
    zero = np.zeros(64, np.uint32)
    result = execute(arch, "v_dot2_f32_f16 v0, v1, v2, v3", {"v1": zero, "v2": zero, "v3": addend}, "v0")
    assert (result.view(F32) == (0 if flushes else 2.0**-140)).all()


def clamped(x):
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def test_clamp():
    """Floats end up between 0 and 1, integers in their range."""
    a, b = halves(F16, 1), halves(F16, 2)
    inputs = {"v1": a.copy().view(np.uint32)[:, 0], "v2": b.copy().view(np.uint32)[:, 0]}
    result = execute("gfx942", "v_pk_add_f16 v0, v1, v2 clamp", inputs, "v0").view(F16)
    same_floats(result, clamped((a + b).ravel()))
    x, y = random_bits(COUNT, F32, 3), random_bits(COUNT, F32, 4)
    wide = {"v[2:3]": np.stack([x, y], 1).copy().view(np.uint64)[:, 0]}
    low, high = execute("gfx942", "v_pk_mul_f32 v[2:3], v[2:3], v[2:3] clamp", wide, "v2 v3")
    same_floats(low, clamped(x * x))
    same_floats(high, clamped(y * y))
    mixed = execute("gfx942", "v_fma_mix_f32 v0, v1, v2, 0 clamp", {"v1": x, "v2": y}, "v0")
    same_floats(mixed, clamped(x * y))


@pytest.mark.parametrize(
    "op, dtype", [("add_u16", np.uint16), ("sub_u16", np.uint16), ("add_i16", np.int16), ("sub_i16", np.int16)]
)
def test_saturating_pairs(op, dtype):
    a, b = (random_bits(2 * COUNT, dtype, seed) for seed in (1, 2))
    inputs = {"v1": a.view(np.uint32), "v2": b.view(np.uint32)}
    result = execute("gfx942", f"v_pk_{op} v0, v1, v2 clamp", inputs, "v0").view(dtype)
    exact = a.astype(int) + b if "add" in op else a.astype(int) - b
    assert np.array_equal(result, exact.clip(np.iinfo(dtype).min, np.iinfo(dtype).max))


REFUSED = {
    "v_pk_mul_lo_u16 v0, v1, v2 clamp": "clamp of this instruction",
    "v_dot2_f32_f16 v0, v1, v2, v3 clamp": "modifiers of dot products",
    "v_pk_mov_b32 v[0:1], v[2:3], v[4:5] clamp": "clamp",
}


@pytest.mark.parametrize("code", REFUSED)
def test_modifiers_that_are_not_implemented_are_refused(code):
    with pytest.raises(gcnsim.UnknownInstruction, match=REFUSED[code]):
        execute("gfx942", code, {}, "v0", check=False)
