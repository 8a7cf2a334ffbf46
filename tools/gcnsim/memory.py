# SPDX-License-Identifier: Apache-2.0
"""Bytes that know whether they exist and were written: global memory, LDS and scratch are made of these."""

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from gcnsim.errors import GcnSimError, MemoryFault, UninitializedRead
from gcnsim.registers import Array

# States of a byte. WRITTEN has every bit of NEW, so that a whole access is checked by comparing with one pattern.
ABSENT, NEW, WRITTEN = 0, 1, 3
UNITS: dict[int, type] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
BASE = 0x7F0000000000
GUARD = 4096
ALIGNMENT = 256


class AccessError(Exception):
    """An access to bytes that do not exist (`exists` false) or that nobody wrote, at `offset`."""

    def __init__(self, offset: int, exists: bool):
        super().__init__(offset, exists)
        self.offset = offset
        self.exists = exists


class ByteStore:
    """`size` bytes, rounded up to 16, each absent, new or written. Accesses are vectorised over many offsets.

    `changes` counts the writes that changed a byte: a kernel that runs on without any is not getting anywhere.
    Comparing costs time, so while `watched` is false every write counts.
    """

    def __init__(self, size: int, state: int = ABSENT):
        size = -(-size // 16) * 16
        self.changes = 0
        self.watched = False
        self._set(np.zeros(size, np.uint8), np.full(size, state, np.uint8))

    def _set(self, data: Array, state: Array) -> None:
        self.data = data
        self.state = state
        # One typed view of the same bytes for each width of access.
        self._data_views: dict[int, Array] = {unit: data.view(kind) for unit, kind in UNITS.items()}
        self._state_views: dict[int, Array] = {unit: state.view(kind) for unit, kind in UNITS.items()}

    def grow(self, size: int) -> None:
        size, known = -(-size // 16) * 16, len(self.data)
        if size > known:
            # Zeros, which ABSENT is, are not written before they are needed.
            data, state = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
            data[:known], state[:known] = self.data, self.state
            self._set(data, state)

    def gather(self, offsets: Array, size: int, allow_new: bool = False) -> Array:
        """The bytes [n, size] at `offsets` [n] (int64). Raises AccessError; `allow_new` also takes unwritten bytes."""
        unit, index = self._index(offsets, size)
        state = self._state_views[unit][index].view(np.uint8)
        if not (state == WRITTEN).all():
            if not state.all():
                raise self._error(offsets, size, state, exists=False)
            if not allow_new:
                raise self._error(offsets, size, state, exists=True)
        return self._data_views[unit][index].view(np.uint8).reshape(len(offsets), size)

    def scatter(self, offsets: Array, values: Array) -> None:
        """Writes `values` [n, size] (bytes) at `offsets` [n]; where two overlap, the later one stays."""
        size = values.shape[1]
        unit, index = self._index(offsets, size)
        state = self._state_views[unit][index].view(np.uint8)
        if not state.all():
            raise self._error(offsets, size, state, exists=False)
        typed: Array = np.ascontiguousarray(values).view(UNITS[unit])
        data = self._data_views[unit]
        if not self.watched or data[index].tobytes() != typed.tobytes():
            self.changes += 1
        data[index] = typed.reshape(index.shape)
        written: Array = np.full(unit, WRITTEN, np.uint8).view(UNITS[unit])
        self._state_views[unit][index] = written

    def _index(self, offsets: Array, size: int) -> tuple[int, Array]:
        """The widest unit that all of these accesses are aligned to, and their places in its view."""
        lowest, highest = int(offsets.min()), int(offsets.max())
        if lowest < 0 or highest + size > len(self.data):
            raise AccessError(lowest if lowest < 0 else highest, exists=False)
        combined = int(np.bitwise_or.reduce(offsets)) | size | 16
        unit = combined & -combined
        index = offsets // unit if unit > 1 else offsets
        return unit, index if size == unit else index[:, None] + np.arange(size // unit)

    def _error(self, offsets: Array, size: int, state: Array, exists: bool) -> AccessError:
        state = state.reshape(len(offsets), size)
        row, column = np.argwhere(state != WRITTEN if exists else state == ABSENT)[0]
        return AccessError(int(offsets[row] + column), exists)


@dataclass(frozen=True)
class Allocation:
    name: str
    address: int
    size: int

    def describe(self, address: int) -> str:
        offset = address - self.address
        if 0 <= offset < self.size:
            return f"byte {offset} of {self.name!r} ({self.size} bytes)"
        distance = f"{-offset} bytes before" if offset < 0 else f"{offset - self.size} bytes behind the end of"
        return f"{distance} {self.name!r} ({self.size} bytes at {self.address:#x})"


class Memory:
    """One flat address space, shared by all launches that run on it. Addresses are integers, as a kernel sees them."""

    def __init__(self) -> None:
        self.store = ByteStore(1 << 16)
        self._allocations: list[Allocation] = []
        self._end = ALIGNMENT

    def allocate(self, array: Array, name: str = "") -> int:
        """The address of a copy of `array`, in C order; all its bytes count as written."""
        address = self.allocate_empty(array.nbytes, name)
        self.write(address, array)
        return address

    def allocate_empty(self, nbytes: int, name: str = "") -> int:
        """The address of `nbytes` bytes that nobody wrote yet: reading them before is an error."""
        start = self._end
        self._end = -(-(start + nbytes + GUARD) // ALIGNMENT) * ALIGNMENT
        if self._end > len(self.store.data):
            self.store.grow(2 * self._end)
        self.store.state[start : start + nbytes] = NEW
        allocation = Allocation(name or f"allocation {len(self._allocations)}", BASE + start, nbytes)
        self._allocations.append(allocation)
        return allocation.address

    def write(self, address: int, array: Array) -> None:
        """Copies `array`, in C order, to `address`, which must lie in an allocation with room for it."""
        raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        start = address - BASE
        self._check_bounds(start, raw.size, "write")
        self.store.data[start : start + raw.size] = raw
        self.store.state[start : start + raw.size] = WRITTEN

    def read(
        self, address: int, dtype: DTypeLike, shape: int | tuple[int, ...], require_written: bool = False
    ) -> Array:
        """A copy of the values at `address`. With `require_written`, a byte nobody wrote raises UninitializedRead."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * kind.itemsize
        start = address - BASE
        self._check_bounds(start, nbytes, "read")
        state = self.store.state[start : start + nbytes]
        if require_written and not (state == WRITTEN).all():
            raise self.error(AccessError(start + int(np.argmax(state != WRITTEN)), exists=True), "read")
        return self.store.data[start : start + nbytes].copy().view(kind).reshape(shape)

    def _check_bounds(self, start: int, nbytes: int, what: str) -> None:
        state = self.store.state[start : start + nbytes] if start >= 0 else np.zeros(0, np.uint8)
        if len(state) < nbytes or not state.all():
            raise self.error(AccessError(start + int(np.argmin(state)) if len(state) else start, exists=False), what)

    def load(self, addresses: Array, size: int) -> Array:
        """The bytes [n, size] at `addresses` [n] (uint64). Raises MemoryFault or UninitializedRead."""
        try:
            return self.store.gather(self._offsets(addresses), size)
        except AccessError as error:
            raise self.error(error, f"read of {size} bytes") from None

    def save(self, addresses: Array, values: Array) -> None:
        """Writes `values` [n, size] at `addresses` [n]. Raises MemoryFault."""
        try:
            self.store.scatter(self._offsets(addresses), values)
        except AccessError as error:
            raise self.error(error, f"write of {values.shape[1]} bytes") from None

    @staticmethod
    def _offsets(addresses: Array) -> Array:
        return addresses.view(np.int64) - BASE

    def error(self, error: AccessError, what: str) -> GcnSimError:
        address = BASE + error.offset
        place = self._nearest(address)
        if error.exists:
            return UninitializedRead(f"{what} at {address:#x}, which nobody wrote: {place}")
        return MemoryFault(f"{what} out of bounds at {address & (1 << 64) - 1:#x}: {place}")

    def _nearest(self, address: int) -> str:
        if not self._allocations:
            return "nothing is allocated"
        place = bisect.bisect([allocation.address for allocation in self._allocations], address)
        around = self._allocations[max(place - 1, 0) : place + 1]
        nearest = min(around, key=lambda a: max(a.address - address, address - a.address - a.size + 1, 0))
        return nearest.describe(address)


def to_planes(raw: Array) -> Array:
    """Bytes [n, size] to 32-bit words [size / 4, n]; one zero-extended word where size is less than 4."""
    if raw.shape[1] < 4:
        wide = np.zeros((len(raw), 4), np.uint8)
        wide[:, : raw.shape[1]] = raw
        raw = wide
    return np.ascontiguousarray(raw).view(np.uint32).T


def from_planes(planes: list[Array], size: int) -> Array:
    """32-bit words, one array [n] each, to bytes [n, size]."""
    words: Any = np.stack(planes, axis=1)
    return words.view(np.uint8)[:, :size]
