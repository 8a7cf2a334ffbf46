# SPDX-License-Identifier: Apache-2.0
"""Scalar instructions against Python's integers, SCC included."""

import gcnsim
import numpy as np
import pytest

from tests.gcnsim.harness import ARCHS, execute, random_bits

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def fits(x: int) -> bool:
    return -(1 << 31) <= x < 1 << 31


def nonzero(x: int, bits: int = 32) -> tuple[int, int]:
    return x, int(x & (1 << bits) - 1 != 0)


def field(x: int, spec: int, bits: int, sign: bool) -> int:
    offset, width = spec & (bits - 1), min(spec >> 16 & 127, bits)
    value = (signed(x, bits) if sign else x) >> offset & (1 << width) - 1
    return signed(value, width) if sign and width else value


def zeros_above(x: int) -> int:
    return 32 - x.bit_length() if x else -1


def reversed_bits(x: int) -> int:
    return int(f"{x:032b}"[::-1], 2)


# The oracle gives the result, and SCC where the instruction writes it. s5 and s6 are random words, s[8:9] and s[10:11]
# random pairs, the old s4 is 12345.
WORDS = {
    "s_add_u32 s4, s5, s6": lambda a, b, c: (a + b, a + b >> 32),
    "s_sub_u32 s4, s5, s6": lambda a, b, c: (a - b, a < b),
    "s_add_i32 s4, s5, s6": lambda a, b, c: (a + b, not fits(signed(a) + signed(b))),
    "s_sub_i32 s4, s5, s6": lambda a, b, c: (a - b, not fits(signed(a) - signed(b))),
    "s_addc_u32 s4, s5, s6": lambda a, b, c: (a + b + c, a + b + c >> 32),
    "s_subb_u32 s4, s5, s6": lambda a, b, c: (a - b - c, a < b + c),
    "s_mul_i32 s4, s5, s6": lambda a, b, c: (a * b, c),
    "s_mul_hi_u32 s4, s5, s6": lambda a, b, c: (a * b >> 32, c),
    "s_mul_hi_i32 s4, s5, s6": lambda a, b, c: (signed(a) * signed(b) >> 32, c),
    "s_abs_i32 s4, s5": lambda a, b, c: nonzero(abs(signed(a))),
    "s_min_i32 s4, s5, s6": lambda a, b, c: (min(signed(a), signed(b)), signed(a) < signed(b)),
    "s_max_i32 s4, s5, s6": lambda a, b, c: (max(signed(a), signed(b)), signed(a) > signed(b)),
    "s_min_u32 s4, s5, s6": lambda a, b, c: (min(a, b), a < b),
    "s_max_u32 s4, s5, s6": lambda a, b, c: (max(a, b), a > b),
    "s_lshl_b32 s4, s5, s6": lambda a, b, c: nonzero(a << (b & 31)),
    "s_lshr_b32 s4, s5, s6": lambda a, b, c: nonzero(a >> (b & 31)),
    "s_ashr_i32 s4, s5, s6": lambda a, b, c: nonzero(signed(a) >> (b & 31)),
    "s_lshl2_add_u32 s4, s5, s6": lambda a, b, c: ((a << 2) + b, (a << 2) + b > M32),
    "s_bfe_u32 s4, s5, s6": lambda a, b, c: nonzero(field(a, b, 32, False)),
    "s_bfe_i32 s4, s5, s6": lambda a, b, c: nonzero(field(a, b, 32, True)),
    "s_bfe_u32 s4, s5, 0x80008": lambda a, b, c: nonzero(a >> 8 & 0xFF),
    "s_bfe_i32 s4, s5, 0x100010": lambda a, b, c: nonzero(signed(a) >> 16),
    "s_bfm_b32 s4, s5, s6": lambda a, b, c: ((1 << (a & 31)) - 1 << (b & 31), c),
    "s_brev_b32 s4, s5": lambda a, b, c: (reversed_bits(a), c),
    "s_bcnt1_i32_b32 s4, s5": lambda a, b, c: nonzero(a.bit_count()),
    "s_ff1_i32_b32 s4, s5": lambda a, b, c: ((a & -a).bit_length() - 1, c),
    "s_flbit_i32_b32 s4, s5": lambda a, b, c: (zeros_above(a), c),
    "s_flbit_i32 s4, s5": lambda a, b, c: (zeros_above(a ^ M32 if a >> 31 else a), c),
    "s_sext_i32_i8 s4, s5": lambda a, b, c: (signed(a, 8), c),
    "s_sext_i32_i16 s4, s5": lambda a, b, c: (signed(a, 16), c),
    "s_and_b32 s4, s5, s6": lambda a, b, c: nonzero(a & b),
    "s_or_b32 s4, s5, s6": lambda a, b, c: nonzero(a | b),
    "s_xor_b32 s4, s5, s6": lambda a, b, c: nonzero(a ^ b),
    "s_andn2_b32 s4, s5, s6": lambda a, b, c: nonzero(a & ~b),
    "s_orn2_b32 s4, s5, s6": lambda a, b, c: nonzero(a | ~b),
    "s_nand_b32 s4, s5, s6": lambda a, b, c: nonzero(~(a & b)),
    "s_nor_b32 s4, s5, s6": lambda a, b, c: nonzero(~(a | b)),
    "s_xnor_b32 s4, s5, s6": lambda a, b, c: nonzero(~(a ^ b)),
    "s_not_b32 s4, s5": lambda a, b, c: nonzero(~a),
    "s_cselect_b32 s4, s5, s6": lambda a, b, c: (a if c else b, c),
    "s_cmov_b32 s4, s5": lambda a, b, c: (a if c else 12345, c),
    "s_cmovk_i32 s4, 0xfffe": lambda a, b, c: (-2 if c else 12345, c),
    "s_pack_ll_b32_b16 s4, s5, s6": lambda a, b, c: (a & 0xFFFF | b << 16, c),
    "s_pack_lh_b32_b16 s4, s5, s6": lambda a, b, c: (a & 0xFFFF | b & 0xFFFF0000, c),
    "s_pack_hh_b32_b16 s4, s5, s6": lambda a, b, c: (a >> 16 | b & 0xFFFF0000, c),
    "s_absdiff_i32 s4, s5, s6": lambda a, b, c: nonzero(abs(signed(signed(a) - signed(b)))),
    "s_bitset1_b32 s4, s5": lambda a, b, c: (12345 | 1 << (a & 31), c),
    "s_bitset0_b32 s4, s5": lambda a, b, c: (12345 & ~(1 << (a & 31)), c),
    "s_movk_i32 s4, 0x8000": lambda a, b, c: (-32768, c),
    "s_addk_i32 s4, 0xfff0": lambda a, b, c: (12345 - 16, 0),
    "s_mulk_i32 s4, 0xfff0": lambda a, b, c: (12345 * -16, c),
    "s_mov_b32 s4, 1.0": lambda a, b, c: (0x3F800000, c),
    "s_mov_b32 s4, 0.15915494": lambda a, b, c: (0x3E22F983, c),
    "s_mov_b32 s4, -16": lambda a, b, c: (-16, c),
    "s_mov_b32 s4, src_scc": lambda a, b, c: (c, c),
}
PAIRS = {
    "s_mov_b64 s[4:5], s[8:9]": lambda a, b, c: (a, c),
    "s_mov_b64 s[4:5], -2": lambda a, b, c: (-2, c),
    "s_and_b64 s[4:5], s[8:9], s[10:11]": lambda a, b, c: nonzero(a & b, 64),
    "s_or_b64 s[4:5], s[8:9], s[10:11]": lambda a, b, c: nonzero(a | b, 64),
    "s_xor_b64 s[4:5], s[8:9], s[10:11]": lambda a, b, c: nonzero(a ^ b, 64),
    "s_andn2_b64 s[4:5], s[8:9], s[10:11]": lambda a, b, c: nonzero(a & ~b, 64),
    "s_xnor_b64 s[4:5], s[8:9], s[10:11]": lambda a, b, c: nonzero(~(a ^ b), 64),
    "s_orn2_b64 s[4:5], s[8:9], s[10:11]": lambda a, b, c: nonzero(a | ~b, 64),
    "s_nand_b64 s[4:5], s[8:9], s[10:11]": lambda a, b, c: nonzero(~(a & b), 64),
    "s_nor_b64 s[4:5], s[8:9], s[10:11]": lambda a, b, c: nonzero(~(a | b), 64),
    "s_not_b64 s[4:5], s[8:9]": lambda a, b, c: nonzero(~a, 64),
    "s_lshl_b64 s[4:5], s[8:9], s10": lambda a, b, c: nonzero(a << (b & 63), 64),
    "s_lshr_b64 s[4:5], s[8:9], s10": lambda a, b, c: nonzero(a >> (b & 63), 64),
    "s_ashr_i64 s[4:5], s[8:9], s10": lambda a, b, c: nonzero(signed(a, 64) >> (b & 63), 64),
    "s_bfe_u64 s[4:5], s[8:9], s10": lambda a, b, c: nonzero(field(a, b & M32, 64, False), 64),
    "s_bfe_i64 s[4:5], s[8:9], s10": lambda a, b, c: nonzero(field(a, b & M32, 64, True), 64),
    "s_bfm_b64 s[4:5], s8, s10": lambda a, b, c: ((1 << (a & 63)) - 1 << (b & 63), c),
    "s_cselect_b64 s[4:5], s[8:9], s[10:11]": lambda a, b, c: (a if c else b, c),
    "s_cmov_b64 s[4:5], s[8:9]": lambda a, b, c: (a if c else 12345, c),
}
COUNTS = {
    "s_bcnt1_i32_b64 s4, s[8:9]": lambda a: nonzero(a.bit_count()),
    "s_flbit_i32_b64 s4, s[8:9]": lambda a: (64 - a.bit_length() if a else -1, None),
    "s_ff1_i32_b64 s4, s[8:9]": lambda a: ((a & -a).bit_length() - 1, None),
}
A, B = random_bits(400, np.uint32, 1), random_bits(400, np.uint32, 2)
WIDE_A, WIDE_B = random_bits(400, np.uint64, 3), random_bits(400, np.uint64, 4)
WIDE_A[:64] = 1 << np.arange(64, dtype=np.uint64)
SCC = np.arange(400, dtype=np.uint32) % 2
TRIPLES = list(zip(A.tolist(), B.tolist(), SCC.tolist(), strict=True))
WIDE_TRIPLES = list(zip(WIDE_A.tolist(), WIDE_B.tolist(), SCC.tolist(), strict=True))


