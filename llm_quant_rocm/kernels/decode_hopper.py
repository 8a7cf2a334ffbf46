# SPDX-License-Identifier: Apache-2.0
"""NVFP4 codes to 16-bit values, or to E4M3, on Hopper, in Gluon.

A word holds four pairs of codes. Where the bits of a pair stand was chosen so that one shift (or rotation) and one mask
bring sign, exponent and mantissa of both codes to the places that a bf16 has for them: 9 instructions for 8 codes.

    pair  row half, column half   shift        bits of its first code: sign, size    second code
    0     0, 0                    left 6       9, 2-0                                 16 higher
    1     0, 1                    left 2       13, 6-4                                16 higher
    2     1, 0                    rotate right 4   19, 12-10                          3, 28-26
    3     1, 1                    none; right 8 for the mantissa   15, 8-7 and 14     16 higher

What stands there is the code's value times 2^-126: E2M1's exponent bias is 1, bf16's 127. Its block scale, times 2^118,
is one multiplication away from a product that is exact and neither overflows nor is denormal.

E4M3 is made of the bf16 product's sixth (`formats.nvfp4.to_fp8`): 27 instructions for 8 codes. The conversion reads
fp32. Of the two bf16 in a register the upper one is an fp32 as it stands: the lower one, below its last bit, adds less
than 2^-7 of it. That and the rounding of the sixth to bf16 change no rounding to E4M3, because a product's sixth is a
number of E4M3 or lies further than that from the middle of two; all but the ties among denormals, which may fall
either way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# What decoded values must be multiplied by: bf16 holds them times 2^-126 * 2^118, fp16 times 2^-14 * 2^7.
UNSCALE = {False: 2.0**8, True: 2.0**7}
UNSCALE_FP8 = 6.0


@gluon.jit
def decode_words(words, scale_pairs, FP16: gl.constexpr):
    """Values [..., row half, column half, column] of words [...] (int32) and the two rows' scale bytes (uint16)."""
    if FP16:
        # The same bits, moved three places up within each half: fp16 has three mantissa bits more than bf16.
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, t, u;
            prmt.b32 a, $5, 0, 0x0404;
            prmt.b32 b, $5, 0, 0x1414;
            shr.u32 a, a, 1;
            shr.u32 b, b, 1;
            shl.b32 t, $4, 6;
            shl.b32 u, $4, 9;
            and.b32 u, u, 0x0E000E00;
            lop3.b32 t, t, 0x80008000, u, 0xEA;
            mul.f16x2 $0, t, a;
            shl.b32 t, $4, 2;
            shl.b32 u, $4, 5;
            and.b32 u, u, 0x0E000E00;
            lop3.b32 t, t, 0x80008000, u, 0xEA;
            mul.f16x2 $1, t, a;
            shf.r.wrap.b32 t, $4, $4, 4;
            shr.u32 u, $4, 1;
            and.b32 u, u, 0x0E000E00;
            lop3.b32 t, t, 0x80008000, u, 0xEA;
            mul.f16x2 $2, t, b;
            shl.b32 t, $4, 3;
            and.b32 t, t, 0x0C000C00;
            shr.u32 u, $4, 5;
            lop3.b32 t, u, 0x02000200, t, 0xEA;
            lop3.b32 t, $4, 0x80008000, t, 0xEA;
            mul.f16x2 $3, t, b;
            }
            """,
            "=r,=r,=r,=r,r,r", [words, scale_pairs.to(gl.int32)],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, t;
            prmt.b32 a, $5, 0, 0x4040;
            prmt.b32 b, $5, 0, 0x4141;
            mad.lo.u32 a, a, 16, 0x6F806F80;
            mad.lo.u32 b, b, 16, 0x6F806F80;
            shl.b32 t, $4, 6;
            and.b32 t, t, 0x81C081C0;
            mul.bf16x2 $0, t, a;
            shl.b32 t, $4, 2;
            and.b32 t, t, 0x81C081C0;
            mul.bf16x2 $1, t, a;
            shf.r.wrap.b32 t, $4, $4, 4;
            and.b32 t, t, 0x81C081C0;
            mul.bf16x2 $2, t, b;
            shr.u32 t, $4, 8;
            and.b32 t, t, 0x00400040;
            lop3.b32 t, $4, 0x81808180, t, 0xEA;
            mul.bf16x2 $3, t, b;
            }
            """,
            "=r,=r,=r,=r,r,r", [words, scale_pairs.to(gl.int32)],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    dtype: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    pairs = gl.join(gl.join(p0, p2), gl.join(p1, p3))
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(low, high)


