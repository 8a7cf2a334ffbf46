# SPDX-License-Identifier: Apache-2.0
"""Vector loads and stores: global, flat, buffer and scratch, and loads that go straight to LDS."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gcnsim.errors import UnknownInstruction
from gcnsim.memory import from_planes, to_planes
from gcnsim.operands import M0, OFF, Operand
from gcnsim.program import Instruction
from gcnsim.registers import (
    LANE,
    LANES,
    U32,
    U64,
    Array,
    Cohort,
    Read,
    Step,
    read32,
    read64,
    read_scalar32,
    read_scalar64,
)

ACCESS = re.compile(r"(global|flat|buffer|scratch)_(load|store)_(?:lds_)?(\w+)$")
SWIZZLE_ENABLE = np.uint32(1 << 31)  # in the second word of a buffer resource: per-lane scratch
ADDRESS_BITS = np.uint64((1 << 48) - 1)


@dataclass(frozen=True)
class Width:
    """How much a load or store moves. `half` is 16 for the upper half of a register, 0 for the lower one, None where
    the whole register is written."""

    size: int
    signed: bool = False
    half: int | None = None


WIDTHS = {
    "ubyte": Width(1),
    "sbyte": Width(1, signed=True),
    "ushort": Width(2),
    "sshort": Width(2, signed=True),
    "byte": Width(1),
    "short": Width(2),
    "dword": Width(4),
    "dwordx2": Width(8),
    "dwordx3": Width(12),
    "dwordx4": Width(16),
    "byte_d16_hi": Width(1, half=16),
    "ubyte_d16": Width(1, half=0),
    "ubyte_d16_hi": Width(1, half=16),
    "sbyte_d16": Width(1, signed=True, half=0),
    "sbyte_d16_hi": Width(1, signed=True, half=16),
    "short_d16": Width(2, half=0),
    "short_d16_hi": Width(2, half=16),
}


@dataclass(frozen=True)
class Target:
    """Where an access goes: per lane an address, and which of the active lanes reach memory at all (a buffer's
    other lanes read 0 and write nothing). With `scratch`, addresses are offsets into the lane's own scratch."""

    addresses: Array
    reaches: Array | None = None
    scratch: bool = False


Locate = Callable[[Cohort], Target]


def vector_memory(instruction: Instruction) -> Step | None:
    """The step of a vector load or store, None where it is none."""
    match = ACCESS.match(instruction.op)
    if not match or match[3] not in WIDTHS:
        return None
    family, direction, width = match[1], match[2], WIDTHS[match[3]]
    operands = instruction.operands
    if "lds" in instruction.flags or "_lds_" in instruction.op:
        if width.size < 4:
            raise UnknownInstruction("loads of bytes and shorts to LDS are not implemented")
        return _load_to_lds(instruction, locate(instruction, family, operands, width.size), width.size)
    if family == "buffer" or direction == "load":
        data, address = operands[0], operands[1:]
    else:
        data, address = operands[1], (operands[0], *operands[2:])
    target = locate(instruction, family, address, width.size)
    return _load(data, target, width) if direction == "load" else _store(data, target, width)


# --- addresses


def locate(instruction: Instruction, family: str, operands: tuple[Operand, ...], size: int) -> Locate:
    """The addresses of a memory instruction: `operands` are its address operands, without the data."""
    if family == "buffer":
        return _buffer(instruction, operands, size)
    offset = instruction.integer("offset")
    if family == "scratch":
        return _scratch(offset, operands)
    constant = np.uint64(offset & (1 << 64) - 1)
    base = operands[1] if len(operands) > 1 else OFF
    if base.kind == "s":
        scalar, vector = read_scalar64(base), read32(operands[0])
        return lambda cohort: Target(scalar(cohort)[:, None] + vector(cohort) + constant)
    pointer = read64(operands[0])
    return lambda cohort: Target(pointer(cohort) + constant)


def _scratch(offset: int, operands: tuple[Operand, ...]) -> Locate:
    reads: list[Read] = [read32(operand) for operand in operands if operand.kind in "vs"]

    def find(cohort: Cohort) -> Target:
        total = np.full((1, 1), offset, np.int64)
        for read in reads:
            total = total + read(cohort)
        return Target(total, scratch=True)

    return find