@pytest.mark.parametrize("code", WORDS)
def test_word(code):
    inputs = {"s5": A, "s6": B, "scc": SCC, "s4": np.full(400, 12345, np.uint32)}
    result, scc = execute("gfx942", code, inputs, "s4 scc")
    expected = [WORDS[code](*triple) for triple in TRIPLES]
    assert result.tolist() == [value & M32 for value, _ in expected]
    assert scc.tolist() == [int(condition) for _, condition in expected]


@pytest.mark.parametrize("code", PAIRS)
def test_pair(code):
    inputs = {"s[8:9]": WIDE_A, "s[10:11]": WIDE_B, "scc": SCC, "s[4:5]": np.full(400, 12345, np.uint64)}
    result, scc = execute("gfx942", code, inputs, "s[4:5] scc")
    expected = [PAIRS[code](*triple) for triple in WIDE_TRIPLES]
    assert result.tolist() == [value & M64 for value, _ in expected]
    assert scc.tolist() == [int(condition) for _, condition in expected]


@pytest.mark.parametrize("code", COUNTS)
def test_count_of_pair(code):
    result, scc = execute("gfx942", code, {"s[8:9]": WIDE_A, "scc": SCC}, "s4 scc")
    expected = [COUNTS[code](a) for a in WIDE_A.tolist()]
    assert result.tolist() == [value & M32 for value, _ in expected]
    kept = SCC.tolist()
    assert scc.tolist() == [kept[n] if condition is None else condition for n, (_, condition) in enumerate(expected)]


