# SPDX-License-Identifier: Apache-2.0
"""The registers of a cohort of waves, and closures that read and write an operand in all of them at once.

A cohort is a set of waves at the same instruction. Its vector registers are one array [register, wave, lane], its
scalar registers one array [wave, register]: a vector instruction is then one numpy operation on [wave, lane] planes, a
scalar one an operation on [wave] columns, and a scalar operand of a vector instruction broadcasts as [wave, 1].
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gcnsim.errors import UnknownInstruction
from gcnsim.operands import EXEC, SCALAR_REGISTERS, Operand

if TYPE_CHECKING:
    from gcnsim.launch import Residents

LANES = 64
LANE = np.arange(LANES)
U32 = np.dtype(np.uint32)
U64 = np.dtype(np.uint64)
# What a register holds that nobody wrote: NaN in fp32, fp16 and bf16, and far beyond every buffer as an offset.
UNDEFINED = 0x7FCD7FCD

Array = np.ndarray[Any, np.dtype[Any]]


class Cohort:
    """Waves at one instruction. `active` is EXEC unpacked to [wave, lane]; `full` says that it is all ones.

    `workgroup` and `wave` tell where each wave belongs: the number of its workgroup among the resident ones, and its
    number in the workgroup. `waiting` is set while it stands at a barrier.
    """

    def __init__(
        self, vector: Array, scalar: Array, scc: Array, workgroup: Array, wave: Array, pc: int, residents: "Residents"
    ):
        self.vector = vector
        self.scalar = scalar
        self.scc = scc
        self.workgroup = workgroup
        self.wave = wave
        self.pc = pc
        self.residents = residents
        self.waiting = False
        self.last_run = 0
        self.refresh_exec()

    @property
    def waves(self) -> int:
        return len(self.wave)

    def refresh_exec(self) -> None:
        """Unpacks EXEC after a write to it."""
        self.active = unpack_mask(self.scalar[:, EXEC : EXEC + 2])
        self.full = bool(self.active.all())

    def set_scc(self, value: Array) -> None:
        """SCC of every wave, of a value for each or of one for all. A new array: the old one may be what is read."""
        self.scc = np.empty(self.waves, bool)
        self.scc[:] = value

    def select(self, rows: Array) -> "Cohort":
        """A copy of the waves that the mask `rows` [wave] names."""
        part = Cohort(
            np.compress(rows, self.vector, axis=1),
            self.scalar[rows],
            self.scc[rows],
            self.workgroup[rows],
            self.wave[rows],
            self.pc,
            self.residents,
        )
        part.waiting = self.waiting
        part.last_run = self.last_run
        return part


def join(cohorts: list[Cohort]) -> Cohort:
    """One cohort of all waves of cohorts that stand at the same instruction."""
    first = cohorts[0]
    if len(cohorts) == 1:
        return first
    joined = Cohort(
        np.concatenate([cohort.vector for cohort in cohorts], axis=1),
        np.concatenate([cohort.scalar for cohort in cohorts]),
        np.concatenate([cohort.scc for cohort in cohorts]),
        np.concatenate([cohort.workgroup for cohort in cohorts]),
        np.concatenate([cohort.wave for cohort in cohorts]),
        first.pc,
        first.residents,
    )
    joined.waiting = first.waiting
    joined.last_run = min(cohort.last_run for cohort in cohorts)
    return joined


def initial_cohort(vector_registers: int, workgroup: Array, wave: Array, pc: int, residents: "Residents") -> Cohort:
    """Waves at their first instruction: registers undefined, all lanes active."""
    waves = len(wave)
    scalar = np.full((waves, SCALAR_REGISTERS), UNDEFINED, U32)
    scalar[:, EXEC : EXEC + 2] = 0xFFFFFFFF
    vector = np.full((max(vector_registers, 1), waves, LANES), UNDEFINED, U32)
    return Cohort(vector, scalar, np.zeros(waves, bool), workgroup, wave, pc, residents)


Step = Callable[[Cohort], None]
Read = Callable[[Cohort], Array]
Write = Callable[[Cohort, Array], None]


# --- lane masks: 64 bits in a pair of scalar registers


def unpack_mask(pair: Array) -> Array:
    """A pair of scalar registers [wave, 2] to booleans [wave, lane]."""
    return np.unpackbits(np.ascontiguousarray(pair).view(np.uint8), axis=1, bitorder="little").view(bool)


def pack_mask(mask: Array) -> Array:
    """Booleans [wave, lane] to a pair of scalar registers [wave, 2]."""
    return np.packbits(mask, axis=1, bitorder="little").view(U32)


def read_mask(operand: Operand) -> Read:
    """A source that is a lane mask, as booleans [wave, lane]."""
    if operand.kind == "int":
        constant = unpack_mask(np.array([[constant_bits(operand, 64)]], U64).view(U32))
        return lambda cohort: constant
    if operand.kind != "s":
        raise UnknownInstruction("a lane mask must be a pair of scalar registers")
    index = operand.index
    if index == EXEC:
        return lambda cohort: cohort.active
    return lambda cohort: unpack_mask(cohort.scalar[:, index : index + 2])


def write_mask(operand: Operand) -> Write:
    """A destination that is a lane mask; inactive lanes get 0, as vector compares do."""
    index = operand.index

    def write(cohort: Cohort, mask: Array) -> None:
        cohort.scalar[:, index : index + 2] = pack_mask(mask & cohort.active)
        if index == EXEC:
            cohort.refresh_exec()

    return write


# --- sources of vector instructions, broadcastable to [wave, lane]


def constant_bits(operand: Operand, bits: int) -> int:
    """The bits of a constant operand as an instruction of that width sees it."""
    if operand.kind == "int":
        return int(operand.value) & ((1 << bits) - 1)
    return int(np.array(operand.value, f"f{bits // 8}").view(f"u{bits // 8}"))


def read32(operand: Operand, offset: int = 0, constant_width: int = 32) -> Read:
    """32 bits of a source, `offset` registers on. Constants are `constant_width` wide (16 for 16-bit instructions)."""
    index = operand.index + offset
    if operand.kind == "v":
        return lambda cohort: cohort.vector[index]
    if operand.kind == "s":
        return lambda cohort: cohort.scalar[:, index, None]
    if operand.kind in ("int", "float"):
        width = 32 if operand.kind == "int" else constant_width
        constant = np.array([[constant_bits(operand, width)]], U32)
        return lambda cohort: constant
    raise UnknownInstruction(f"cannot read the operand {operand.name or operand.kind!r}")


def read64(operand: Operand) -> Read:
    """64 bits of a source: two registers, or a constant (sign-extended, or a double)."""
    if operand.kind in ("int", "float"):
        constant = np.array([[constant_bits(operand, 64)]], U64)
        return lambda cohort: constant
    low, high = read32(operand), read32(operand, 1)
    return lambda cohort: low(cohort) | (high(cohort).astype(U64) << np.uint64(32))


# --- destinations of vector instructions


def write32(operand: Operand, offset: int = 0) -> Write:
    """Writes [wave, lane] (or what broadcasts to it) to the active lanes of a vector register."""
    if operand.kind != "v":
        raise UnknownInstruction("the destination must be a vector register")
    index = operand.index + offset

    def write(cohort: Cohort, value: Array) -> None:
        if cohort.full:
            cohort.vector[index] = value
        else:
            np.copyto(cohort.vector[index], value, where=cohort.active)

    return write


def write64(operand: Operand) -> Write:
    low, high = write32(operand), write32(operand, 1)

    def write(cohort: Cohort, value: Array) -> None:
        low(cohort, value.astype(U32))
        high(cohort, (value >> np.uint64(32)).astype(U32))

    return write


# --- scalar instructions: [wave]


def read_scalar32(operand: Operand) -> Read:
    index = operand.index
    if operand.kind == "s":
        return lambda cohort: cohort.scalar[:, index]
    if operand.kind in ("int", "float"):
        constant = np.array([constant_bits(operand, 32)], U32)
        return lambda cohort: constant
    if operand.name == "src_scc":
        return lambda cohort: cohort.scc.astype(U32)
    raise UnknownInstruction(f"cannot read the scalar operand {operand.name or operand.kind!r}")


def read_scalar64(operand: Operand) -> Read:
    if operand.kind == "s":
        index = operand.index
        return lambda cohort: np.ascontiguousarray(cohort.scalar[:, index : index + 2]).view(U64)[:, 0]
    if operand.kind in ("int", "float"):
        constant = np.array([constant_bits(operand, 64)], U64)
        return lambda cohort: constant
    raise UnknownInstruction(f"cannot read the scalar operand {operand.name or operand.kind!r}")


def write_scalar32(operand: Operand, offset: int = 0) -> Write:
    if operand.kind != "s":
        raise UnknownInstruction("the destination must be a scalar register")
    index = operand.index + offset

    def write(cohort: Cohort, value: Array) -> None:
        cohort.scalar[:, index] = value
        if index in (EXEC, EXEC + 1):
            cohort.refresh_exec()

    return write


def write_scalar64(operand: Operand) -> Write:
    if operand.kind != "s":
        raise UnknownInstruction("the destination must be a pair of scalar registers")
    index = operand.index

    def write(cohort: Cohort, value: Array) -> None:
        cohort.scalar[:, index] = value.astype(U32)
        cohort.scalar[:, index + 1] = (value >> np.uint64(32)).astype(U32)
        if index == EXEC:
            cohort.refresh_exec()

    return write
