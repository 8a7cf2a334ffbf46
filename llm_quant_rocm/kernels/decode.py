# SPDX-License-Identifier: Apache-2.0
"""Codes to 16-bit values, for matrix units that do not take the codes themselves."""

import triton
import triton.language as tl


@triton.jit
def e4m3_to_fp16(code):
    """OCP E4M3 codes (uint8, any shape) to fp16, exact, subnormals and -0 included.

    The seven bits below the sign, moved to the top of fp16's exponent and mantissa, are the value at 2^-8 of its size
    (the exponent biases are 7 and 15). The two NaN codes become +-480: a NaN in an activation also makes its row's
    scale NaN, and weights with NaN are refused at load.
    """
    wide = code.to(tl.uint16)
    bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0
