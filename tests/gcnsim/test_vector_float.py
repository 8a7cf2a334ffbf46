# SPDX-License-Identifier: Apache-2.0
"""Floating-point vector instructions against numpy, with fractions for what must be rounded once."""

from fractions import Fraction

import numpy as np
import pytest

from tests.gcnsim.harness import ARCHS, execute, random_bits, same_floats, special_values

F16, F32, F64 = np.float16, np.float32, np.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS = {"f16": F16, "f32": F32, "f64": F64}


def pairs(kind, count=2048):
    """All pairs of special values, then random ones."""
    special = special_values(kind)
    a, b = (grid.ravel() for grid in np.meshgrid(special, special))
    both = np.concatenate([a, random_bits(count, kind, 1)]), np.concatenate([b, random_bits(count, kind, 2)])
    return tuple(x[: len(x) // 64 * 64] for x in both)


def registers(kind):
    """Text of destination and three sources, and how a result is viewed."""
    if kind == "f64":
        return "v[0:1]", ("v[2:3]", "v[4:5]", "v[6:7]")
    return "v0", ("v1", "v2", "v3")


def run(op, kind, *values, arch="gfx942", modifiers=""):
    destination, sources = registers(kind)
    names = sources[: len(values)]
    text = f"{op}_{kind} {destination}, {', '.join(names)} {modifiers}"
    result = execute(arch, text, dict(zip(names, values, strict=True)), destination)
    return result.astype(np.uint16) if kind == "f16" else result


def ordered_key(x):
    """Numbers in the order of IEEE 754's maximum: -0 below +0."""
    return (float(x), 0 if np.signbit(x) else 1)


def number_of(pick):
    """min or max that prefers a number to a NaN."""

    def combine(*values):
        numbers = [x for x in values if not np.isnan(x)]
        return pick(numbers, key=ordered_key) if numbers else values[0]

    return combine


def elementwise(function):
    return lambda *arrays: np.array([function(*row) for row in zip(*arrays, strict=True)], arrays[0].dtype)


TWO = {
    "v_add": np.add,
    "v_sub": np.subtract,
    "v_subrev": lambda a, b: b - a,
    "v_mul": np.multiply,
    "v_max": elementwise(number_of(max)),
    "v_min": elementwise(number_of(min)),
}
IN_DOUBLE = ("v_add", "v_mul", "v_max", "v_min")


@pytest.mark.parametrize(
    "op, kind", [*((op, kind) for op in TWO for kind in ("f16", "f32")), *((op, "f64") for op in IN_DOUBLE)]
)
def test_two_sources(op, kind):
    a, b = pairs(KINDS[kind])
    same_floats(run(op, kind, a, b), TWO[op](a, b))


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_three_way_minimum_maximum_and_median(kind):
    a, b = pairs(KINDS[kind], 1024)
    c = np.random.default_rng(3).permutation(a)
    same_floats(run("v_max3", kind, a, b, c), elementwise(number_of(max))(a, b, c))
    same_floats(run("v_min3", kind, a, b, c), elementwise(number_of(min))(a, b, c))
    least = number_of(min)

    def median(*values):
        return least(*values) if np.isnan(values).any() else sorted(values, key=ordered_key)[1]

    same_floats(run("v_med3", kind, a, b, c), elementwise(median)(a, b, c))


def test_maximum_that_keeps_nan():
    a, b = pairs(F32)
    c = np.random.default_rng(3).permutation(b)
    any_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    for op, pick in (("v_maximum3", max), ("v_minimum3", min)):
        expected = np.where(any_nan, F32(np.nan), elementwise(number_of(pick))(a, b, c))
        same_floats(run(op, "f32", a, b, c, arch="gfx950"), expected)


ONE = {"v_floor": np.floor, "v_ceil": np.ceil, "v_trunc": np.trunc, "v_rndne": np.rint}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ONE)
def test_rounding_to_integers(op, kind):
    a, _ = pairs(KINDS[kind])
    same_floats(run(op, kind, a), ONE[op](a))


@pytest.mark.parametrize("kind", KINDS)
def test_fraction(kind):
    a, _ = pairs(KINDS[kind])
    result = run("v_fract", kind, a).view(KINDS[kind])
    finite = np.isfinite(a)
    assert ((result >= 0) & (result < 1))[finite].all()
    moderate = finite & (a >= 0)
    same_floats(result[moderate], (a - np.floor(a))[moderate])


# --- one rounding


def rounded(exact: Fraction, kind):
    """The nearest number of the format, ties to even, by integer arithmetic."""
    if exact == 0:
        return kind(0)
    info = np.finfo(kind)
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    step = Fraction(2) ** (max(exponent, int(info.minexp)) - info.nmant)
    steps, rest = divmod(magnitude, step)
    steps += rest * 2 > step or (rest * 2 == step and steps % 2)
    value = steps * step
    result = np.inf if value > Fraction(float(info.max)) else float(value)
    return kind(-result if exact < 0 else result)


def fused(a, b, c):
    """a * b + c rounded once; where that is no number, or is 0, what doubles say."""
    kind = a.dtype.type
    results = []
    for x, y, z in zip(a, b, c, strict=True):
        if not np.isfinite([x, y, z]).all():
            results.append(F64(x) * F64(y) + F64(z))
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        results.append(rounded(exact, kind) if exact else F64(x) * F64(y) + F64(z))
    return np.array(results).astype(kind)


def hard_triples(kind, count=2048):
    """Random ones, and sums that sit on a tie but for their last bit."""
    a, b, c = (random_bits(count, kind, seed) for seed in (1, 2, 3))
    info = np.finfo(kind)
    one = kind(1)
    tie = kind(info.eps / 2)
    extra = [(one + info.eps, one + info.eps, kind(0)), (tie, one, one), (tie, one + info.eps, one), (tie, -one, one)]
    extra += [(tie * kind(0.5), tie * kind(0.25), one), (tie, one, one + info.eps), (one, one, -tie)]
    extra += [(info.tiny, kind(0.5), info.smallest_subnormal), (info.tiny, info.eps, info.tiny)]
    rows = np.array(extra, kind)
    return tuple(np.concatenate([x, np.resize(rows[:, n], 64)]) for n, x in enumerate((a, b, c)))


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_fused_multiply_add(kind):
    a, b, c = hard_triples(KINDS[kind])
    same_floats(run("v_fma", kind, a, b, c), fused(a, b, c))


def test_fused_multiply_add_rounds_once():
    """The product lies 2^-70 beside a tie, which a sum in double does not see."""
    above, below = F32(2**-12 * (1 + 2**-23)), F32(2**-12 * (1 - 2**-23))
    rows = [(above, below, F32(1 + 2**-23)), (-above, below, F32(1 + 2**-23)), (above, below, F32(-1 - 2**-23))]
    rows += [(above * F32(2**-100), below * F32(2**-14), F32(2**-149)), (above, above, F32(1)), (below, below, F32(1))]
    a, b, c = (np.resize(np.array(rows, F32)[:, n], 64) for n in range(3))
    in_double = (a.astype(F64) * b + c).astype(F32)
    assert (in_double != fused(a, b, c)).any()
    same_floats(run("v_fma", "f32", a, b, c), fused(a, b, c))


def test_fused_multiply_add_of_doubles():
    a, b, c = (random_bits(2048, F64, seed) for seed in (1, 2, 3))
    tie, last = F64(2.0**-53), F64(2.0**-52)
    rows = [(1 + last, 1 - tie, 1), (tie, 1 + last, 1), (tie, 1 - tie, 1 + last), (-tie, 1 - tie, 1 + last)]
    # The product lies 2^-157 beside a tie.
    rows += [(2.0**-27 * (1 + last), sign * 2.0**-26 * (1 - last), sign * (1 + last)) for sign in (1, -1)]
    a, b, c = (np.concatenate([x, np.resize(np.array(rows)[:, n], 64)]) for n, x in enumerate((a, b, c)))
    result = run("v_fma", "f64", a, b, c).view(F64)
    moderate = [n for n in range(len(a)) if all(1e-100 < abs(x[n]) < 1e100 for x in (a, b, c))]
    assert len(moderate) > 500
    exact = [Fraction(a[n]) * Fraction(b[n]) + Fraction(c[n]) for n in moderate]
    same_floats(result[moderate], np.array([rounded(value, F64) for value in exact]))
    accumulated = execute(
        "gfx90a", "v_fmac_f64 v[6:7], v[2:3], v[4:5]", {"v[2:3]": a, "v[4:5]": b, "v[6:7]": c}, "v[6:7]"
    )
    same_floats(accumulated, result)


MULTIPLY_ADDS = {
    "v_fmac_f32 v0, v1, v2": lambda a, b, c: fused(a, b, c),
    "v_fmaak_f32 v0, v1, v2, 0x40490fdb": lambda a, b, c: fused(a, b, np.full_like(a, F32(np.pi))),
    "v_fmamk_f32 v0, v1, 0x40490fdb, v2": lambda a, b, c: fused(a, np.full_like(a, F32(np.pi)), b),
    "v_fma_f32 v0, v1, -v2, |v3|": lambda a, b, c: fused(a, -b, np.abs(c)),
    "v_fma_f32 v0, s4, 2.0, v1": lambda a, b, c: fused(np.full_like(a, 3), np.full_like(a, 2), a),
}


@pytest.mark.parametrize("code", MULTIPLY_ADDS)
def test_forms_of_multiply_add(code):
    a, b, c = hard_triples(F32, 256)
    old = {"v0": c} if "fmac" in code else {}
    result = execute("gfx942", code, {"v1": a, "v2": b, "v3": c, "s4": 0x40400000} | old, "v0")
    same_floats(result, MULTIPLY_ADDS[code](a, b, c))


UNFUSED = {
    "v_mad_f32 v0, v1, -v2, v3": lambda a, b, c: (a, -b, c),
    "v_mac_f32 v3, v1, v2": lambda a, b, c: (a, b, c),
    "v_madak_f32 v0, v1, v2, 0x40490fdb": lambda a, b, c: (a, b, F32(np.pi)),
    "v_madmk_f32 v0, v1, 0x40490fdb, v2": lambda a, b, c: (a, F32(np.pi), b),
}


@pytest.mark.parametrize("code", UNFUSED)
def test_unfused_multiply_add(code):
    """gfx90a alone: rounds twice, and knows no denormals."""

    def flush(x):
        return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32(0), x), x)

    a, b, c = hard_triples(F32, 512)
    x, y, z = (flush(value) for value in UNFUSED[code](a, b, c))
    result = execute("gfx90a", code, {"v1": a, "v2": b, "v3": c}, "v3" if "mac" in code else "v0")
    same_floats(result, flush(flush(x * y) + z))


