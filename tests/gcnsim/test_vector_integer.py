# SPDX-License-Identifier: Apache-2.0
"""Integer and bit vector instructions, compares and selects, against Python's integers."""

import operator

import gcnsim
import numpy as np
import pytest

from tests.gcnsim.harness import ARCHS, assembles, execute, random_bits

M16, M24, M32, M64 = (1 << 16) - 1, (1 << 24) - 1, (1 << 32) - 1, (1 << 64) - 1
COUNT = 1024


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def field(x: int, offset: int, width: int, sign: bool) -> int:
    offset, width = offset & 31, width & 31
    value = (signed(x) if sign else x) >> offset & (1 << width) - 1
    return signed(value, width) if sign and width else value


def permuted(high: int, low: int, selector: int) -> int:
    source = (high << 32 | low).to_bytes(8, "little")
    result = []
    for choice in selector.to_bytes(4, "little"):
        if choice < 8:
            result.append(source[choice])
        elif choice < 12:
            result.append(255 * (source[2 * (choice - 8) + 1] >> 7))
        else:
            result.append(0 if choice == 12 else 255)
    return int.from_bytes(result, "little")


def truth(table: int, a: int, b: int, c: int, bits: int = 32) -> int:
    columns = ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1 for n in range(bits))
    return sum((table >> row & 1) << n for n, row in enumerate(columns))


def octets(x: int) -> bytes:
    return x.to_bytes(4, "little")


def dot4(a: int, b: int, c: int) -> int:
    return sum(signed(x, 8) * signed(y, 8) for x, y in zip(octets(a), octets(b), strict=True)) + c


def zeros_above(x: int) -> int:
    return 32 - x.bit_length() if x else -1


def middle(*values: int) -> int:
    return sorted(values)[1]


