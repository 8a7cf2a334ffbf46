# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions against numpy in float64, for every flavour of 16x16 and 32x32.

The layouts are written out once more here, lane by lane, from AMD's manuals: A[i][k] lies in lane i + M * group,
B[k][j] in lane j + N * group, D[i][j] in lane j + N * (i / 4 % groups), register i % 4 + 4 * (i / (4 * groups)).
"""

import gcnsim
import ml_dtypes
import numpy as np
import pytest

from tests.gcnsim.harness import execute

WAVES = 3
DTYPES = {
    ("any", "f16"): np.float16,
    ("any", "bf16"): ml_dtypes.bfloat16,
    ("any", "i8"): np.int8,
    ("any", "f32"): np.float32,
    ("any", "xf32"): np.float32,
    ("any", "f64"): np.float64,
    ("gfx942", "fp8"): ml_dtypes.float8_e4m3fnuz,
    ("gfx942", "bf8"): ml_dtypes.float8_e5m2fnuz,
    ("gfx950", "fp8"): ml_dtypes.float8_e4m3fn,
    ("gfx950", "bf8"): ml_dtypes.float8_e5m2,
    ("gfx950", "fp6"): ml_dtypes.float6_e2m3fn,
    ("gfx950", "bf6"): ml_dtypes.float6_e3m2fn,
    ("gfx950", "fp4"): ml_dtypes.float4_e2m1fn,
}
# opcode, shape, element type, types of A and B
FLAVOURS = {
    "gfx90a": [
        ("v_mfma_f32_16x16x16f16", 16, 16, "f16", "f16"),
        ("v_mfma_f32_32x32x8f16", 32, 8, "f16", "f16"),
        ("v_mfma_f32_16x16x16bf16_1k", 16, 16, "bf16", "bf16"),
        ("v_mfma_f32_32x32x8bf16_1k", 32, 8, "bf16", "bf16"),
        ("v_mfma_f32_16x16x8bf16", 16, 8, "bf16", "bf16"),
        ("v_mfma_f32_32x32x4bf16", 32, 4, "bf16", "bf16"),
        ("v_mfma_i32_16x16x16i8", 16, 16, "i8", "i8"),
        ("v_mfma_i32_32x32x8i8", 32, 8, "i8", "i8"),
        ("v_mfma_f32_16x16x4f32", 16, 4, "f32", "f32"),
        ("v_mfma_f32_32x32x2f32", 32, 2, "f32", "f32"),
        ("v_mfma_f64_16x16x4f64", 16, 4, "f64", "f64"),
    ],
    "gfx942": [
        ("v_mfma_f32_16x16x16_f16", 16, 16, "f16", "f16"),
        ("v_mfma_f32_32x32x8_bf16", 32, 8, "bf16", "bf16"),
        ("v_mfma_i32_16x16x32_i8", 16, 32, "i8", "i8"),
        ("v_mfma_i32_32x32x16_i8", 32, 16, "i8", "i8"),
        ("v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8", "fp8"),
        ("v_mfma_f32_16x16x32_fp8_bf8", 16, 32, "fp8", "bf8"),
        ("v_mfma_f32_16x16x32_bf8_fp8", 16, 32, "bf8", "fp8"),
        ("v_mfma_f32_32x32x16_bf8_bf8", 32, 16, "bf8", "bf8"),
        ("v_mfma_f32_32x32x16_fp8_fp8", 32, 16, "fp8", "fp8"),
        ("v_mfma_f32_16x16x8_xf32", 16, 8, "xf32", "xf32"),
        ("v_mfma_f32_32x32x4_xf32", 32, 4, "xf32", "xf32"),
    ],
    "gfx950": [
        ("v_mfma_f32_16x16x32_f16", 16, 32, "f16", "f16"),
        ("v_mfma_f32_32x32x16_f16", 32, 16, "f16", "f16"),
        ("v_mfma_f32_16x16x32_bf16", 16, 32, "bf16", "bf16"),
        ("v_mfma_f32_32x32x16_bf16", 32, 16, "bf16", "bf16"),
        ("v_mfma_i32_16x16x64_i8", 16, 64, "i8", "i8"),
        ("v_mfma_i32_32x32x32_i8", 32, 32, "i8", "i8"),
        ("v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8", "fp8"),
        ("v_mfma_f32_32x32x16_bf8_fp8", 32, 16, "bf8", "fp8"),
    ],
}
CASES = [(arch, *flavour) for arch, flavours in FLAVOURS.items() for flavour in flavours]
BITS = {
    "f16": 16,
    "bf16": 16,
    "i8": 8,
    "f32": 32,
    "xf32": 32,
    "f64": 64,
    "fp8": 8,
    "bf8": 8,
    "fp6": 6,
    "bf6": 6,
    "fp4": 4,
}
F8F6F4 = {"fp8": 0, "bf8": 1, "fp6": 2, "bf6": 3, "fp4": 4}


def dtype_of(arch, kind):
    return DTYPES.get(("any", kind)) or DTYPES[arch, kind]


def random_matrix(arch, kind, rows, columns, seed):
    """[wave, rows, columns], in values that show what is where."""
    random = np.random.default_rng(seed)
    if kind == "i8":
        return random.integers(-128, 128, (WAVES, rows, columns)).astype(np.int8)
    return (random.standard_normal((WAVES, rows, columns)) * 2).astype(dtype_of(arch, kind))


def with_ten_bits(values):
    """Rounded to eleven significant bits, to nearest even."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2**11), exponent - 11)


