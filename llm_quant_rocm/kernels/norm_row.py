# SPDX-License-Identifier: Apache-2.0
"""What kernels that normalise rows share: the mean square, and a row's end as residual, normalised row and codes.

A row is a tuple of blocks as in `fp8_row`. The results are the bits of `reference.rms_norm_quant.rms_norm` and of the
quantizations behind it, whatever the launch configuration: the order of every sum is part of the definition.
"""

import triton
import triton.language as tl

from llm_quant_rocm.formats.norm_quant import Quantization, ScaleLayout
from llm_quant_rocm.kernels.fp8_row import (
    larger,
    largest_of,
    load_block,
    narrow,
    store_block,
    store_quantized_row,
    widen,
)
from llm_quant_rocm.kernels.wire_units import e4m3_codes

NONE, FP8_PER_TOKEN, FP8_STATIC, NVFP4 = (tl.constexpr(n) for n in range(4))
LINEAR, SWIZZLED_128X4, SWIZZLED_8X4 = (tl.constexpr(n) for n in range(3))
QUANTIZATIONS = {kind: n for n, kind in enumerate(Quantization)}
LAYOUTS = {layout: n for n, layout in enumerate(ScaleLayout)}


@triton.jit
def mean_square(row, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The mean square, fp32, of a row of COLUMNS values, zeros beyond it: `reference.rms_norm_quant.mean_square`.

    A lane that holds eight neighbours adds them up alone; one value in eight is converted to fp64.
    """
    total = tl.zeros([BLOCK // 8], tl.float64)
    for i in tl.static_range(len(row)):
        wide = widen(row[i])
        squares = wide * wide
        for _ in tl.static_range(3):
            even, odd = tl.split(tl.reshape(squares, (squares.shape[0] // 2, 2)))
            squares = even + odd
        total += squares.to(tl.float64)
    return tl.math.div_rn(tl.sum(total, axis=0).to(tl.float32), COLUMNS * 1.0)


@triton.jit
def finish_row(
    row, sums, added, weight, total_ptr, normed_ptr, codes_ptr, scales_ptr, given_ptr, eps,
    HAS_RESIDUAL: tl.constexpr, WEIGHT_BIAS: tl.constexpr, NORMED: tl.constexpr, QUANTIZATION: tl.constexpr,
    LAYOUT: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Adds the residual to row number `row` (int64), normalises and quantizes it, and stores what is asked for.

    Args:
        sums, added, weight: the blocks of the row, of its residual (`load_residual`) and of the norm's weight.
        given_ptr: the scale that FP8_STATIC and NVFP4 are given.
    """
    dtype: tl.constexpr = sums[0].dtype
    z = sums
    if HAS_RESIDUAL:
        z = tl.tuple([])
        for i in tl.static_range(len(sums)):
            z += (narrow(widen(sums[i]) + widen(added[i]), dtype),)
    for i in tl.static_range(len(z)):
        store_block(total_ptr + row * COLUMNS, z[i], i, COLUMNS, BLOCK)
    inverse = tl.math.div_rn(1.0, tl.sqrt_rn(mean_square(z, COLUMNS, BLOCK) + eps))
    largest = tl.zeros([BLOCK], tl.float32)
    normed = tl.tuple([])
    for i in tl.static_range(len(z)):
        factor = widen(weight[i])
        if WEIGHT_BIAS != 0.0:
            factor += WEIGHT_BIAS
        value = widen(z[i]) * inverse * factor
        largest = larger(largest, tl.abs(value))
        normed += (narrow(value, dtype),)
        if NORMED:
            store_block(normed_ptr + row * COLUMNS, normed[i], i, COLUMNS, BLOCK)
    if QUANTIZATION == FP8_PER_TOKEN:
        codes = codes_ptr + row * COLUMNS
        store_quantized_row(codes, scales_ptr + row, normed, largest, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK)
    elif QUANTIZATION == FP8_STATIC:
        reciprocal = tl.math.div_rn(1.0, tl.load(given_ptr))
        for i in tl.static_range(len(normed)):
            value = tl.clamp(widen(normed[i]) * reciprocal, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
            store_block(codes_ptr + row * COLUMNS, value.to(codes_ptr.dtype.element_ty), i, COLUMNS, BLOCK)
    elif QUANTIZATION == NVFP4:
        given = tl.load(given_ptr)
        for i in tl.static_range(len(normed)):
            store_nvfp4(codes_ptr, scales_ptr, normed[i], row, i, given, LAYOUT, COLUMNS, BLOCK)


@triton.jit
def load_row(row_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr):
    """The blocks of a row, zeros beyond it."""
    row = tl.tuple([])
    for i in tl.static_range((COLUMNS + BLOCK - 1) // BLOCK):
        row += (load_block(row_ptr, i, COLUMNS, BLOCK, EVICTION),)
    return row


@triton.jit
def load_residual(row_ptr, HAS_RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of a row's residual, none where there is none."""
    if HAS_RESIDUAL:
        return load_row(row_ptr, COLUMNS, BLOCK, "evict_first")
    else:
        return tl.tuple([])


@triton.jit
def store_nvfp4(
    codes_ptr, scales_ptr, value, row, i: tl.constexpr, given, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Codes and block scales of block i of a row, `formats.nvfp4.quantize_activation` under the encoding scale `given`.

    Values beyond the row are zeros; so are the scales that the layout pads a row with.
    """
    wide = tl.reshape(widen(value), (BLOCK // 16, 16))
    amax = largest_of(tl.abs(wide), 1)
    size = tl.clamp(given * tl.math.div_rn(amax, 6.0), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    broken = size != size
    scale_codes = tl.where(broken, 127, e4m3_codes(size))
    # The fp16 with these bits is the number / 2**8.
    bits = ((scale_codes & 127) << 7) | ((scale_codes & 128) << 8)
    scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    encode = tl.where(scale == 0.0, 0.0, tl.math.div_rn(given, scale))
    product = wide * encode[:, None]
    # Bits of the sign on those of the size: a NaN becomes 6, and all of a block with the scale NaN does.
    limited = tl.minimum(tl.abs(product), 6.0).to(tl.int32, bitcast=True)
    signed = limited | (product.to(tl.int32, bitcast=True) & -2147483648)
    signed = tl.where(broken[:, None], 0x40C00000, signed)
    words = e2m1_words(signed.to(tl.float32, bitcast=True), BLOCK)
    word_ptr = (codes_ptr + row * (COLUMNS // 2)).to(tl.pointer_type(tl.int32))
    store_block(word_ptr, words, i, COLUMNS // 8, BLOCK // 8)
    store_scales(scales_ptr, scale_codes, row, i, LAYOUT, COLUMNS // 16, BLOCK // 16)


@triton.jit
def e2m1_words(values, COUNT: tl.constexpr):
    """Words [COUNT / 8] of eight E2M1 codes each, the first in the low bits, of fp32 values of at most 6."""
    if tl.target_info.is_hip_cdna4():
        v0246, v1357 = tl.split(tl.reshape(values, (COUNT // 2, 2)))
        v04, v26 = tl.split(tl.reshape(v0246, (COUNT // 4, 2)))
        v15, v37 = tl.split(tl.reshape(v1357, (COUNT // 4, 2)))
        v0, v4 = tl.split(tl.reshape(v04, (COUNT // 8, 2)))
        v1, v5 = tl.split(tl.reshape(v15, (COUNT // 8, 2)))
        v2, v6 = tl.split(tl.reshape(v26, (COUNT // 8, 2)))
        v3, v7 = tl.split(tl.reshape(v37, (COUNT // 8, 2)))
        # Who writes one byte of a register reads the others, for which the hardware does not wait.
        return tl.inline_asm_elementwise(
            """
            v_cvt_scalef32_pk_fp4_f32 $0, $1, $2, 1.0
            v_cvt_scalef32_pk_fp4_f32 $0, $3, $4, 1.0 op_sel:[0,0,1,0]
            s_nop 0
            v_cvt_scalef32_pk_fp4_f32 $0, $5, $6, 1.0 op_sel:[0,0,0,1]
            s_nop 0
            v_cvt_scalef32_pk_fp4_f32 $0, $7, $8, 1.0 op_sel:[0,0,1,1]
            """,
            "=&v,v,v,v,v,v,v,v,v",
            [v0, v1, v2, v3, v4, v5, v6, v7],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        codes = tl.reshape(e2m1_codes(values), (COUNT // 8, 8))
        return tl.sum(codes << (4 * tl.arange(0, 8))[None, :], axis=1)


@triton.jit
def e2m1_codes(y):
    """FP4 codes (int32) of y, fp32 up to 6 and a little, to nearest even."""
    size = tl.abs(y)
    # The code is the nearest integer to the least of 2 size, size + 2 and size / 2 + 4. All are exact; 2**23 rounds.
    code = tl.minimum(tl.minimum(size * 2.0 + 8388608.0, size + 8388610.0), size * 0.5 + 8388612.0)
    return (code.to(tl.int32, bitcast=True) & 7) | ((y.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def store_scales(
    scales_ptr, codes, row, i: tl.constexpr, LAYOUT: tl.constexpr, SCALES: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Stores codes [COUNT], those of a row from i * COUNT on, where `LAYOUT` has them; SCALES of a row are real.

    Four neighbours are one word in every layout, but for rows that begin or end within one.
    """
    TILES: tl.constexpr = (SCALES + 3) // 4
    STORED: tl.constexpr = SCALES if LAYOUT == LINEAR else TILES * 4
    k = i * COUNT + tl.arange(0, COUNT)
    # What stands beyond a row that holds NaN is NaN by now.
    codes = tl.where(k < SCALES, codes, 0)
    if STORED % 4 == 0:
        shift = 8 * tl.arange(0, 4)
        words = tl.sum(tl.reshape(codes, (COUNT // 4, 4)) << shift[None, :], axis=1)
        tile = i * (COUNT // 4) + tl.arange(0, COUNT // 4)
        if LAYOUT == SWIZZLED_128X4:
            place = (row // 128 * TILES + tile) * 128 + row % 32 * 4 + row % 128 // 32
        elif LAYOUT == SWIZZLED_8X4:
            place = (row // 8 * TILES + tile) * 8 + row % 8
        else:
            place = row * TILES + tile
        tl.store(scales_ptr.to(tl.pointer_type(tl.int32)) + place, words, mask=tile < TILES)
    else:
        tl.store(scales_ptr.to(tl.pointer_type(tl.uint8)) + row * SCALES + k, codes.to(tl.uint8), mask=k < SCALES)


@triton.jit
def pad_scales(scales_ptr, row, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros for all block scales of a row of padding."""
    zeros = tl.zeros([BLOCK // 16], tl.int32)
    for i in tl.static_range((COLUMNS + BLOCK - 1) // BLOCK):
        store_scales(scales_ptr, zeros, row, i, LAYOUT, COLUMNS // 16, BLOCK // 16)