def test_sixteen_bit_results_and_the_upper_half():
    """v_add_f16 clears the upper half, v_fma_f16 keeps it."""
    a, b, c = hard_triples(F16, 256)
    old = np.full(len(a), 0xABCD0000, np.uint32)
    assert (execute("gfx942", "v_add_f16 v0, v1, v2", {"v0": old, "v1": a, "v2": b}, "v0") >> 16 == 0).all()
    result = execute("gfx942", "v_fma_f16 v0, v1, v2, v3", {"v0": old, "v1": a, "v2": b, "v3": c}, "v0")
    assert (result >> 16 == 0xABCD).all()
    same_floats(result.astype(np.uint16), fused(a, b, c))
    high = execute("gfx942", "v_fma_f16 v0, v1, v2, v3 op_sel:[0,0,0,1]", {"v0": old, "v1": a, "v2": b, "v3": c}, "v0")
    assert (high & 0xFFFF == 0).all()
    same_floats((high >> 16).astype(np.uint16), fused(a, b, c))


# --- modifiers

MODIFIED = {
    "v_add_f32 v0, -v1, |v2|": lambda a, b: -a + np.abs(b),
    "v_add_f32 v0, -|v1|, v2": lambda a, b: -np.abs(a) + b,
    "v_mul_f32 v0, v1, v2 mul:2": lambda a, b: a * b * 2,
    "v_mul_f32 v0, v1, v2 mul:4": lambda a, b: a * b * 4,
    "v_mul_f32 v0, v1, v2 div:2": lambda a, b: a * b / 2,
    "v_add_f32 v0, v1, v2 clamp": lambda a, b: np.where(a + b > 0, np.minimum(a + b, 1), F32(0)),
    "v_max_f32 v0, v1, v1 clamp": lambda a, b: np.where(a > 0, np.minimum(a, 1), F32(0)),
    "v_add_f32 v0, 0.5, v2": lambda a, b: F32(0.5) + b,
    "v_add_f32 v0, 0x3fc00000, v2": lambda a, b: F32(1.5) + b,
    "v_mul_f32 v0, 0.15915494, v2": lambda a, b: F32(0.15915494) * b,
    "v_mul_f32 v0, 1, v2": lambda a, b: F32(2.0**-149) * b,
    "v_mul_f32 v0, s4, v2": lambda a, b: F32(3) * b,
}


