# SPDX-License-Identifier: Apache-2.0
"""NVFP4 codes to 16-bit values on Hopper, in Gluon.

A word holds four pairs of codes. Where the bits of a pair stand was chosen so that one shift (or rotation) and one mask
bring sign, exponent and mantissa of both codes to the places that a bf16 has for them: 9 instructions for 8 codes.

    pair  row half, column half   shift        bits of its first code: sign, size    second code
    0     0, 0                    left 6       9, 2-0                                 16 higher
    1     0, 1                    left 2       13, 6-4                                16 higher
    2     1, 0                    rotate right 4   19, 12-10                          3, 28-26
    3     1, 1                    none; right 8 for the mantissa   15, 8-7 and 14     16 higher

What stands there is the code's value times 2^-126: E2M1's exponent bias is 1, bf16's 127. Its block scale, times 2^118,
is one multiplication away from a product that is exact and neither overflows nor is denormal.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# What decoded values must be multiplied by: bf16 holds them times 2^-126 * 2^118, fp16 times 2^-14 * 2^7.
UNSCALE = {False: 2.0**8, True: 2.0**7}


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
