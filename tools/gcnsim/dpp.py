# SPDX-License-Identifier: Apache-2.0
"""Data-parallel primitives: a source that comes from another lane of the wave, lanes in four rows of sixteen."""

from collections.abc import Callable

import numpy as np

from gcnsim.errors import UnknownInstruction
from gcnsim.operands import words
from gcnsim.program import Instruction
from gcnsim.registers import LANE, LANES, Array, Cohort

ROW = 16
ROW_START = LANE // ROW * ROW
COLUMN = LANE % ROW
NOWHERE = -1


def source_lanes(instruction: Instruction) -> Array:
    """For each lane the lane it reads, NOWHERE where the pattern reaches over the edge of a row or of the wave."""
    modifiers = instruction.modifiers
    if "quad_perm" in modifiers:
        order = np.array(instruction.integers("quad_perm", ()))
        return (LANE & ~3) + order[LANE & 3]
    if "row_mirror" in instruction.flags:
        return ROW_START + ROW - 1 - COLUMN
    if "row_half_mirror" in instruction.flags:
        return LANE ^ 7
    for name, lanes in PATTERNS.items():
        if name in modifiers:
            return lanes(instruction.integer(name))
    raise UnknownInstruction("no DPP pattern that is implemented")


def _within_row(columns: Array) -> Array:
    return np.where((columns >= 0) & (columns < ROW), ROW_START + columns, NOWHERE)


def _within_wave(lanes: Array) -> Array:
    return np.where((lanes >= 0) & (lanes < LANES), lanes, NOWHERE)


def _row_broadcast(lane: int) -> Array:
    """row_bcast:15 gives the last lane of a row to the next row, row_bcast:31 lane 31 to the upper half."""
    if lane == 15:
        return np.where(LANE >= ROW, ROW_START - 1, NOWHERE)
    return np.where(LANE >= 32, 31, NOWHERE)


PATTERNS: dict[str, Callable[[int], Array]] = {
    "row_shl": lambda n: _within_row(COLUMN + n),
    "row_shr": lambda n: _within_row(COLUMN - n),
    "row_ror": lambda n: ROW_START + (COLUMN - n) % ROW,
    "row_newbcast": lambda n: ROW_START + n,
    "row_bcast": _row_broadcast,
    "wave_shl": lambda n: _within_wave(LANE + n),
    "wave_shr": lambda n: _within_wave(LANE - n),
    "wave_rol": lambda n: (LANE + n) % LANES,
    "wave_ror": lambda n: (LANE - n) % LANES,
}

DPP_MODIFIERS = frozenset(PATTERNS) | words("quad_perm row_mirror row_half_mirror row_mask bank_mask bound_ctrl")


def dpp_source(instruction: Instruction) -> Callable[[Cohort, Array], tuple[Array, Array]]:
    """A function of a [wave, lane] plane: the plane each lane reads, and the lanes whose result is written.

    A lane without a valid source (nowhere, or an inactive lane) reads 0 with bound_ctrl, else it is not written.
    row_mask and bank_mask switch off whole rows and columns of four.
    """
    lanes = source_lanes(instruction)
    exists = lanes != NOWHERE
    lanes = lanes.clip(0)
    rows, banks = instruction.integer("row_mask", 15), instruction.integer("bank_mask", 15)
    selected = ((rows >> LANE // ROW) & (banks >> COLUMN // 4) & 1).astype(bool)
    zero_fill = "bound_ctrl" in instruction.modifiers

    def permute(cohort: Cohort, value: Array) -> tuple[Array, Array]:
        valid = exists & cohort.active[:, lanes]
        moved = np.where(valid, value[:, lanes], value.dtype.type(0))
        return moved, selected & np.ones_like(valid) if zero_fill else selected & valid

    return permute