@pytest.mark.parametrize("code", MODIFIED)
def test_modifiers(code):
    a, b = pairs(F32)
    same_floats(execute("gfx942", code, {"v1": a, "v2": b, "s4": 0x40400000}, "v0"), MODIFIED[code](a, b).astype(F32))


def test_half_constants():
    a, _ = pairs(F16)
    same_floats(execute("gfx942", "v_add_f16 v0, 1.0, v1", {"v1": a}, "v0").astype(np.uint16), F16(1) + a)
    same_floats(execute("gfx942", "v_mul_f16 v0, 0x4248, v1", {"v1": a}, "v0").astype(np.uint16), F16(3.140625) * a)


# --- compares

HOLDS = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: not (np.isnan(a) or np.isnan(b)),
    "u": lambda a, b: np.isnan(a) or np.isnan(b),
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
}


def mask_bits(masks):
    return np.unpackbits(masks.view(np.uint8), bitorder="little").astype(bool)


@pytest.mark.parametrize("condition", HOLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_compare(kind, condition):
    a, b = pairs(KINDS[kind], 512)
    _, (first, second, _) = registers(kind)
    code = f"v_cmp_{condition}_{kind} s[4:5], {first}, {second}"
    result = mask_bits(execute("gfx942", code, {first: a, second: b}, "s[4:5]"))
    assert result.tolist() == [bool(HOLDS[condition](float(x), float(y))) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_class(kind):
    """Each of the ten classes on its own."""
    dtype = KINDS[kind]
    info, bits = np.finfo(dtype), np.dtype(f"u{np.dtype(dtype).itemsize}")
    signaling = np.array([np.inf], dtype).view(bits) + bits.type(1)
    members = [
        signaling.view(dtype)[0],
        np.nan,
        -np.inf,
        -info.tiny,
        -info.smallest_subnormal,
        -0.0,
        0,
        info.tiny / 2,
        info.max,
    ]
    members = np.array([*members, np.inf], dtype)
    if kind == "f32":  # converting may have made it quiet
        members[0] = signaling.view(dtype)[0]
    members.view(bits)[0] = signaling[0]
    _, (first, *_) = registers(kind)
    for number in range(10):
        code = f"v_cmp_class_{kind} s[4:5], {first}, v10"
        inputs = {first: np.resize(members, 64), "v10": np.full(64, 1 << number, np.uint32)}
        result = mask_bits(execute("gfx942", code, inputs, "s[4:5]"))
        assert result.tolist() == [lane % 10 == number for lane in range(64)]


# --- exponents


def test_exponents():
    a, _ = pairs(F32)
    exponent = random_bits(len(a), np.int32, 5) % 400 - 200
    exponent[:4] = [2**31 - 1, -(2**31), 1000, -1000]
    with np.errstate(all="ignore"):
        expected = np.array([np.ldexp(F64(x), int(np.clip(n, -2000, 2000))) for x, n in zip(a, exponent, strict=True)])
    same_floats(
        execute("gfx942", "v_ldexp_f32 v0, v1, v2", {"v1": a, "v2": exponent.astype(np.int32)}, "v0"),
        expected.astype(F32),
    )
    halves, _ = pairs(F16)
    shift = np.resize(np.arange(-40, 41), len(halves)).astype(np.int16)
    same_floats(run("v_ldexp", "f16", halves, shift), np.ldexp(halves.astype(F64), shift).astype(F16))
    doubles, _ = pairs(F64)
    code, inputs = "v_ldexp_f64 v[0:1], v[2:3], v4", {"v[2:3]": doubles, "v4": shift.astype(np.int32)}
    same_floats(execute("gfx942", code, inputs, "v[0:1]"), np.ldexp(doubles, shift.astype(int)))
    finite = np.isfinite(a)
    mantissa = execute("gfx942", "v_frexp_mant_f32 v0, v1", {"v1": a}, "v0").view(F32)
    power = execute("gfx942", "v_frexp_exp_i32_f32 v0, v1", {"v1": a}, "v0").view(np.int32)
    same_floats(np.ldexp(mantissa[finite].astype(F64), power[finite]).astype(F32), a[finite])
    of_half = execute("gfx942", "v_frexp_mant_f16 v0, v1\nv_frexp_exp_i16_f16 v2, v1", {"v1": halves}, "v0 v2")
    finite_halves = np.isfinite(halves)
    back = np.ldexp(of_half[0].astype(np.uint16).view(F16).astype(F64), of_half[1].astype(np.uint16).view(np.int16))
    same_floats(back[finite_halves].astype(F16), halves[finite_halves])
    code = "v_frexp_mant_f64 v[0:1], v[2:3]\nv_frexp_exp_i32_f64 v4, v[2:3]"
    of_double = execute("gfx942", code, {"v[2:3]": doubles}, "v[0:1] v4")
    back = np.ldexp(of_double[0].view(F64), of_double[1].view(np.int32))
    same_floats(back[np.isfinite(doubles)], doubles[np.isfinite(doubles)])
    assert ((np.abs(mantissa) >= 0.5) & (np.abs(mantissa) < 1))[finite & (a != 0)].all()


# --- approximations: within an ulp of the hardware's, so exactly what numpy says in double, denormals flushed

APPROXIMATE = {
    "v_rcp": lambda x: 1 / x,
    "v_rsq": lambda x: 1 / np.sqrt(x),
    "v_sqrt": np.sqrt,
    "v_exp": np.exp2,
    "v_log": np.log2,
}


@pytest.mark.parametrize("op", APPROXIMATE)
def test_approximations(op):
    def flush(x):
        return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32(0), x), x)

    a, _ = pairs(F32)
    result = run(op, "f32", a).view(F32)
    expected = flush(APPROXIMATE[op](flush(a).astype(F64)).astype(F32))
    np.testing.assert_array_almost_equal_nulp(result[np.isfinite(expected)], expected[np.isfinite(expected)], 1)
    same_floats(result[~np.isfinite(expected)], expected[~np.isfinite(expected)])
    halves, _ = pairs(F16)
    same_floats(run(op, "f16", halves), APPROXIMATE[op](halves.astype(F64)).astype(F16))