def codes(values):
    """The bits of values, one unsigned integer each."""
    return values.view(f"u{values.dtype.itemsize}").astype(np.uint64)


def k_of(lane, element, side, per_lane, turns):
    """Which K an element of a lane is. Eight-bit operands of f8f6f4 take turns of sixteen."""
    group = lane // side
    if turns:
        return element // 16 * 16 * (64 // side) + group * 16 + element % 16
    return group * per_lane + element


def packed(matrix, bits, k, turns=False):
    """Registers [word, lane of all waves] that hold a matrix [wave, row, K] as operand A, or B transposed."""
    side = matrix.shape[1]
    per_lane = k * side // 64
    words = -(-per_lane * bits // 32)
    registers = np.zeros((words + 1, WAVES * 64), np.uint64)
    values = codes(matrix)
    for lane in range(64):
        for element in range(per_lane):
            code = values[:, lane % side, k_of(lane, element, side, per_lane, turns)]
            word, shift = divmod(element * bits, 32)
            wide = code << np.uint64(shift)
            registers[word, lane::64] |= wide & 0xFFFFFFFF
            registers[word + 1, lane::64] |= wide >> np.uint64(32)
    return registers[:words].astype(np.uint32)


def unpacked(registers, side, dtype):
    """Registers [word, lane] of an accumulator to [wave, side, side]."""
    words = np.dtype(dtype).itemsize // 4
    groups = 64 // side
    by_lane = np.ascontiguousarray(registers.reshape(-1, words, WAVES, 64).transpose(2, 0, 3, 1)).view(dtype)[..., 0]
    result = np.zeros((WAVES, side, side), dtype)
    for i in range(side):
        for j in range(side):
            if words == 2:  # doubles: rows four apart
                result[:, i, j] = by_lane[:, i // 4, j + 16 * (i % 4)]
            else:
                result[:, i, j] = by_lane[:, i % 4 + 4 * (i // (4 * groups)), j + side * (i // 4 % groups)]
    return result


def accumulator(matrix):
    """Registers [word, lane] that hold C [wave, side, side]."""
    side, words = matrix.shape[1], matrix.dtype.itemsize // 4
    groups = 64 // side
    parts = np.ascontiguousarray(matrix).view(np.uint32).reshape(*matrix.shape, words)
    registers = np.zeros((side * side // 64, words, WAVES * 64), np.uint32)
    for i in range(side):
        for j in range(side):
            if words == 2:  # doubles: rows four apart
                number, lane = i // 4, j + 16 * (i % 4)
            else:
                number, lane = i % 4 + 4 * (i // (4 * groups)), j + side * (i // 4 % groups)
            registers[number, :, lane::64] = parts[:, i, j].T
    return registers.reshape(-1, WAVES * 64)


def name(first, count, letter="v"):
    return f"{letter}[{first}:{first + count - 1}]" if count > 1 else f"{letter}{first}"


def inputs_of(registers, first, letter="v"):
    return {f"{letter}{first + n}": words for n, words in enumerate(registers)}


def multiply(arch, op, a, b, c, destination="v", modifiers="", extra=None, zero=False):
    """Runs D = A B + C with A in v0.., B in v16.., C in v32.. (or a32..), D in v64.. (or a64..)."""
    count = len(c)
    source = "0" if zero else name(32, count, destination)
    text = f"{op} {name(64, count, destination)}, {name(0, len(a))}, {name(16, len(b))}, {source}{modifiers}"
    inputs = inputs_of(a, 0) | inputs_of(b, 16) | (extra or {})
    if destination == "a":
        loads = "\n".join(f"v_accvgpr_write_b32 a{32 + n}, v{128 + n}" for n in range(count))
        text, inputs = loads + "\n" + text, inputs | inputs_of(c, 128)
    else:
        inputs |= inputs_of(c, 32)
    return np.atleast_2d(execute(arch, text, inputs, name(64, count, destination) if count != 2 else "v64 v65"))


def close(actual, expected, products):
    """Equal but for one rounding of the sum."""
    scale = np.abs(products).sum(axis=-1)
    np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=float(scale.max()) * 2.0**-24)


@pytest.mark.parametrize("arch, op, side, k, kind_a, kind_b", CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_flavour(arch, op, side, k, kind_a, kind_b):
    a = random_matrix(arch, kind_a, side, k, 1)
    b = random_matrix(arch, kind_b, side, k, 2)
    result = np.int32 if kind_a == "i8" else np.float64 if kind_a == "f64" else np.float32
    random = np.random.default_rng(3)
    c = (random.standard_normal((WAVES, side, side)) * 100).astype(result)
    registers_a, registers_b = packed(a, BITS[kind_a], k), packed(b, BITS[kind_b], k)
    if kind_a == "xf32":
        a, b = with_ten_bits(a), with_ten_bits(b)
    exact = np.einsum("wik,wjk->wij", a.astype(np.float64), b.astype(np.float64))
    registers_c = accumulator(c)
    actual = unpacked(multiply(arch, op, registers_a, registers_b, registers_c), side, result)
    expected = exact + c
    if result is np.float64:
        np.testing.assert_allclose(actual, expected, rtol=1e-14, atol=1e-13)
        return
    if result is np.int32:
        assert np.array_equal(actual, expected.astype(np.int64).astype(np.int32))
    else:
        assert np.array_equal(actual, expected.astype(np.float32))
    without = unpacked(multiply(arch, op, registers_a, registers_b, registers_c, zero=True), side, result)
    assert np.array_equal(without, exact.astype(result))


@pytest.mark.parametrize("side, k", [(16, 16), (32, 8)])
def test_accumulation_registers(side, k):
    op = f"v_mfma_f32_{side}x{side}x{k}f16"
    a, b = random_matrix("gfx90a", "f16", side, k, 1), random_matrix("gfx90a", "f16", side, k, 2)
    c = np.random.default_rng(3).standard_normal((WAVES, side, side)).astype(np.float32)
    result = multiply("gfx90a", op, packed(a, 16, k), packed(b, 16, k), accumulator(c), destination="a")
    expected = np.einsum("wik,wjk->wij", a.astype(float), b.astype(float)) + c
    assert np.array_equal(unpacked(result, side, np.float32), expected.astype(np.float32))


def test_destination_that_is_the_addend_or_a_factor():
    """D over C in place; and D over A, which must be read first."""
    a, b = random_matrix("gfx942", "f16", 16, 16, 1), random_matrix("gfx942", "f16", 16, 16, 2)
    exact = np.einsum("wik,wjk->wij", a.astype(float), b.astype(float)).astype(np.float32)
    inputs = inputs_of(packed(a, 16, 16), 0) | inputs_of(packed(b, 16, 16), 16)
    result = execute("gfx942", "v_mfma_f32_16x16x16_f16 v[0:3], v[0:1], v[16:17], 0", inputs, "v[0:3]")
    assert np.array_equal(unpacked(result, 16, np.float32), exact)
    chained = (
        "v_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[16:17], 1.0\n"
        + "v_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[16:17], v[4:7]"
    )
    result = execute("gfx942", chained, inputs, "v[4:7]")
    assert np.allclose(unpacked(result, 16, np.float32), 1 + 2 * exact, rtol=1e-6)


def test_exec_is_not_heeded():
    a, b = random_matrix("gfx942", "f16", 16, 16, 1), random_matrix("gfx942", "f16", 16, 16, 2)
    inputs = inputs_of(packed(a, 16, 16), 0) | inputs_of(packed(b, 16, 16), 16)
    text = "v_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[16:17], 0"
    assert np.array_equal(
        execute("gfx942", text, inputs, "v[4:7]", exec_mask=1), execute("gfx942", text, inputs, "v[4:7]")
    )


def test_integers_wrap():
    extreme = np.full((WAVES, 16, 32), -128, np.int8)
    c = np.full((WAVES, 16, 16), 2**31 - 1, np.int32)
    registers = packed(extreme, 8, 32)
    result = multiply("gfx942", "v_mfma_i32_16x16x32_i8", registers, registers, accumulator(c))
    assert (unpacked(result, 16, np.int32) == -(2**31) + 32 * 128 * 128 - 1).all()


def test_nan_and_infinity_reach_their_row_and_column():
    a, b = (random_matrix("gfx942", "f16", 16, 16, seed) for seed in (1, 2))
    a[:, 3, 5], b[:, 7, 2] = np.nan, np.inf
    result = multiply(
        "gfx942",
        "v_mfma_f32_16x16x16_f16",
        packed(a, 16, 16),
        packed(b, 16, 16),
        accumulator(np.zeros((WAVES, 16, 16), "f4")),
    )
    actual = unpacked(result, 16, np.float32)
    assert np.isnan(actual[:, 3, :]).all()
    assert np.isinf(np.delete(actual[:, :, 7], 3, axis=1)).all()
    assert np.isfinite(np.delete(np.delete(actual, 3, axis=1), 7, axis=2)).all()


@pytest.mark.parametrize("arch, flushes", [("gfx90a", True), ("gfx942", False)])
def test_denormals_are_flushed_on_gfx90a_alone(arch, flushes):
    a, b = np.zeros((WAVES, 16, 16), np.float16), np.zeros((WAVES, 16, 16), np.float16)
    a[:, 0, 0], b[:, 0, 0] = 2.0**-20, 2.0**10  # a is denormal in fp16
    a[:, 1, 1], b[:, 1, 1] = 1, 1
    a[:, 3, 3], b[:, 3, 3] = 1023 * 2.0**-24, 1  # the largest denormal, and the smallest number that is none
    a[:, 4, 4], b[:, 4, 4] = 2.0**-14, 1
    c = np.zeros((WAVES, 16, 16), np.float32)
    c[:, 2, 2] = 2.0**-140  # a denormal result
    op = "v_mfma_f32_16x16x16f16"
    actual = unpacked(multiply(arch, op, packed(a, 16, 16), packed(b, 16, 16), accumulator(c)), 16, np.float32)
    assert (actual[:, 0, 0] == (0 if flushes else 2.0**-10)).all()
    assert (actual[:, 2, 2] == (0 if flushes else 2.0**-140)).all()
    assert (actual[:, 1, 1] == 1).all()
    assert (actual[:, 3, 3] == (0 if flushes else 1023 * 2.0**-24)).all()
    assert (actual[:, 4, 4] == 2.0**-14).all()


# --- gfx950's f8f6f4: any two of five formats, with or without E8M0 scales for blocks of 32 along K

MIXES = [("fp8", "fp8"), ("bf8", "fp8"), ("fp4", "fp4"), ("fp8", "fp4"), ("fp6", "bf6"), ("fp4", "bf8"), ("bf6", "fp4")]


def mixed(side, k, kinds, seed):
    matrices = [random_matrix("gfx950", kind, side, k, seed + n) for n, kind in enumerate(kinds)]
    registers = [packed(m, BITS[kind], k, turns=BITS[kind] == 8) for m, kind in zip(matrices, kinds, strict=True)]
    return matrices, registers


@pytest.mark.parametrize("side, k", [(16, 128), (32, 64)])
@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_f8f6f4(kinds, side, k):
    (a, b), (registers_a, registers_b) = mixed(side, k, kinds, 1)
    c = np.random.default_rng(3).standard_normal((WAVES, side, side)).astype(np.float32)
    modifiers = f" cbsz:{F8F6F4[kinds[0]]} blgp:{F8F6F4[kinds[1]]}"
    result = multiply(
        "gfx950", f"v_mfma_f32_{side}x{side}x{k}_f8f6f4", registers_a, registers_b, accumulator(c), modifiers=modifiers
    )
    expected = np.einsum("wik,wjk->wij", a.astype(float), b.astype(float)) + c
    assert np.array_equal(unpacked(result, side, np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("side, k", [(16, 128), (32, 64)])
@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
@pytest.mark.parametrize("bytes_of", [(0, 0), (1, 0), (2, 3)], ids=["0-0", "1-0", "2-3"])
def test_scaled_f8f6f4(kinds, side, k, bytes_of):
    """Lane l holds the scale of row l mod M, block l div M, in the byte that op_sel and op_sel_hi name."""
    (a, b), (registers_a, registers_b) = mixed(side, k, kinds, 1)
    random = np.random.default_rng(4)
    scales = random.integers(120, 135, (2, WAVES, side, k // 32))
    words = []
    for scale, byte in zip(scales, bytes_of, strict=True):
        by_lane = scale.transpose(0, 2, 1).reshape(-1).astype(np.uint32)
        noise = random.integers(0, 1 << 32, by_lane.shape, np.uint64).astype(np.uint32)
        words.append(noise & ~np.uint32(0xFF << 8 * byte) | by_lane << np.uint32(8 * byte))
    select = [[byte >> n & 1 for byte in bytes_of] for n in range(2)]
    modifiers = f", v100, v101 op_sel:[{select[0][0]},{select[0][1]},0] op_sel_hi:[{select[1][0]},{select[1][1]},0]"
    modifiers += f" cbsz:{F8F6F4[kinds[0]]} blgp:{F8F6F4[kinds[1]]}"
    op = f"v_mfma_scale_f32_{side}x{side}x{k}_f8f6f4"
    zero = np.zeros((side * side // 64, WAVES * 64), np.uint32)
    result = multiply(
        "gfx950", op, registers_a, registers_b, zero, modifiers=modifiers, extra={"v100": words[0], "v101": words[1]}
    )
    values = [m.astype(float) * np.repeat(2.0 ** (s - 127.0), 32, axis=2) for m, s in zip((a, b), scales, strict=True)]
    expected = np.einsum("wik,wjk->wij", *values)
    assert np.array_equal(unpacked(result, side, np.float32), expected.astype(np.float32))


REFUSED = {
    "v_mfma_f32_4x4x4f16 v[4:7], v[0:1], v[2:3], 0": "of one block",
    "v_mfma_f32_32x32x4f16 v[4:35], v[0:1], v[2:3], 0": "blocks",
    "v_mfma_f32_16x16x4f16 v[4:19], v[0:1], v[2:3], 0": "blocks",
    "v_mfma_i32_32x32x4i8 v[4:35], v0, v2, 0": "blocks",
    "v_mfma_f32_32x32x1f32 v[4:35], v0, v2, 0": "blocks",
    "v_mfma_f32_16x16x16f16 v[4:7], v[0:1], v[2:3], 0 cbsz:1": "broadcasts",
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_is_not_implemented_is_refused(code):
    with pytest.raises(gcnsim.UnknownInstruction, match=REFUSED[code]):
        execute("gfx90a", code, {}, "v4")