# v1, v2 and v3 are random words, v[4:5] and v[6:7] random pairs; the result is v0.
WORDS = {
    "v_mov_b32 v0, v1": lambda a, b, c: a,
    "v_mov_b32 v0, 1.0": lambda a, b, c: 0x3F800000,
    "v_mov_b32 v0, 0x12345678": lambda a, b, c: 0x12345678,
    "v_mov_b32 v0, -1": lambda a, b, c: -1,
    "v_add_u32 v0, v1, v2": lambda a, b, c: a + b,
    "v_sub_u32 v0, v1, v2": lambda a, b, c: a - b,
    "v_subrev_u32 v0, v1, v2": lambda a, b, c: b - a,
    "v_add_i32 v0, v1, v2": lambda a, b, c: a + b,
    "v_sub_i32 v0, v1, v2": lambda a, b, c: a - b,
    "v_add3_u32 v0, v1, v2, v3": lambda a, b, c: a + b + c,
    "v_lshl_add_u32 v0, v1, v2, v3": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32 v0, v1, v2, v3": lambda a, b, c: a + b << (c & 31),
    "v_xad_u32 v0, v1, v2, v3": lambda a, b, c: (a ^ b) + c,
    "v_mul_lo_u32 v0, v1, v2": lambda a, b, c: a * b,
    "v_mul_hi_u32 v0, v1, v2": lambda a, b, c: a * b >> 32,
    "v_mul_hi_i32 v0, v1, v2": lambda a, b, c: signed(a) * signed(b) >> 32,
    "v_mul_u32_u24 v0, v1, v2": lambda a, b, c: (a & M24) * (b & M24),
    "v_mul_hi_u32_u24 v0, v1, v2": lambda a, b, c: (a & M24) * (b & M24) >> 32,
    "v_mul_i32_i24 v0, v1, v2": lambda a, b, c: signed(a, 24) * signed(b, 24),
    "v_mad_u32_u24 v0, v1, v2, v3": lambda a, b, c: (a & M24) * (b & M24) + c,
    "v_mad_i32_i24 v0, v1, v2, v3": lambda a, b, c: signed(a, 24) * signed(b, 24) + c,
    "v_mad_u32_u16 v0, v1, v2, v3": lambda a, b, c: (a & M16) * (b & M16) + c,
    "v_mad_i32_i16 v0, v1, v2, v3": lambda a, b, c: signed(a, 16) * signed(b, 16) + c,
    "v_sad_u8 v0, v1, v2, v3": lambda a, b, c: sum(abs(x - y) for x, y in zip(octets(a), octets(b), strict=True)) + c,
    "v_sad_u32 v0, v1, v2, v3": lambda a, b, c: abs(a - b) + c,
    "v_mul_hi_i32_i24 v0, v1, v2": lambda a, b, c: signed(a, 24) * signed(b, 24) >> 32,
    "v_dot4_u32_u8 v0, v1, v2, v3": lambda a, b, c: sum(x * y for x, y in zip(octets(a), octets(b), strict=True)) + c,
    "v_dot2_i32_i16 v0, v1, v2, v3": lambda a, b, c: (
        signed(a, 16) * signed(b, 16) + signed(a >> 16, 16) * signed(b >> 16, 16) + c
    ),
    "v_dot4_i32_i8 v0, v1, v2, v3": dot4,
    "v_dot4c_i32_i8 v0, v1, v2": lambda a, b, c: dot4(a, b, 7),
    "v_max_u32 v0, v1, v2": lambda a, b, c: max(a, b),
    "v_min_u32 v0, v1, v2": lambda a, b, c: min(a, b),
    "v_max_i32 v0, v1, v2": lambda a, b, c: max(signed(a), signed(b)),
    "v_min_i32 v0, v1, v2": lambda a, b, c: min(signed(a), signed(b)),
    "v_max3_u32 v0, v1, v2, v3": lambda a, b, c: max(a, b, c),
    "v_min3_u32 v0, v1, v2, v3": lambda a, b, c: min(a, b, c),
    "v_max3_i32 v0, v1, v2, v3": lambda a, b, c: max(signed(a), signed(b), signed(c)),
    "v_min3_i32 v0, v1, v2, v3": lambda a, b, c: min(signed(a), signed(b), signed(c)),
    "v_med3_u32 v0, v1, v2, v3": middle,
    "v_med3_i32 v0, v1, v2, v3": lambda a, b, c: middle(signed(a), signed(b), signed(c)),
    "v_and_b32 v0, v1, v2": lambda a, b, c: a & b,
    "v_or_b32 v0, v1, v2": lambda a, b, c: a | b,
    "v_xor_b32 v0, v1, v2": lambda a, b, c: a ^ b,
    "v_xnor_b32 v0, v1, v2": lambda a, b, c: ~(a ^ b),
    "v_not_b32 v0, v1": lambda a, b, c: ~a,
    "v_or3_b32 v0, v1, v2, v3": lambda a, b, c: a | b | c,
    "v_and_or_b32 v0, v1, v2, v3": lambda a, b, c: a & b | c,
    "v_lshl_or_b32 v0, v1, v2, v3": lambda a, b, c: a << (b & 31) | c,
    "v_lshlrev_b32 v0, v1, v2": lambda a, b, c: b << (a & 31),
    "v_lshrrev_b32 v0, v1, v2": lambda a, b, c: b >> (a & 31),
    "v_ashrrev_i32 v0, v1, v2": lambda a, b, c: signed(b) >> (a & 31),
    "v_bfe_u32 v0, v1, v2, v3": lambda a, b, c: field(a, b, c, False),
    "v_bfe_i32 v0, v1, v2, v3": lambda a, b, c: field(a, b, c, True),
    "v_bfi_b32 v0, v1, v2, v3": lambda a, b, c: a & b | ~a & c,
    "v_bfm_b32 v0, v1, v2": lambda a, b, c: (1 << (a & 31)) - 1 << (b & 31),
    "v_bfrev_b32 v0, v1": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "v_bcnt_u32_b32 v0, v1, v2": lambda a, b, c: a.bit_count() + b,
    "v_ffbh_u32 v0, v1": lambda a, b, c: zeros_above(a),
    "v_ffbh_i32 v0, v1": lambda a, b, c: zeros_above(a ^ M32 if a >> 31 else a),
    "v_ffbl_b32 v0, v1": lambda a, b, c: (a & -a).bit_length() - 1,
    "v_perm_b32 v0, v1, v2, v3": lambda a, b, c: permuted(a, b, c),
    "v_perm_b32 v0, v1, v2, s4": lambda a, b, c: permuted(a, b, 0x0D0C0905),
    "v_alignbit_b32 v0, v1, v2, v3": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32 v0, v1, v2, v3": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_cvt_pk_u16_u32 v0, v1, v2": lambda a, b, c: min(a, M16) | min(b, M16) << 16,
    "v_cvt_pk_i16_i32 v0, v1, v2": lambda a, b, c: (
        (max(min(signed(a), 32767), -32768) & M16) | max(min(signed(b), 32767), -32768) << 16
    ),
    "v_cndmask_b32 v0, v1, v2, vcc": lambda a, b, c: None,  # below
    # 16 bits: most clear the upper half of the destination, which held 7
    "v_add_u16 v0, v1, v2": lambda a, b, c: a + b & M16,
    "v_sub_u16 v0, v1, v2": lambda a, b, c: a - b & M16,
    "v_subrev_u16 v0, v1, v2": lambda a, b, c: b - a & M16,
    "v_mul_lo_u16 v0, v1, v2": lambda a, b, c: a * b & M16,
    "v_mad_legacy_u16 v0, v1, v2, v3": lambda a, b, c: a * b + c & M16,
    "v_lshlrev_b16 v0, v1, v2": lambda a, b, c: b << (a & 15) & M16,
    "v_lshrrev_b16 v0, v1, v2": lambda a, b, c: (b & M16) >> (a & 15),
    "v_ashrrev_i16 v0, v1, v2": lambda a, b, c: signed(b, 16) >> (a & 15) & M16,
    "v_max_u16 v0, v1, v2": lambda a, b, c: max(a & M16, b & M16),
    "v_min_u16 v0, v1, v2": lambda a, b, c: min(a & M16, b & M16),
    "v_max_i16 v0, v1, v2": lambda a, b, c: max(signed(a, 16), signed(b, 16)) & M16,
    "v_min_i16 v0, v1, v2": lambda a, b, c: min(signed(a, 16), signed(b, 16)) & M16,
    "v_mad_u16 v0, v1, v2, v3": lambda a, b, c: a * b + c & M16 | 0x70000,
    "v_mad_i16 v0, v1, v2, v3": lambda a, b, c: a * b + c & M16 | 0x70000,
    "v_add_i16 v0, v1, v2": lambda a, b, c: a + b & M16 | 0x70000,
    "v_sub_i16 v0, v1, v2": lambda a, b, c: a - b & M16 | 0x70000,
    "v_mad_u16 v0, v1, v2, v3 op_sel:[1,0,0,1]": lambda a, b, c: ((a >> 16) * b + c & M16) << 16 | 7,
    "v_pack_b32_f16 v0, v1, v2": lambda a, b, c: a & M16 | b << 16,
    "v_pack_b32_f16 v0, v1, v2 op_sel:[1,1,0]": lambda a, b, c: a >> 16 | b & ~M16,
    "v_pack_b32_f16 v0, v1, 1.0": lambda a, b, c: a & M16 | 0x3C000000,
    "v_pack_b32_f16 v0, -v1, |v2|": lambda a, b, c: a & M16 ^ 0x8000 | (b & 0x7FFF) << 16,
}
del WORDS["v_cndmask_b32 v0, v1, v2, vcc"]
GFX950 = {
    "v_bitop3_b32 v0, v1, v2, v3 bitop3:0x36": lambda a, b, c: truth(0x36, a, b, c),
    "v_bitop3_b32 v0, v1, v2, v3 bitop3:0xec": lambda a, b, c: truth(0xEC, a, b, c),
    "v_bitop3_b16 v0, v1, v2, v3 bitop3:0x1b": lambda a, b, c: truth(0x1B, a, b, c, 16) | 0x70000,
}
A, B, C = (random_bits(COUNT, np.uint32, seed) for seed in (1, 2, 3))
WIDE_A, WIDE_B = (random_bits(COUNT, np.uint64, seed) for seed in (4, 5))
TRIPLES = list(zip(A.tolist(), B.tolist(), C.tolist(), strict=True))
WIDE_PAIRS = list(zip(WIDE_A.tolist(), WIDE_B.tolist(), strict=True))
INPUTS = {"v1": A, "v2": B, "v3": C, "v[4:5]": WIDE_A, "v[6:7]": WIDE_B, "v0": np.full(COUNT, 0x70007, np.uint32)}