def _buffer(instruction: Instruction, operands: tuple[Operand, ...], size: int) -> Locate:
    """A raw buffer: base + scalar offset + (vector offset + constant), checked against the resource's size."""
    vector, resource, scalar_offset = operands
    if "idxen" in instruction.flags:
        raise UnknownInstruction("structured buffers (idxen) are not implemented")
    constant = np.uint64(instruction.integer("offset"))
    index = resource.index
    base, uniform = read_scalar64(resource), read_scalar32(scalar_offset)
    lanes: Read = read32(vector) if "offen" in instruction.flags else lambda cohort: np.zeros((1, 1), U32)

    def find(cohort: Cohort) -> Target:
        inside = lanes(cohort).astype(U64) + constant
        begin = uniform(cohort).astype(U64)[:, None]
        swizzled = cohort.scalar[:, index + 1] & SWIZZLE_ENABLE
        if swizzled.any():
            return Target((inside + begin).astype(np.int64), scratch=True)
        records = cohort.scalar[:, index + 2].astype(U64)[:, None]
        reaches = inside + np.uint64(size) <= records
        return Target((base(cohort) & ADDRESS_BITS)[:, None] + begin + inside, reaches)

    return find


def gather(cohort: Cohort, target: Target, lanes: Array, size: int) -> Array:
    """The bytes [n, size] of the lanes that the mask names."""
    addresses = np.broadcast_to(target.addresses, lanes.shape)[lanes]
    if target.scratch:
        return cohort.residents.scratch.load(_owners(cohort, lanes), addresses, size)
    return cohort.residents.memory.load(addresses, size)


def scatter(cohort: Cohort, target: Target, lanes: Array, values: Array) -> None:
    """Writes bytes [n, size] from the lanes that the mask names."""
    addresses = np.broadcast_to(target.addresses, lanes.shape)[lanes]
    if target.scratch:
        cohort.residents.scratch.save(_owners(cohort, lanes), addresses, values)
    else:
        cohort.residents.memory.save(addresses, values)


def _owners(cohort: Cohort, lanes: Array) -> Array:
    """The number of each lane among all lanes of the resident waves, for those the mask names."""
    first = (cohort.workgroup * cohort.residents.waves_per_workgroup + cohort.wave) * LANES
    return (first[:, None] + LANE)[lanes]


def reaching(cohort: Cohort, target: Target) -> Array:
    """The active lanes that reach memory."""
    return cohort.active if target.reaches is None else cohort.active & target.reaches


# --- data


def _load(data: Operand, find: Locate, width: Width) -> Step:
    planes = range(data.index, data.index + -(-width.size // 4))

    def step(cohort: Cohort) -> None:
        target = find(cohort)
        lanes = reaching(cohort, target)
        words = to_planes(gather(cohort, target, lanes, width.size)) if lanes.any() else np.zeros((len(planes), 0), U32)
        for plane, word in zip(planes, words, strict=True):
            if target.reaches is not None:
                loaded = np.zeros(lanes.shape, U32)
                loaded[lanes] = word
                word = loaded[cohort.active]
            put(cohort, plane, word, width)

    return step


def put(cohort: Cohort, plane: int, word: Array, width: Width) -> None:
    """Writes loaded words, one for each active lane, to a register or to a half of it."""
    register = cohort.vector[plane]
    if width.signed:
        spare = np.int32(32 - 8 * width.size)
        word = (word.view(np.int32) << spare >> spare).view(U32)
    if width.half is not None:
        keep = np.uint32(0xFFFF0000 >> width.half)
        word = register[cohort.active] & keep | (word & np.uint32(0xFFFF)) << np.uint32(width.half)
    if cohort.full:
        register[...] = word.reshape(register.shape)
    else:
        register[cohort.active] = word


def _store(data: Operand, find: Locate, width: Width) -> Step:
    reads = [read32(data, n) for n in range(-(-width.size // 4))]
    shift = np.uint32(width.half or 0)

    def step(cohort: Cohort) -> None:
        target = find(cohort)
        lanes = reaching(cohort, target)
        if lanes.any():
            words = [read(cohort)[lanes] >> shift for read in reads]
            scatter(cohort, target, lanes, from_planes(words, width.size))

    return step


def _load_to_lds(instruction: Instruction, find: Locate, size: int) -> Step:
    """Lane n's data goes to LDS at M0 + offset + n times its size, whatever the lane's address is."""
    offset = instruction.integer("offset")

    def step(cohort: Cohort) -> None:
        target = find(cohort)
        lanes = reaching(cohort, target)
        data = np.zeros((*lanes.shape, size), np.uint8)
        if lanes.any():
            data[lanes] = gather(cohort, target, lanes, size)
        places = cohort.scalar[:, M0].astype(np.int64)[:, None] + offset + LANE * size
        if cohort.active.any():
            cohort.residents.lds.write(cohort, places, cohort.active, data[cohort.active])

    return step
