# SPDX-License-Identifier: Apache-2.0
"""Sizes of launches, for the host. Triton's functions of these names serve kernels too, and unwrap their arguments for
that: on the host they take longer than a tensor's allocation, in every launch."""


def cdiv(number: int, by: int) -> int:
    """number / by, rounded up."""
    return -(-number // by)


def whole_tiles(tiles: int, programs: int) -> int:
    """How many of the tiles are one program's each: those of a last wave that is half empty or more are two programs'
    (`ptpc_wgmma`)."""
    last = tiles % programs
    return tiles - last if 2 * last <= programs else tiles


def next_power_of_2(number: int) -> int:
    """The smallest power of two of at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()