# Word WORD, with its rows' scale bytes where SCALES selects them from $6, as four E4M3 of each row, in ROW0 and ROW1.
_WORD_TO_FP8 = """
    prmt.b32 s, $6, 0, SCALES;
    mad.lo.u32 s, s, 16, 0x6F806F80;
    mov.b32 {l, h}, s;
    mov.b32 a, {l, l};
    mov.b32 b, {h, h};
    shl.b32 t, WORD, 6;
    shl.b32 u, WORD, 2;
    and.b32 t, t, 0x81C081C0;
    and.b32 u, u, 0x81C081C0;
    mul.bf16x2 t, t, a;
    mul.bf16x2 u, u, a;
    mul.bf16x2 t, t, sixth;
    mul.bf16x2 u, u, sixth;
    shl.b32 v, t, 16;
    shl.b32 w, u, 16;
    cvt.rn.satfinite.e4m3x2.f32 l, w, v;
    cvt.rn.satfinite.e4m3x2.f32 h, u, t;
    mov.b32 ROW0, {l, h};
    shf.r.wrap.b32 t, WORD, WORD, 4;
    shr.u32 u, WORD, 8;
    and.b32 t, t, 0x81C081C0;
    and.b32 u, u, 0x00400040;
    lop3.b32 u, WORD, 0x81808180, u, 0xEA;
    mul.bf16x2 t, t, b;
    mul.bf16x2 u, u, b;
    mul.bf16x2 t, t, sixth;
    mul.bf16x2 u, u, sixth;
    shl.b32 v, t, 16;
    shl.b32 w, u, 16;
    cvt.rn.satfinite.e4m3x2.f32 l, w, v;
    cvt.rn.satfinite.e4m3x2.f32 h, u, t;
    mov.b32 ROW1, {l, h};
"""


def _word_to_fp8(**places: str) -> str:
    text = _WORD_TO_FP8
    for name, place in places.items():
        text = text.replace(name, place)
    return text


# Two words, because the scale bytes of two come in one register. 0x422B is 2^8 / 6 in bf16.
_WORDS_TO_FP8 = gl.constexpr(
    "{ .reg .b32 s, a, b, t, u, v, w, sixth; .reg .b16 l, h; mov.b32 sixth, 0x422B422B;"
    + _word_to_fp8(WORD="$4", SCALES="0x4140", ROW0="$0", ROW1="$2")
    + _word_to_fp8(WORD="$5", SCALES="0x4342", ROW0="$1", ROW1="$3")
    + "}"
)


@gluon.jit
def decode_words_fp8(words, scale_pairs):
    """E4M3 [..., row half, 4], four in an int32, of words [...] (int32) and the two rows' scale bytes (uint16).

    The four are of columns 0, 8, 1 and 9, counted from the word's first: `per_token_quant_fp8(interleave=True)` puts
    those of x in the same order.
    """
    rows = gl.inline_asm_elementwise(
        _WORDS_TO_FP8, "=r,=r,=r,=r,r,r,r", [words, scale_pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=2
    )
    return gl.join(rows[0], rows[1])


@gluon.jit
def split_bytes(words):
    """The E4M3 [..., 4] that int32 [...] hold."""
    b0 = words.to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b1 = (words >> 8).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b2 = (words >> 16).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b3 = (words >> 24).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    return gl.join(gl.join(b0, b2), gl.join(b1, b3))
