# SPDX-License-Identifier: Apache-2.0
"""Memory of a workgroup (LDS) and of a lane (scratch), and the instructions that use LDS."""

import re

import numpy as np

from gcnsim.atomics import LDS as ATOMIC
from gcnsim.atomics import Operation, data_of, lds_operation, modify, write_back
from gcnsim.errors import GcnSimError, MemoryFault, UninitializedRead, UnknownInstruction
from gcnsim.memory import NEW, AccessError, ByteStore, from_planes, to_planes
from gcnsim.program import Instruction
from gcnsim.races import RaceDetector
from gcnsim.registers import Array, Cohort, Step, read32
from gcnsim.vmem import Width, put

ACCESS = re.compile(r"ds_(read|write)(2?)(st64)?_(b|u|i)(\d+)(_d16)?(_hi)?$")
TRANSPOSE = re.compile(r"ds_read_b64_tr_b(16|8|4)$")


class Private:
    """`owners` equal parts of `size` bytes, each reachable by its owner only. Nobody wrote them at first."""

    def __init__(self, owners: int, size: int, name: str):
        self.size = size
        self.name = name
        self.stride = -(-size // 16) * 16
        self.store = ByteStore(max(owners * self.stride, 16), NEW)

    def load(self, owners: Array, offsets: Array, size: int) -> Array:
        """The bytes [n, size] at `offsets` [n] of the parts of `owners` [n]."""
        try:
            return self.store.gather(self._places(owners, offsets, size), size)
        except AccessError as error:
            raise self._uninitialized(error, size) from None

    def save(self, owners: Array, offsets: Array, values: Array) -> None:
        self.store.scatter(self._places(owners, offsets, values.shape[1]), values)

    def _places(self, owners: Array, offsets: Array, size: int) -> Array:
        offsets = offsets.astype(np.int64)
        lowest, highest = int(offsets.min()), int(offsets.max())
        if lowest < 0 or highest + size > self.size:
            wrong = lowest if lowest < 0 else highest
            raise MemoryFault(f"access to byte {wrong} to {wrong + size} of {self.name}, which has {self.size} bytes")
        return offsets + owners * self.stride

    def _uninitialized(self, error: AccessError, size: int) -> GcnSimError:
        owner, offset = divmod(error.offset, self.stride)
        return UninitializedRead(f"read of {size} bytes of {self.name} {owner}: nobody wrote byte {offset}")


class Lds(Private):
    """The LDS of the resident workgroups. With `races`, what waves do to each other's bytes is watched."""

    def __init__(self, workgroups: int, size: int, races: bool):
        super().__init__(workgroups, size, "the LDS of resident workgroup")
        self._races = RaceDetector(workgroups, self.stride) if races else None

    def read(self, cohort: Cohort, offsets: Array, lanes: Array, size: int) -> Array:
        """The bytes [n, size] that the lanes of the mask read at `offsets` [wave, lane]."""
        owners, places = _by_lane(cohort.workgroup, lanes), offsets[lanes]
        values = self.load(owners, places, size)
        if self._races:
            self._races.read(_by_lane(cohort.wave, lanes), places + owners * self.stride, size)
        return values

    def write(self, cohort: Cohort, offsets: Array, lanes: Array, values: Array) -> None:
        """Writes bytes [n, size] from the lanes of the mask at `offsets` [wave, lane]."""
        owners, places = _by_lane(cohort.workgroup, lanes), offsets[lanes]
        if not self._races:
            self.save(owners, places, values)
            return
        flat, size = self._places(owners, places, values.shape[1]), values.shape[1]
        before = self.store.gather(flat, size, allow_new=True)
        self.store.scatter(flat, values)
        after = self.store.gather(flat, size)
        self._races.write(_by_lane(cohort.wave, lanes), flat, before, values, after)

    def modify(self, cohort: Cohort, offsets: Array, lanes: Array, data: list[Array], operation: Operation) -> Array:
        """An atomic of the lanes of the mask at `offsets` [wave, lane]; returns the old bytes [n, size]."""
        owners, places, size = _by_lane(cohort.workgroup, lanes), offsets[lanes], operation.dtype.itemsize
        flat = self._places(owners, places, size)
        if self._races:
            self._races.atomic(_by_lane(cohort.wave, lanes), flat, size)
        return modify(
            flat,
            data,
            operation,
            lambda indices: self.load(owners[indices], places[indices], size),
            lambda indices, values: self.save(owners[indices], places[indices], values),
        )

    def barrier(self, workgroups: Array) -> None:
        """All waves of these workgroups [n] have arrived at a barrier."""
        if self._races:
            self._races.barrier(workgroups)


def _by_lane(of_wave: Array, lanes: Array) -> Array:
    """A number of each wave, for the lanes that the mask names."""
    return np.broadcast_to(of_wave[:, None], lanes.shape)[lanes]


def lds(instruction: Instruction) -> Step | None:
    """The step of an LDS instruction, None where it is none."""
    if match := ACCESS.match(instruction.op):
        size = int(match[5]) // 8
        half = 16 if match[7] else 0 if match[6] else None
        width = Width(size, match[4] == "i", half)
        unit = size * (64 if match[3] else 1)
        offsets = (
            [instruction.integer("offset0") * unit, instruction.integer("offset1") * unit]
            if match[2]
            else [instruction.integer("offset")]
        )
        return (_write if match[1] == "write" else _read)(instruction, offsets, width)
    if match := TRANSPOSE.match(instruction.op):
        return _read_transposed(instruction, 8, int(match[1]))
    if (match := ATOMIC.match(instruction.op)) and (operation := lds_operation(match[1], match[3])):
        return _atomic(instruction, operation, returns=bool(match[2]))
    return None


def _addresses(cohort: Cohort, base: Array, offset: int) -> Array:
    return np.broadcast_to(base, cohort.active.shape).astype(np.int64) + offset


def _read(instruction: Instruction, offsets: list[int], width: Width) -> Step:
    base, first = read32(instruction.operands[1]), instruction.operands[0].index

    def step(cohort: Cohort) -> None:
        if not cohort.active.any():
            return
        address = base(cohort)
        words: list[Array] = []
        for offset in offsets:
            raw = cohort.residents.lds.read(cohort, _addresses(cohort, address, offset), cohort.active, width.size)
            words.extend(to_planes(raw))
        for number, word in enumerate(words):
            put(cohort, first + number, word, width)

    return step


def _write(instruction: Instruction, offsets: list[int], width: Width) -> Step:
    base, words = read32(instruction.operands[0]), -(-width.size // 4)
    data = [[read32(operand, n) for n in range(words)] for operand in instruction.operands[1:]]
    shift = np.uint32(width.half or 0)

    def step(cohort: Cohort) -> None:
        if not cohort.active.any():
            return
        address = base(cohort)
        for offset, reads in zip(offsets, data, strict=True):
            planes = [np.broadcast_to(read(cohort), cohort.active.shape)[cohort.active] >> shift for read in reads]
            values = from_planes(planes, width.size)
            cohort.residents.lds.write(cohort, _addresses(cohort, address, offset), cohort.active, values)

    return step


def _read_transposed(instruction: Instruction, size: int, bits: int) -> Step:
    """gfx950: sixteen lanes read a small matrix by rows, `size` bytes each, and get it by columns.

    A row has one element for each of the sixteen lanes, so 16 * bits / (8 * size) lanes share one; lane n of the
    result holds column n, in the order of the rows.
    """
    base, first = read32(instruction.operands[1]), instruction.operands[0].index
    offset = instruction.integer("offset")
    elements = 8 * size // bits

    def step(cohort: Cohort) -> None:
        if not cohort.full:
            raise UnknownInstruction("a transposing read with inactive lanes is not implemented")
        raw = cohort.residents.lds.read(cohort, _addresses(cohort, base(cohort), offset), cohort.active, size)
        stream = np.unpackbits(raw, axis=1, bitorder="little").reshape(-1, 16, elements, bits)
        rows = stream.reshape(-1, elements, 16, bits)
        columns = np.ascontiguousarray(rows.transpose(0, 2, 1, 3)).reshape(-1, 8 * size)
        words = to_planes(np.packbits(columns, axis=1, bitorder="little"))
        for number, word in enumerate(words):
            cohort.vector[first + number] = word.reshape(cohort.active.shape)

    return step


def _atomic(instruction: Instruction, operation: Operation, returns: bool) -> Step:
    operands = instruction.operands
    destination = operands[0] if returns else None
    address, *data = operands[1:] if returns else operands
    base, offset = read32(address), instruction.integer("offset")

    def step(cohort: Cohort) -> None:
        lanes = cohort.active
        if not lanes.any():
            return
        size = operation.dtype.itemsize
        values = [value for operand in data for value in data_of(operand, 1, size, cohort, lanes)]
        old = cohort.residents.lds.modify(cohort, _addresses(cohort, base(cohort), offset), lanes, values, operation)
        if destination:
            write_back(cohort, destination, lanes, old)

    return step