@pytest.mark.parametrize("code", WORDS | GFX950)
def test_word(code):
    old = 7 if "dot4c" in code else 0x70007
    inputs = INPUTS | {"v0": np.full(COUNT, old, np.uint32), "s4": 0x0D0C0905}
    expected = [(WORDS | GFX950)[code](*triple) & M32 for triple in TRIPLES]
    for arch in ("gfx90a", "gfx942") if code in WORDS else ("gfx950",):
        assert execute(arch, code, inputs, "v0").tolist() == expected


@pytest.mark.parametrize("selector", range(16))
def test_perm_selectors(selector):
    """Every choice of a byte, in every byte of the result."""
    for byte in range(4):
        mask = 0xFF << 8 * byte
        result = execute("gfx942", "v_perm_b32 v0, v1, v2, s4", {"v1": A, "v2": B, "s4": selector << 8 * byte}, "v0")
        assert [r & mask for r in result.tolist()] == [
            permuted(a, b, selector << 8 * byte) & mask for a, b, _ in TRIPLES
        ]


WIDE = {
    "v_lshlrev_b64 v[0:1], v2, v[4:5]": lambda a, b, n, c: a << (n & 63),
    "v_lshrrev_b64 v[0:1], v2, v[4:5]": lambda a, b, n, c: a >> (n & 63),
    "v_ashrrev_i64 v[0:1], v2, v[4:5]": lambda a, b, n, c: signed(a, 64) >> (n & 63),
    "v_mov_b64 v[0:1], v[4:5]": lambda a, b, n, c: a,
    "v_lshl_add_u64 v[0:1], v[4:5], 3, v[6:7]": lambda a, b, n, c: (a << 3) + b,
    "v_mad_u64_u32 v[0:1], s[4:5], v2, v3, v[4:5]": lambda a, b, n, c: n * c + a,
    "v_mad_u64_u32 v[0:1], s[4:5], v2, v3, 0": lambda a, b, n, c: n * c,
    "v_mad_i64_i32 v[0:1], s[4:5], v2, v3, v[4:5]": lambda a, b, n, c: signed(n) * signed(c) + a,
}


