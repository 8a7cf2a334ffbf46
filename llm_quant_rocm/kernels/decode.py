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

    Shifted down with its sign, a code has that in bit 14, too, and one mask takes it away: on gfx90a four vector
    instructions a value, where sign and the other bits by themselves took six and a half.
    """
    bits = ((code.to(tl.int16) << 8) >> 1) & -0x4080
    return bits.to(tl.float16, bitcast=True) * 256.0
