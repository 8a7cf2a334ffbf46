# SPDX-License-Identifier: Apache-2.0
"""One row, held in registers, to FP8 codes and its scale: the end of every per-token quantization kernel."""

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_row(x, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr):
    """x [BLOCK] fp32, zeros beyond the row. Returns the fp32 quotients [BLOCK], ready to be cast, and the fp32 scale.

    The quotients are correctly rounded, as the reference's are, at three instructions each instead of a division's
    ten: with r the correctly rounded reciprocal of the scale, q = x * r is within a unit of the quotient, and one
    step with the exact remainder rounds it correctly (Markstein, IBM J. Res. Dev. 34(1), 1990). The remainder is
    taken as q * scale - x and subtracted, because x - q * scale would turn a quotient of -0 into 0.

    Nothing is clamped: amax / scale exceeds FP8_MAX by a rounding error at most, and casts to FP8_MAX.
    """
    amax = tl.reduce(tl.abs(x), 0, _larger)  # unlike tl.max, keeps a NaN
    scale = tl.math.div_rn(amax, FP8_MAX)
    scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)  # false for NaN, which stays
    reciprocal = tl.math.div_rn(1.0, scale)
    # A scale of inf has quotients of 0, and NaN for inf: x * reciprocal is right, and the remainder must not undo it.
    divisor = tl.where(scale == float("inf"), 0.0, scale)
    quotient = x * reciprocal
    return tl.fma(tl.fma(quotient, divisor, -x), -reciprocal, quotient), scale