@pytest.mark.parametrize("code", WIDE)
def test_wide(code):
    result = execute("gfx942", code, INPUTS, "v[0:1]")
    rows = zip(WIDE_PAIRS, TRIPLES, strict=True)
    assert result.tolist() == [WIDE[code](a, b, n, c) & M64 for (a, b), (_, n, c) in rows]


def between(low, x, high):
    return min(max(x, low), high)


SATURATED = {
    "v_add_u32 v0, v1, v2 clamp": lambda a, b: between(0, a + b, M32),
    "v_sub_u32 v0, v1, v2 clamp": lambda a, b: between(0, a - b, M32),
    "v_subrev_u32 v0, v1, v2 clamp": lambda a, b: between(0, b - a, M32),
    "v_add_i32 v0, v1, v2 clamp": lambda a, b: between(-(1 << 31), signed(a) + signed(b), (1 << 31) - 1),
    "v_sub_i32 v0, v1, v2 clamp": lambda a, b: between(-(1 << 31), signed(a) - signed(b), (1 << 31) - 1),
    "v_add_u16 v0, v1, v2 clamp": lambda a, b: between(0, (a & M16) + (b & M16), M16),
    "v_sub_u16 v0, v1, v2 clamp": lambda a, b: between(0, (a & M16) - (b & M16), M16),
    "v_sub_i16 v0, v1, v2 clamp": lambda a, b: between(-32768, signed(a, 16) - signed(b, 16), 32767) & M16 | 0x70000,
}


@pytest.mark.parametrize("code", SATURATED)
def test_saturating_arithmetic(code):
    expected = [SATURATED[code](a, b) & M32 for a, b, _ in TRIPLES]
    assert execute("gfx942", code, INPUTS, "v0").tolist() == expected


def test_clamp_elsewhere_is_refused():
    with pytest.raises(gcnsim.UnknownInstruction, match="clamp"):
        execute("gfx942", "v_mad_u32_u24 v0, v1, v2, v3 clamp", INPUTS, "v0")


def bits(masks):
    """Lane masks [waves] as booleans [lanes]."""
    return np.unpackbits(masks.view(np.uint8), bitorder="little").astype(bool)


CARRIES = {
    "v_add_co_u32 v0, vcc, v1, v2": lambda a, b, c: a + b,
    "v_sub_co_u32 v0, vcc, v1, v2": lambda a, b, c: a - b,
    "v_subrev_co_u32 v0, vcc, v1, v2": lambda a, b, c: b - a,
    "v_addc_co_u32 v0, vcc, v1, v2, vcc": lambda a, b, c: a + b + c,
    "v_subb_co_u32 v0, vcc, v1, v2, vcc": lambda a, b, c: a - b - c,
    "v_subbrev_co_u32 v0, vcc, v1, v2, vcc": lambda a, b, c: b - a - c,
}


