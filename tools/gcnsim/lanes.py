# SPDX-License-Identifier: Apache-2.0
"""Instructions that move values between the lanes of a wave, between a lane and a scalar register, or both ways."""

import re
from collections.abc import Callable

import numpy as np

from gcnsim.errors import UnknownInstruction
from gcnsim.integer import count_ones
from gcnsim.program import Instruction
from gcnsim.registers import LANE, LANES, U32, Array, Cohort, Step, read32, read_scalar32, write32, write_scalar32


def cross_lane(instruction: Instruction) -> Step | None:
    """The step of a cross-lane instruction, None where it is none."""
    builder = BUILDERS.get(instruction.op)
    return builder(instruction) if builder else None


def _read_first_lane(instruction: Instruction) -> Step:
    """The value of the first active lane, of lane 0 where none is."""
    read, write = read32(instruction.operands[1]), write_scalar32(instruction.operands[0])

    def step(cohort: Cohort) -> None:
        value = np.broadcast_to(read(cohort), cohort.active.shape)
        write(cohort, value[np.arange(cohort.waves), cohort.active.argmax(axis=1)])

    return step


def _read_lane(instruction: Instruction) -> Step:
    read, lane = read32(instruction.operands[1]), read_scalar32(instruction.operands[2])
    write = write_scalar32(instruction.operands[0])

    def step(cohort: Cohort) -> None:
        value = np.broadcast_to(read(cohort), cohort.active.shape)
        write(cohort, value[np.arange(cohort.waves), lane(cohort) & np.uint32(63)])

    return step


def _write_lane(instruction: Instruction) -> Step:
    """Writes one lane whether it is active or not."""
    value, lane = read_scalar32(instruction.operands[1]), read_scalar32(instruction.operands[2])
    plane = instruction.operands[0].index

    def step(cohort: Cohort) -> None:
        cohort.vector[plane][np.arange(cohort.waves), lane(cohort) & np.uint32(63)] = value(cohort)

    return step


def _swap_registers(instruction: Instruction) -> Step:
    """v_swap_b32: two registers change places."""
    first, second = instruction.operands
    reads, writes = [read32(first), read32(second)], [write32(first), write32(second)]

    def step(cohort: Cohort) -> None:
        kept = reads[0](cohort).copy()
        writes[0](cohort, reads[1](cohort))
        writes[1](cohort, kept)

    return step


