# SPDX-License-Identifier: Apache-2.0
"""Finds waves that exchange data through LDS without a barrier between.

For each byte of LDS it is known which waves have read it, written it, or changed it atomically since their workgroup's
last barrier, one bit a wave. Nothing is wrong where a wave writes what is there already: compilers let several waves
write the same value.
"""

from typing import Any

import numpy as np

from gcnsim.errors import LdsRace
from gcnsim.registers import Array

READ, WRITTEN, ATOMIC = 0, 1, 2
MARK = np.dtype(np.uint16)  # one bit for each of at most sixteen waves
# Marks of several bytes are looked at together, as one integer: bytes at a time, and its type.
UNITS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint16), 2: np.dtype(np.uint32), 4: np.dtype(np.uint64)}


class RaceDetector:
    """Marks for the LDS of `workgroups` resident workgroups of `size` bytes each (a multiple of 4)."""

    def __init__(self, workgroups: int, size: int):
        self._marks = np.zeros((3, workgroups, size), MARK)
        self._views: dict[int, Array] = {unit: self._marks.reshape(3, -1).view(kind) for unit, kind in UNITS.items()}

    def barrier(self, workgroups: Array) -> None:
        """Every wave of these workgroups has arrived."""
        self._marks[:, workgroups] = 0

    def read(self, waves: Array, places: Array, size: int) -> None:
        """`waves` [n] read `size` bytes at `places` [n]."""
        index, views, own = self._accesses(waves, places, size)
        written = views[WRITTEN][index]
        # A wave may read what it wrote itself, whoever wrote the same before.
        foreign = _by_byte((written | views[ATOMIC][index]) & ~own) & ~_by_byte(written & own)
        self._report(foreign, waves, places, "reads", (WRITTEN, ATOMIC))
        self._mark(READ, waves, index, own, views)

    def write(self, waves: Array, places: Array, before: Array, values: Array, after: Array) -> None:
        """`waves` [n] write `values` [n, size] at `places` [n], over `before`; `after` is what is there now."""
        index, views, own = self._accesses(waves, places, values.shape[1])
        earlier = _by_byte((views[READ][index] | views[WRITTEN][index] | views[ATOMIC][index]) & ~own)
        self._mark(WRITTEN, waves, index, own, views)
        at_once = _by_byte(views[WRITTEN][index] & ~own)
        foreign = earlier & (before != values) | at_once & (after != values)
        self._report(foreign, waves, places, "writes", (WRITTEN, READ, ATOMIC))

    def atomic(self, waves: Array, places: Array, size: int) -> None:
        """`waves` [n] change `size` bytes at `places` [n] atomically, which other waves may do as well."""
        index, views, own = self._accesses(waves, places, size)
        foreign = _by_byte((views[READ][index] | views[WRITTEN][index]) & ~own)
        self._report(foreign, waves, places, "changes atomically", (WRITTEN, READ))
        self._mark(ATOMIC, waves, index, own, views)

    def _accesses(self, waves: Array, places: Array, size: int) -> tuple[Array, Array, Array]:
        """Index of the marks [n, units], the three arrays of marks, and each access's own bit in every byte's mark."""
        combined = int(np.bitwise_or.reduce(places)) | size | 4
        unit = combined & -combined
        index = places[:, None] // unit + np.arange(size // unit)
        every_byte = sum(1 << MARK.itemsize * 8 * byte for byte in range(unit))
        bits: Array = np.array([every_byte << wave for wave in range(MARK.itemsize * 8)], UNITS[unit])
        return index, self._views[unit], bits[waves][:, None]

    def _mark(self, kind: int, waves: Array, index: Array, own: Array, views: Array) -> None:
        marks = views[kind]
        for wave in np.unique(waves):  # within a wave all set the same bit, so that no update is lost
            rows = waves == wave
            marks[index[rows]] |= own[rows]

    def _report(self, foreign: Array, waves: Array, places: Array, does: str, kinds: tuple[int, ...]) -> None:
        if not foreign.any():
            return
        row, byte = np.argwhere(foreign)[0]
        workgroup, offset = divmod(int(places[row] + byte), self._marks.shape[2])
        did = {READ: "read", WRITTEN: "wrote", ATOMIC: "changed"}
        history = [
            f"wave {wave} {did[kind]} it"
            for kind in kinds
            for wave in range(MARK.itemsize * 8)
            if wave != waves[row] and self._marks[kind, workgroup, offset] >> wave & 1
        ]
        raise LdsRace(
            f"wave {waves[row]} of resident workgroup {workgroup} {does} byte {offset} of LDS, "
            f"and since the last barrier {', '.join(history)}"
        )


def _by_byte(marks: Array) -> Array:
    """Marks [n, units] to booleans [n, bytes]: is there any?"""
    return np.ascontiguousarray(marks).view(MARK) != 0