def test_approximations_of_doubles():
    """Within an ulp here; the hardware's are coarse, and refined by the code around them."""
    a, _ = pairs(F64)
    same_floats(run("v_rcp", "f64", a), 1 / a)
    same_floats(run("v_sqrt", "f64", a), np.sqrt(a))
    same_floats(run("v_rsq", "f64", a), 1 / np.sqrt(a))


def test_reciprocal_for_integers():
    a, _ = pairs(F32)
    assert np.array_equal(run("v_rcp_iflag", "f32", a), run("v_rcp", "f32", a))


def test_sine_and_cosine_count_turns():
    turns = F32(np.linspace(-4, 4, 1024))
    sine, cosine = run("v_sin", "f32", turns).view(F32), run("v_cos", "f32", turns).view(F32)
    np.testing.assert_allclose(sine, np.sin(2 * np.pi * turns.astype(F64)), atol=1e-6)
    np.testing.assert_allclose(cosine, np.cos(2 * np.pi * turns.astype(F64)), atol=1e-6)


# --- division, as LLVM spells it: v_div_scale, a reciprocal refined by Newton's method, v_div_fmas, v_div_fixup

DIVISION = """
  v_div_scale_f32 v3, s[4:5], v2, v2, v1
  v_div_scale_f32 v4, vcc, v1, v2, v1
  v_rcp_f32 v5, v3
  v_fma_f32 v6, -v3, v5, 1.0
  v_fma_f32 v5, v6, v5, v5
  v_mul_f32 v7, v4, v5
  v_fma_f32 v8, -v3, v7, v4
  v_fma_f32 v7, v8, v5, v7
  v_fma_f32 v8, -v3, v7, v4
  v_div_fmas_f32 v8, v8, v5, v7
  v_div_fixup_f32 v0, v8, v2, v1
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_division_is_correctly_rounded(arch):
    a, b = pairs(F32, 8192)
    same_floats(execute(arch, DIVISION, {"v1": a, "v2": b}, "v0"), a / b)
    random = np.random.default_rng(7)
    fractions, powers = random.uniform(1, 2, (2, 16384)), random.integers(-126, -90, 16384)
    tiny = np.ldexp(fractions[0], powers).astype(F32)
    divisor = np.ldexp(fractions[1], random.integers(-20, 21, 16384)).astype(F32)
    same_floats(execute(arch, DIVISION, {"v1": tiny, "v2": divisor}, "v0"), tiny / divisor)


DIVISION_OF_DOUBLES = """
  v_div_scale_f64 v[8:9], s[4:5], v[4:5], v[4:5], v[2:3]
  v_div_scale_f64 v[10:11], vcc, v[2:3], v[4:5], v[2:3]
  v_rcp_f64 v[12:13], v[8:9]
  v_fma_f64 v[14:15], -v[8:9], v[12:13], 1.0
  v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]
  v_fma_f64 v[14:15], -v[8:9], v[12:13], 1.0
  v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]
  v_mul_f64 v[14:15], v[10:11], v[12:13]
  v_fma_f64 v[16:17], -v[8:9], v[14:15], v[10:11]
  v_div_fmas_f64 v[16:17], v[16:17], v[12:13], v[14:15]
  v_div_fixup_f64 v[0:1], v[16:17], v[4:5], v[2:3]
"""


def test_division_of_doubles():
    """Correctly rounded but for denormal quotients, where scaling back rounds a second time."""
    a, b = pairs(F64, 8192)
    result = execute("gfx942", DIVISION_OF_DOUBLES, {"v[2:3]": a, "v[4:5]": b}, "v[0:1]").view(F64)
    expected = a / b
    denormal = (np.abs(expected) < np.finfo(F64).tiny) & (expected != 0)
    same_floats(result[~denormal], expected[~denormal])
    assert (np.abs(result[denormal] - expected[denormal]) <= np.finfo(F64).smallest_subnormal).all()


def test_fixup_of_half():
    """The division of fp16 goes by fp32; the last step sees to zeros, infinities and NaN, and keeps the upper half."""
    a, b = pairs(F16)
    quotient = (a.astype(F32) / b.astype(F32)).astype(F16)
    inputs = {"v1": np.abs(quotient), "v2": b, "v3": a, "v0": np.full(64, 0xABCD0000, np.uint32)}
    result = execute("gfx942", "v_div_fixup_f16 v0, v1, v2, v3", inputs, "v0")
    assert (result >> 16 == 0xABCD).all()
    same_floats(result.astype(np.uint16), a / b)