@pytest.mark.parametrize("condition", ["eq", "lg", "gt", "ge", "lt", "le"])
@pytest.mark.parametrize("kind", ["i32", "u32"])
def test_compare(condition, kind):
    holds = {
        "eq": int.__eq__,
        "lg": int.__ne__,
        "gt": int.__gt__,
        "ge": int.__ge__,
        "lt": int.__lt__,
        "le": int.__le__,
    }[condition]
    number = signed if kind == "i32" else int
    b = np.where(SCC == 1, A, B)  # equal ones too
    scc = execute("gfx942", f"s_cmp_{condition}_{kind} s5, s6", {"s5": A, "s6": b}, "scc")
    assert scc.tolist() == [holds(number(x), number(y)) for x, y in zip(A.tolist(), b.tolist(), strict=True)]
    scc = execute("gfx942", f"s_cmpk_{condition}_{kind} s5, 0xfffe", {"s5": A}, "scc")
    constant = -2 if kind == "i32" else 0xFFFE
    assert scc.tolist() == [holds(number(x), constant) for x in A.tolist()]


def test_compare_of_pairs_and_bits():
    b = np.where(SCC == 1, WIDE_A, WIDE_B)
    assert np.array_equal(
        execute("gfx942", "s_cmp_eq_u64 s[8:9], s[10:11]", {"s[8:9]": WIDE_A, "s[10:11]": b}, "scc"), b == WIDE_A
    )
    bit = execute("gfx942", "s_bitcmp1_b32 s5, s6", {"s5": A, "s6": B}, "scc")
    assert bit.tolist() == [a >> (b & 31) & 1 for a, b, _ in TRIPLES]
    clear = execute("gfx942", "s_bitcmp0_b32 s5, 3", {"s5": A}, "scc")
    assert clear.tolist() == [1 - (a >> 3 & 1) for a in A.tolist()]