@pytest.mark.parametrize("code", CARRIES)
def test_carry(code):
    carries = random_bits(COUNT // 64, np.uint64, 9)
    result, out = execute("gfx90a", code, INPUTS | {"vcc": carries}, "v0 vcc")
    expected = [CARRIES[code](a, b, int(c)) for (a, b, _), c in zip(TRIPLES, bits(carries), strict=True)]
    assert result.tolist() == [value & M32 for value in expected]
    assert bits(out).tolist() == [not 0 <= value <= M32 for value in expected]


def test_carry_of_multiply_add():
    """Carry out of 64 bits, which takes large numbers to see."""
    large = np.full(64, M32, np.uint32)
    inputs = {"v2": large, "v3": large, "v[4:5]": np.where(np.arange(64) % 2 == 0, np.uint64(M64), np.uint64(0))}
    result, carry = execute("gfx90a", "v_mad_u64_u32 v[0:1], s[4:5], v2, v3, v[4:5]", inputs, "v[0:1] s[4:5]")
    assert result.tolist() == [M32 * M32 - 1 if n % 2 == 0 else M32 * M32 for n in range(64)]
    assert bits(carry).tolist() == [n % 2 == 0 for n in range(64)]


COMPARES = {
    "lt": operator.lt,
    "eq": operator.eq,
    "le": operator.le,
    "gt": operator.gt,
    "ne": operator.ne,
    "ge": operator.ge,
}


@pytest.mark.parametrize("kind", ["u16", "i16", "u32", "i32", "u64", "i64"])
@pytest.mark.parametrize("condition", COMPARES)
def test_compare(kind, condition):
    width = int(kind[1:])
    a, b = (WIDE_A, WIDE_B) if width == 64 else (A, B)
    b = np.where(np.arange(COUNT) % 3 == 0, a, b)
    first, second = ("v[4:5]", "v[6:7]") if width == 64 else ("v1", "v2")
    mask = 0xFFFF0000FFFFFF0F
    result = execute("gfx942", f"v_cmp_{condition}_{kind} vcc, {first}, {second}", {first: a, second: b}, "vcc", mask)
    number = (lambda x: signed(x, width)) if kind[0] == "i" else (lambda x: x & (1 << width) - 1)
    holds = [COMPARES[condition](number(x), number(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert bits(result).tolist() == [held and bool(mask >> lane % 64 & 1) for lane, held in enumerate(holds)]


def test_compare_sets_exec():
    left, vcc = execute("gfx942", "v_cmpx_lt_u32 vcc, v1, v2", INPUTS, "exec vcc", 0xFFFF)
    expected = [a < b and lane % 64 < 16 for lane, (a, b, _) in enumerate(TRIPLES)]
    assert bits(left).tolist() == expected
    assert bits(vcc).tolist() == expected


def test_select():
    masks = random_bits(COUNT // 64, np.uint64, 8)
    for code, inputs in (
        ("v_cndmask_b32 v0, v1, v2, vcc", {"vcc": masks}),
        ("v_cndmask_b32 v0, v1, v2, s[4:5]", {"s[4:5]": masks}),
    ):
        assert np.array_equal(execute("gfx942", code, INPUTS | inputs, "v0"), np.where(bits(masks), B, A))
    negated = execute("gfx942", "v_cndmask_b32 v0, -v1, v2, s[4:5]", INPUTS | {"s[4:5]": masks}, "v0")
    assert np.array_equal(negated, np.where(bits(masks), B, A ^ np.uint32(1 << 31)))


@pytest.mark.parametrize("arch", ARCHS)
def test_inactive_lanes_keep_their_values(arch):
    mask = 0x123456789ABCDEF0
    result = execute(arch, "v_add_u32 v0, v1, v2\nv_mov_b32 v4, s4", INPUTS | {"s4": 5}, "v0 v4", mask)
    active = np.tile([bool(mask >> lane & 1) for lane in range(64)], COUNT // 64)
    assert np.array_equal(result[0], np.where(active, A + B, 0x70007))
    assert np.array_equal(result[1], np.where(active, 5, WIDE_A.astype(np.uint32)))


def test_swap():
    first, second = execute("gfx942", "v_swap_b32 v1, v2", INPUTS, "v1 v2", exec_mask=0xFFFF)
    low = np.arange(COUNT) % 64 < 16
    assert np.array_equal(first, np.where(low, B, A))
    assert np.array_equal(second, np.where(low, A, B))


def test_accumulation_registers():
    code = "v_accvgpr_write_b32 a3, v1\nv_accvgpr_mov_b32 a200, a3\nv_accvgpr_read_b32 v0, a200"
    assert np.array_equal(execute("gfx90a", code, INPUTS, "v0"), A)


def test_tests_are_checked_by_the_assembler():
    assert assembles("gfx942", "v_perm_b32 v0, v1, v2, v3")
    assert not assembles("gfx942", "v_perm_b32 v0, v1, v2, 0x12345678")
