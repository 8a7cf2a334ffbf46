# SPDX-License-Identifier: Apache-2.0
"""NVFP4 codes to 16-bit values, or to E4M3, on Hopper, in Gluon.

A word holds four pairs of codes. Where the bits of a pair stand was chosen so that one shift (or rotation) and one mask
bring sign, exponent and mantissa of both codes to the places that a bf16 has for them. Three such pairs leave no such
place to the fourth, of which one bit stays and the others come as bytes swap: 9 instructions for 8 codes.

    pair  row half, column half   how it moves                       bits of its first code: sign, size    second code
    0     0, 0                    left 6                             9, 2-0                                16 higher
    1     0, 1                    left 2                             13, 6-4                               16 higher
    2     1, 0                    rotates right 4                    19, 12-10                             3, 28-26
    3     1, 1                    bytes of a half swap; 8 stays      7, 8 and 15-14                        16 higher

What stands there is the code's value times 2^-126: E2M1's exponent bias is 1, bf16's 127. Its block scale, times 2^119,
is one multiplication away from a product that is exact and neither overflows nor is denormal. The scale bytes of two
words come in one register, of which 4 instructions make two of two bf16 each, and a multiplication can take one half of
a register for both of its own: 15 instructions for 8 codes in all.

E4M3 is the product's sixth, rounded (`formats.nvfp4.to_fp8`). There are few: eight magnitudes under each of 127 block
scales. A table of them stands in shared memory. A lane's four words are there of the same 16 columns of two rows, which
the order of x's columns allows, so that two entries serve 32 codes: 13 instructions for 8. With words as a wgmma of 16
bits takes them it was 17.5, two of them loads, and by arithmetic 27, for which the matrix units waited with many rows.

The table has gaps, because a multiplication by a power of two would become a shift, on the pipe that most of these
instructions need.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llm_quant_rocm.kernels.hopper import declare_shared, run_ptx

# What decoded values must be multiplied by: bf16 holds them times 2^-126 * 2^119, fp16 times 2^-14 * 2^7.
UNSCALE = 2.0**7
UNSCALE_FP8 = 6.0

# Of the bytes in $10, the scales of the first word's two rows and of the second word's, in this order: those of first
# rows in t, of second rows in u, the first word's in the lower halves. NaN stays NaN: all bits of its exponent are set.
_BF16_SCALES = """
    shl.b32 t, $10, 4;
    shr.u32 u, $10, 4;
    lop3.b32 t, t, 0x0FF00FF0, 0x70007000, 0xEA;
    lop3.b32 u, u, 0x0FF00FF0, 0x70007000, 0xEA;
"""
_FP16_SCALES = """
    shl.b32 t, $10, 7;
    shr.u32 u, $10, 1;
    and.b32 t, t, 0x7F807F80;
    and.b32 u, u, 0x7F807F80;
"""
# The first word's scales a and b, the second word's c and d, in both halves: no instructions, but ways to multiply.
_IN_BOTH_HALVES = """
    mov.b32 {first, second}, t;
    mov.b32 a, {first, first};
    mov.b32 c, {second, second};
    mov.b32 {first, second}, u;
    mov.b32 b, {first, first};
    mov.b32 d, {second, second};
"""
# A word to the values of its pairs 0 to 3, two in a register.
_WORD_TO_BF16 = """
    shl.b32 t, WORD, 6;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 PAIR_0, t, SCALE_0;
    shl.b32 t, WORD, 2;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 PAIR_1, t, SCALE_0;
    shf.r.wrap.b32 t, WORD, WORD, 4;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 PAIR_2, t, SCALE_1;
    prmt.b32 t, WORD, 0, 0x2301;
    and.b32 u, WORD, 0x01000100;
    lop3.b32 t, t, 0x80C080C0, u, 0xEA;
    mul.bf16x2 PAIR_3, t, SCALE_1;