@pytest.mark.parametrize(
    "name, combine",
    [
        ("and", "a & e"),
        ("or", "a | e"),
        ("xor", "a ^ e"),
        ("andn2", "a & ~e"),
        ("orn2", "a | ~e"),
        ("andn1", "~a & e"),
        ("orn1", "~a | e"),
        ("xnor", "~(a ^ e)"),
    ],
)
def test_save_exec(name, combine):
    mask = 0x00FF00FF12345678
    code = f"s_{name}_saveexec_b64 s[4:5], s[8:9]"
    saved, left, scc = execute("gfx942", code, {"s[8:9]": WIDE_A}, "s[4:5] exec scc", exec_mask=mask)
    assert (saved == mask).all()
    expected = [eval(combine, {"a": a, "e": mask}) & M64 for a in WIDE_A.tolist()]
    assert left.tolist() == expected
    assert scc.tolist() == [value != 0 for value in expected]


def test_save_exec_into_its_source():
    saved, left = execute(
        "gfx90a", "s_and_saveexec_b64 s[8:9], s[8:9]", {"s[8:9]": WIDE_A}, "s[8:9] exec", exec_mask=0xFF
    )
    assert (saved == 0xFF).all()
    assert left.tolist() == [a & 0xFF for a in WIDE_A.tolist()]


@pytest.mark.parametrize("arch", ARCHS)
def test_scalar_loads(arch):
    """Wide loads, a register offset, and a base that the load overwrites."""
    code = """
      s_load_dwordx2 s[4:5], s[60:61], 0x0
      s_load_dwordx4 s[8:11], s[4:5], 0x8
      s_mov_b32 s20, 0x10
      s_load_dword s21, s[4:5], s20
      s_load_dwordx2 s[4:5], s[4:5], 0x4
    """
    values = np.arange(100, 108, dtype=np.uint32)
    # The first argument is the address of v1's values.
    first, second, base = execute(arch, code, {"v1": np.resize(values, 64)}, "s[8:11] s21 s[4:5]")
    assert first[:, 0].tolist() == [102, 103, 104, 105]
    assert second.tolist() == [104]
    assert base.tolist() == [101 | 102 << 32]


def test_negative_offset_of_a_load():
    code = """
      s_load_dwordx2 s[4:5], s[60:61], 0x0
      s_add_u32 s4, s4, 16
      s_addc_u32 s5, s5, 0
      s_load_dword s6, s[4:5], -0x8
    """
    assert execute("gfx942", code, {"v1": np.arange(64, dtype=np.uint32)}, "s6").tolist() == [2]


def test_mode_may_change_in_what_is_simulated_only():
    execute("gfx942", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", {}, "scc")
    execute("gfx942", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 2, 2), 0", {}, "scc")
    with pytest.raises(gcnsim.UnknownInstruction, match="rounding"):
        execute("gfx942", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3", {}, "scc")
    with pytest.raises(gcnsim.UnknownInstruction, match="denormals"):
        execute("gfx942", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0", {}, "scc")


def test_clock_advances():
    first, second = execute("gfx942", "s_memtime s[4:5]\ns_memtime s[6:7]", {}, "s[4:5] s[6:7]")
    assert (second > first).all()