def _swap(rows: int) -> Callable[[Instruction], Step]:
    """v_permlane16_swap and v_permlane32_swap: the odd groups of lanes of one register change places with the even
    groups of the other."""

    def build(instruction: Instruction) -> Step:
        first, second = (operand.index for operand in instruction.operands)

        def step(cohort: Cohort) -> None:
            if not cohort.full:
                raise UnknownInstruction("a swap of lanes with inactive lanes is not implemented")
            shape = (cohort.waves, LANES // (2 * rows), 2, rows)
            a, b = (cohort.vector[plane].reshape(shape) for plane in (first, second))
            kept = a[:, :, 1].copy()
            a[:, :, 1] = b[:, :, 0]
            b[:, :, 0] = kept

        return step

    return build


def _count_below(start: int) -> Callable[[Instruction], Step]:
    """v_mbcnt: how many ones of a half mask lie below this lane, plus source 1."""
    below = ((1 << (LANE - start).clip(0, 32)) - 1).astype(U32)

    def build(instruction: Instruction) -> Step:
        mask, addend = read32(instruction.operands[1]), read32(instruction.operands[2])
        write = write32(instruction.operands[0])
        return lambda cohort: write(cohort, count_ones(mask(cohort) & below) + addend(cohort))

    return build


def _gather(instruction: Instruction) -> Step:
    """ds_bpermute: each lane reads the lane whose number times 4 is its address; an inactive lane reads as 0."""
    address, value = read32(instruction.operands[1]), read32(instruction.operands[2])
    write, offset = write32(instruction.operands[0]), np.uint32(instruction.integer("offset"))

    def step(cohort: Cohort) -> None:
        shape = cohort.active.shape
        lanes = np.broadcast_to((address(cohort) + offset) >> np.uint32(2) & np.uint32(63), shape)
        visible = np.where(cohort.active, value(cohort), np.uint32(0))
        write(cohort, np.take_along_axis(visible, lanes.astype(np.int64), axis=1))

    return step


def _scatter(instruction: Instruction) -> Step:
    """ds_permute: each active lane sends to the lane that its address names; who gets nothing gets 0."""
    address, value = read32(instruction.operands[1]), read32(instruction.operands[2])
    write, offset = write32(instruction.operands[0]), np.uint32(instruction.integer("offset"))

    def step(cohort: Cohort) -> None:
        shape = cohort.active.shape
        lanes = np.broadcast_to((address(cohort) + offset) >> np.uint32(2) & np.uint32(63), shape)
        result = np.zeros(shape, U32)
        wave, lane = np.nonzero(cohort.active)
        result[wave, lanes[wave, lane]] = np.broadcast_to(value(cohort), shape)[wave, lane]
        write(cohort, result)

    return step


def swizzle_lanes(pattern: str) -> Array:
    """The lane each lane reads under a ds_swizzle offset, a number or one of the assembler's names for them."""
    if named := re.match(r"swizzle\((\w+),(.*)\)$", pattern.replace(" ", "")):
        name, arguments = named[1], named[2].split(",")
        if name == "QUAD_PERM":
            return (LANE & ~3) + np.array([int(word) for word in arguments])[LANE & 3]
        if name == "SWAP":
            return LANE ^ int(arguments[0])
        if name == "REVERSE":
            return LANE ^ (int(arguments[0]) - 1)
        if name == "BROADCAST":
            return LANE // int(arguments[0]) * int(arguments[0]) + int(arguments[1])
        if name == "BITMASK_PERM":
            return _bitmask_lanes(arguments[0].strip('"'))
        raise UnknownInstruction(f"swizzle {name} is not implemented")
    code = int(pattern, 0)
    if code >= 0xC000:
        raise UnknownInstruction(f"the swizzle {pattern} (a rotation, or for an FFT) is not implemented")
    if code & 0x8000:
        return (LANE & ~3) + np.array([code >> 2 * position & 3 for position in range(4)])[LANE & 3]
    return _masked_lanes(code & 31, code >> 5 & 31, code >> 10 & 31)


def _bitmask_lanes(letters: str) -> Array:
    """Five letters, highest bit first: 0, 1, p (preserve), i (invert)."""
    masks = {"0": (0, 0, 0), "1": (0, 1, 0), "p": (1, 0, 0), "i": (1, 0, 1)}
    columns = [masks[letter] for letter in letters]
    return _masked_lanes(*(int("".join(str(column[n]) for column in columns), 2) for n in range(3)))


def _masked_lanes(and_mask: int, or_mask: int, xor_mask: int) -> Array:
    return (LANE & 32) | ((LANE & 31 & and_mask) | or_mask) ^ xor_mask


def _swizzle(instruction: Instruction) -> Step:
    lanes = swizzle_lanes(instruction.modifiers.get("offset", "0"))
    read, write = read32(instruction.operands[1]), write32(instruction.operands[0])
    return lambda cohort: write(cohort, np.where(cohort.active, read(cohort), np.uint32(0))[:, lanes])


BUILDERS: dict[str, Callable[[Instruction], Step]] = {
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_swap_b32": _swap_registers,
    "v_permlane16_swap_b32": _swap(16),
    "v_permlane32_swap_b32": _swap(32),
    "v_mbcnt_lo_u32_b32": _count_below(0),
    "v_mbcnt_hi_u32_b32": _count_below(32),
    "ds_bpermute_b32": _gather,
    "ds_permute_b32": _scatter,
    "ds_swizzle_b32": _swizzle,
}
