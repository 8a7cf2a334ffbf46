# SPDX-License-Identifier: Apache-2.0
"""NVFP4 codes to 16-bit values on CDNA GPUs, in Gluon.

A word holds eight codes of one row and one block. The order of its bits is that of the layouts of `formats/nvfp4_mfma`:

- "mfma" (gfx90a, gfx942): sign, exponent and mantissa of a code in bits 7, 3-2 and 1 of a byte, where a bf8 (E5M2) and
  the upper byte of an fp16 have theirs, so that one mask leaves four codes, and the same mask four others of the
  reversed word. Bytes 0 to 3 of the word are codes 0, 2, 1, 3; those of the reversed word 4, 6, 5, 7.
- "mfma_fp4" (gfx950): code i in bits 4 i .. 4 i + 3, as v_cvt_scalef32_pk_f32_fp4 reads them.

What the mask leaves is the code's value times 2^-14 as an fp16, 2^-15 as gfx942's bf8. A bf8 whose sign alone is set is
NaN on gfx942; there are no such codes, since packing makes -0 codes +0.

Vector instructions for 8 codes and their share of the scales, as compiled by Triton 3.9:

    gfx942  bf16  15.5   reverse, 2 masks, 4 conversions of bf8 pairs, 4 products of pairs, 4 packs
            fp16  12     reverse, 2 shifts, 4 masks, 4 products of pairs
    gfx950  bf16  12.25  4 conversions of fp4 pairs, 4 products of pairs, 4 roundings of pairs
            fp16   9     4 conversions of fp4 pairs, 4 products of pairs
    gfx90a  bf16  20     reverse, 2 shifts, 4 masks, 8 products of fp16 and fp32, 4 packs
            fp16  16     as gfx942, and 4 products more

Inline assembly serves where Triton has no operation, or where the compiler would pair registers differently and move
them first; one instruction each. What writes an operand of a matrix instruction is never inline assembly: the hardware
wants a distance between the two, and the compiler keeps it only for instructions that it knows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# As int32.
CODES_IN_BYTES = gl.constexpr(0x8E8E8E8E - 2**32)
CODES_IN_HALVES = gl.constexpr(0x8E008E00 - 2**32)
SCALES_IN_HALVES = gl.constexpr(0x3F803F80)

# What (architecture, whether fp16) decoded values are multiplied by. fp16 of gfx942 passes through subnormals, exactly;
# gfx90a's matrix unit would take values below 2^-14 for zero, so there everything is above (2^-6 to 43008).
FACTOR = {
    ("gfx90a", False): 1.0,
    ("gfx90a", True): 2.0**4,
    ("gfx942", False): 1.0,
    ("gfx942", True): 2.0**-7,
    ("gfx950", False): 1.0,
    ("gfx950", True): 1.0,
}


@gluon.jit
def _word(text: gl.constexpr, x):
    """One instruction from a register to a register."""
    return gl.inline_asm_elementwise(text, "=v,v", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _pair(text: gl.constexpr, x):
    """One instruction from a register to two, as one int64."""
    return gl.inline_asm_elementwise(text, "=v,v", [x], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def _scaled_pair(pair, scales, BLOCK: gl.constexpr):
    """Two fp32 values times fp32 scale `BLOCK` of a pair of scales."""
    text: gl.constexpr = (
        "v_pk_mul_f32 $0, $1, $2 op_sel_hi:[1,0]" if BLOCK == 0 else "v_pk_mul_f32 $0, $1, $2 op_sel:[0,1]"
    )
    return gl.inline_asm_elementwise(text, "=v,v,v", [pair, scales], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def _scaled_half(word, scale, HIGH: gl.constexpr):
    """fp32: the low or high fp16 of a word times an fp32 scale."""
    text: gl.constexpr = (
        "v_fma_mix_f32 $0, $1, $2, 0 op_sel:[1,0,0] op_sel_hi:[1,0,0]"
        if HIGH
        else "v_fma_mix_f32 $0, $1, $2, 0 op_sel_hi:[1,0,0]"
    )
    return gl.inline_asm_elementwise(text, "=v,v,v", [word, scale], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _half(word, HIGH: gl.constexpr):
    return (word >> 16 if HIGH else word).to(gl.int16).to(gl.float16, bitcast=True)


@gluon.jit
def _float(pair, HIGH: gl.constexpr):
    return (pair >> 32 if HIGH else pair).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _cut(value):
    """fp32 to bf16, where the value has no more bits."""
    return (value.to(gl.int32, bitcast=True) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _interleave(v0, v1, v2, v3, v4, v5, v6, v7):
    even = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    odd = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    return gl.join(even, odd)


@gluon.jit
def _eightfold(scale):
    twice = gl.join(scale, scale)
    fourfold = gl.join(twice, twice)
    return gl.join(fourfold, fourfold)


@gluon.jit
def decode_scales(word, ARCH: gl.constexpr, FP16: gl.constexpr):
    """The scales of words [...] of four E4M3 bytes (row 0 block 0, row 0 block 1, row 1 block 0, row 1 block 1) as
    `decode_words` takes them: those of block 0 and those of block 1, each [..., row].

    They are fp16 for fp16 activations, fp32 on gfx90a, otherwise pairs of fp32 for both blocks in one int64."""
    if not FP16 and ARCH != "gfx90a":
        row_0 = _pair("v_cvt_pk_f32_fp8 $0, $1", word)
        row_1 = _pair("v_cvt_pk_f32_fp8_sdwa $0, $1 src0_sel:WORD_1", word)
        if ARCH == "gfx942":
            # Its FP8 is FNUZ, which reads a half of the scale, and the codes are 2^-15 of theirs: times 2^16.
            factor = gl.full_like(row_0, 0x4780000047800000)
            row_0, row_1 = _scaled_pair(row_0, factor, 0), _scaled_pair(row_1, factor, 0)
        pairs = gl.join(row_0, row_1)
        return pairs, pairs
    else:
        # An E4M3 at bit 7 of an fp16 is the scale times 2^-8, and the codes are 2^-14 of theirs, but for gfx950.
        block_0 = (word << 7) & SCALES_IN_HALVES
        block_1 = (word >> 1) & SCALES_IN_HALVES
        if FP16:
            factor = gl.full([], 2.0**8 if ARCH == "gfx950" else 2.0**15, gl.float16)
            return (
                gl.join(_half(block_0, False) * factor, _half(block_0, True) * factor),
                gl.join(_half(block_1, False) * factor, _half(block_1, True) * factor),
            )
        else:
            factor = gl.full_like(word, 0x4A800000).to(gl.float32, bitcast=True)  # 2^22
            return (
                gl.join(_scaled_half(block_0, factor, False), _scaled_half(block_0, factor, True)),
                gl.join(_scaled_half(block_1, factor, False), _scaled_half(block_1, factor, True)),
            )


@gluon.jit
def decode_words(word, scale, BLOCK: gl.constexpr, ARCH: gl.constexpr, FP16: gl.constexpr):
    """Eight values [..., 2, 2, 2] of words [...] (int32) of block `BLOCK` and their scales [...] of `decode_scales`."""
    if ARCH == "gfx950":
        return _decode_fp4(word, scale, BLOCK, FP16)
    elif ARCH == "gfx942" and not FP16:
        return _decode_bf8(word, scale, BLOCK)
    else:
        return _decode_halves(word, scale, ARCH, FP16)


@gluon.jit
def _decode_fp4(word, scale, BLOCK: gl.constexpr, FP16: gl.constexpr):
    if FP16:
        p01 = _word("v_cvt_scalef32_pk_f16_fp4 $0, $1, 1.0", word)
        p23 = _word("v_cvt_scalef32_pk_f16_fp4 $0, $1, 1.0 op_sel:[1,0,0]", word)
        p45 = _word("v_cvt_scalef32_pk_f16_fp4 $0, $1, 1.0 op_sel:[0,1,0]", word)
        p67 = _word("v_cvt_scalef32_pk_f16_fp4 $0, $1, 1.0 op_sel:[1,1,0]", word)
        codes = _interleave(
            _half(p01, False), _half(p01, True), _half(p23, False), _half(p23, True),
            _half(p45, False), _half(p45, True), _half(p67, False), _half(p67, True),
        )  # fmt: skip
        return codes * _eightfold(scale)
    else:
        p01 = _scaled_pair(_pair("v_cvt_scalef32_pk_f32_fp4 $0, $1, 1.0", word), scale, BLOCK)
        p23 = _scaled_pair(_pair("v_cvt_scalef32_pk_f32_fp4 $0, $1, 1.0 op_sel:[1,0,0]", word), scale, BLOCK)
        p45 = _scaled_pair(_pair("v_cvt_scalef32_pk_f32_fp4 $0, $1, 1.0 op_sel:[0,1,0]", word), scale, BLOCK)
        p67 = _scaled_pair(_pair("v_cvt_scalef32_pk_f32_fp4 $0, $1, 1.0 op_sel:[1,1,0]", word), scale, BLOCK)
        products = _interleave(
            _float(p01, False), _float(p01, True), _float(p23, False), _float(p23, True),
            _float(p45, False), _float(p45, True), _float(p67, False), _float(p67, True),
        )  # fmt: skip
        return products.to(gl.bfloat16)


@gluon.jit
def _decode_bf8(word, scale, BLOCK: gl.constexpr):
    front = word & CODES_IN_BYTES
    back = _word("v_bfrev_b32 $0, $1", word) & CODES_IN_BYTES
    p02 = _scaled_pair(_pair("v_cvt_pk_f32_bf8 $0, $1", front), scale, BLOCK)
    p13 = _scaled_pair(_pair("v_cvt_pk_f32_bf8_sdwa $0, $1 src0_sel:WORD_1", front), scale, BLOCK)
    p46 = _scaled_pair(_pair("v_cvt_pk_f32_bf8 $0, $1", back), scale, BLOCK)
    p57 = _scaled_pair(_pair("v_cvt_pk_f32_bf8_sdwa $0, $1 src0_sel:WORD_1", back), scale, BLOCK)
    products = _interleave(
        _float(p02, False), _float(p13, False), _float(p02, True), _float(p13, True),
        _float(p46, False), _float(p57, False), _float(p46, True), _float(p57, True),
    )  # fmt: skip
    return _cut(products)


@gluon.jit
def _decode_halves(word, scale, ARCH: gl.constexpr, FP16: gl.constexpr):
    back = _word("v_bfrev_b32 $0, $1", word)
    p01, p23 = (word << 8) & CODES_IN_HALVES, word & CODES_IN_HALVES
    p45, p67 = (back << 8) & CODES_IN_HALVES, back & CODES_IN_HALVES
    if FP16:
        codes = _interleave(
            _half(p01, False), _half(p01, True), _half(p23, False), _half(p23, True),
            _half(p45, False), _half(p45, True), _half(p67, False), _half(p67, True),
        )  # fmt: skip
        if ARCH == "gfx90a":
            codes = codes * gl.full([], 2.0**11, gl.float16)
        return codes * _eightfold(scale)
    else:
        products = _interleave(
            _scaled_half(p01, scale, False), _scaled_half(p01, scale, True),
            _scaled_half(p23, scale, False), _scaled_half(p23, scale, True),
            _scaled_half(p45, scale, False), _scaled_half(p45, scale, True),
            _scaled_half(p67, scale, False), _scaled_half(p67, scale, True),
        )  # fmt: skip
        return _cut(products)