"""
# The same bits, moved three places up within each half: fp16 has three mantissa bits more than bf16.
_WORD_TO_FP16 = """
    shl.b32 t, WORD, 6;
    shl.b32 u, WORD, 9;
    and.b32 u, u, 0x0E000E00;
    lop3.b32 t, t, 0x80008000, u, 0xEA;
    mul.f16x2 PAIR_0, t, SCALE_0;
    shl.b32 t, WORD, 2;
    shl.b32 u, WORD, 5;
    and.b32 u, u, 0x0E000E00;
    lop3.b32 t, t, 0x80008000, u, 0xEA;
    mul.f16x2 PAIR_1, t, SCALE_0;
    shf.r.wrap.b32 t, WORD, WORD, 4;
    shr.u32 u, WORD, 1;
    and.b32 u, u, 0x0E000E00;
    lop3.b32 t, t, 0x80008000, u, 0xEA;
    mul.f16x2 PAIR_2, t, SCALE_1;
    prmt.b32 t, WORD, 0, 0x2301;
    and.b32 u, WORD, 0x01000100;
    lop3.b32 u, t, 0x00C000C0, u, 0xEA;
    shl.b32 u, u, 3;
    lop3.b32 t, t, 0x80008000, u, 0xEA;
    mul.f16x2 PAIR_3, t, SCALE_1;
"""


def _two_words(scales: str, word: str) -> str:
    """PTX for words $8 and $9 with the scale bytes $10: pair p of the first comes to $2p, of the second to $2p + 1."""
    registers = ".reg .b32 a, b, c, d, t, u; .reg .b16 first, second;"
    both = ""
    for number, names in enumerate(("ab", "cd")):
        one = word.replace("WORD", f"${8 + number}")
        for i, name in enumerate(names):
            one = one.replace(f"SCALE_{i}", name)
        for pair in range(4):
            one = one.replace(f"PAIR_{pair}", f"${2 * pair + number}")
        both += one
    return f"{{ {registers} {scales} {_IN_BOTH_HALVES} {both} }}"


_WORDS_TO_BF16 = gl.constexpr(_two_words(_BF16_SCALES, _WORD_TO_BF16))
_WORDS_TO_FP16 = gl.constexpr(_two_words(_FP16_SCALES, _WORD_TO_FP16))


@gluon.jit
def decode_words(words, scale_pairs, FP16: gl.constexpr):
    """Values [..., row half, column half], of two columns in an int32, of words [...] (int32) and the two rows' scale
    bytes (uint16)."""
    ASSEMBLY: gl.constexpr = _WORDS_TO_FP16 if FP16 else _WORDS_TO_BF16
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [words, scale_pairs], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=2,
    )  # fmt: skip
    return gl.join(gl.join(p0, p2), gl.join(p1, p3))


@gluon.jit
def split_pairs(pairs, FP16: gl.constexpr):
    """The bf16 or fp16 [..., 2] that int32 [...] hold."""
    dtype: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(low, high)


# Bytes from one entry of the table to the next, of which eight are used, and of the table.
_ENTRY_BYTES = 24
_TABLE_BYTES = gl.constexpr(256 * _ENTRY_BYTES)
# Thread t fills the table for the block scales with bytes t and t + 128: the eight magnitudes of E2M1, times the scale,
# times a sixth, as E4M3. A scale byte is bits 14 to 7 of the scale times 2^7 in fp16; 0.5 and 1.5 are given times 2^-7.
# These products are exact, and fp32's sixth is so little above 1/6 that a quotient that fp32 has is hit, ties of E4M3
# among them.
_ENTRY = f"""
    shl.b32 lo, t, 7;
    mov.b32 {{l, h}}, lo;
    cvt.f32.f16 v1, l;
    mul.f32 v3, v1, 0f3C400000;
    mul.f32 v1, v1, 0f3B800000;
    mul.f32 v3, v3, 0f3E2AAAAB;
    mul.f32 v1, v1, 0f3E2AAAAB;
    add.f32 v2, v1, v1;
    add.f32 v4, v2, v2;
    add.f32 v5, v3, v3;
    add.f32 v6, v4, v4;
    add.f32 v7, v5, v5;
    cvt.rn.satfinite.e4m3x2.f32 l, v1, 0f00000000;
    cvt.rn.satfinite.e4m3x2.f32 h, v3, v2;
    mov.b32 lo, {{l, h}};
    cvt.rn.satfinite.e4m3x2.f32 l, v5, v4;
    cvt.rn.satfinite.e4m3x2.f32 h, v7, v6;
    mov.b32 hi, {{l, h}};
    mad.lo.u32 at, t, {_ENTRY_BYTES}, $1;
    st.shared.v2.b32 [at], {{lo, hi}};
