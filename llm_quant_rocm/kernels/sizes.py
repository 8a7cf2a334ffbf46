# SPDX-License-Identifier: Apache-2.0
"""Sizes of launches, for the host. Triton's functions of these names serve kernels too, and unwrap their arguments for
that: on the host they take longer than a tensor's allocation, in every launch."""


def cdiv(number: int, by: int) -> int:
    """number / by, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of two of at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()
