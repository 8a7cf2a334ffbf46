# SPDX-License-Identifier: Apache-2.0
"""The activations of gated layers, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _times_sigmoid(x, z):
    """x / (1 + exp(-z)): a reciprocal root, squared, takes fewer instructions than a division."""
    root = gl.rsqrt(1.0 + gl.exp(-z))
    return x * root * root


@gluon.jit
def activate(gate, ACTIVATION: gl.constexpr):
    """silu, gelu (with erf) or gelu_tanh of fp32 values."""
    if ACTIVATION == "silu":
        return _times_sigmoid(gate, gate)
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476))
    else:  # x / 2 * (1 + tanh u) is x * sigmoid(2 u)
        return _times_sigmoid(gate, 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