"""
_FILL_TABLE = gl.constexpr(
    "{ .reg .b32 t, at, lo, hi; .reg .b16 l, h; .reg .f32 v<8>; mov.u32 t, %tid.x; and.b32 t, t, 127; "
    f"{_ENTRY} add.u32 t, t, 128; {_ENTRY} mov.b32 $0, $1; }}"
)

# Eight bytes of the table at $16 under each of the scale bytes in $12: of the first row al and ah, of the second bl and
# bh.
_LOOK_UP = f"""
    and.b32 s, $12, 0xFF;
    mad.lo.u32 s, s, {_ENTRY_BYTES}, $16;
    ld.shared.v2.b32 {{al, ah}}, [s];
    shr.u32 s, $12, 8;
    mad.lo.u32 s, s, {_ENTRY_BYTES}, $16;
    ld.shared.v2.b32 {{bl, bh}}, [s];
"""


def _two_words_to_fp8(i: int) -> str:
    """PTX for words i and i + 1 of a lane's four, from $8 on: four E4M3 of each, those of the first row from $0 on, of
    the second from $4 on.

    The words' bytes 0 and 2 come together in e, and 1 and 3 in o: in e the sizes of the first row and the signs of the
    second, in o the reverse. A prmt takes four magnitudes' E4M3 from eight bytes by the numbers in the low half of a
    register, four bits each of which three count here; signs come with the last instruction.
    """
    return f"""
    prmt.b32 e, ${8 + i}, ${9 + i}, 0x6420;
    prmt.b32 o, ${8 + i}, ${9 + i}, 0x7531;
    and.b32 m, e, 0x77777777;
    shr.u32 n, m, 16;
    prmt.b32 x, al, ah, m;
    prmt.b32 y, al, ah, n;
    shl.b32 v, o, 6;
    shl.b32 u, o, 2;
    prmt.b32 m, v, u, 0x5140;
    prmt.b32 n, v, u, 0x7362;
    lop3.b32 ${i}, m, 0x80808080, x, 0xEA;
    lop3.b32 ${1 + i}, n, 0x80808080, y, 0xEA;

    shr.u32 u, o, 2;
    lop3.b32 m, v, 0x40404040, u, 0xE2;
    and.b32 m, m, 0x77777777;
    shr.u32 n, m, 16;
    prmt.b32 x, bl, bh, m;
    prmt.b32 y, bl, bh, n;
    shl.b32 u, e, 4;
    prmt.b32 m, u, e, 0x5041;
    prmt.b32 n, u, e, 0x7263;
    lop3.b32 ${4 + i}, m, 0x80808080, x, 0xEA;
    lop3.b32 ${5 + i}, n, 0x80808080, y, 0xEA;
    """


_WORDS_TO_FP8 = gl.constexpr(
    "{ .reg .b32 s, al, ah, bl, bh, e, o, m, n, x, y, u, v; "
    f"{_LOOK_UP} {_two_words_to_fp8(0)} {_two_words_to_fp8(2)} }}"
)


@gluon.jit
def declare_fp8_table(value):
    """The address of room in shared memory for a table for `decode_words_fp8`. Once in a kernel, which declares it;
    `value` is any number."""
    return declare_shared(_TABLE_BYTES, value)


@gluon.jit
def fill_fp8_table(table):
    """Fills the table at this address. All 128 threads that call it do, and may read it after a barrier, behind which
    they load words, too. Others that fill it as well write the same."""
    run_ptx(_FILL_TABLE, table)


@gluon.jit
def decode_words_fp8(words, scale_pairs, table):
    """E4M3 [..., row half, 4], four in an int32, of words [...] (int32) and both rows' scale bytes for each (int32):
    four words at a time are of the same two blocks.

    The four are of columns 0, 8, 1 and 9, counted from the word's first: `per_token_quant_fp8(interleave=True)` puts
    those of x in the same order.
    """
    tables = gl.zeros_like(words) + table
    # "Pure", though it reads memory: words that are loaded after the table's barrier are decoded after it.
    rows = gl.inline_asm_elementwise(
        _WORDS_TO_FP8, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [words, scale_pairs, tables],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=4,
    )  # fmt: skip
    return gl.join(rows[0], rows[1])


@gluon.jit
def split_bytes(words):
    """The E4M3 [..., 4] that int32 [...] hold."""
    b0 = words.to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b1 = (words >> 8).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b2 = (words >> 16).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b3 = (words >> 24).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    return gl.join(gl.join(b0, b2), gl.join(b1, b3))
