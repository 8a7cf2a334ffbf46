# SPDX-License-Identifier: Apache-2.0
"""One row, held in registers, to FP8 codes and its scale: the end of every per-token quantization kernel."""

import triton
import triton.language as tl


@triton.jit
def quantize_row(x, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr):
    """x [BLOCK] fp32, zeros beyond the row. Returns the clamped fp32 quotients [BLOCK] and the fp32 scale.

    The quotients are correctly rounded, as the reference's are, at three instructions each instead of a division's
    ten: with r the correctly rounded reciprocal of the scale, q = x * r is within a unit of the quotient, and one
    step with the exact remainder rounds it correctly (Markstein, IBM J. Res. Dev. 34(1), 1990).
    """
    # tl.max drops NaN; the largest of the raw bits without the sign does not, and orders finite values alike.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(amax, FP8_MAX)
    scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)  # false for NaN, which stays
    reciprocal = tl.math.div_rn(1.0, scale)
    quotient = x * reciprocal
    quotient = tl.fma(tl.fma(-quotient, scale, x), reciprocal, quotient)
    # The remainder step turns -0 into 0, and a finite x over a scale of inf into NaN: both quotients are x * 0.
    exact_zero = (x == 0.0) | ((amax == float("inf")) & (tl.abs(x) < float("inf")))
    quotient = tl.where(exact_zero, x * 0.0, quotient)
    return tl.clamp(quotient, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL), scale
