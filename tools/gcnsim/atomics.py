# SPDX-License-Identifier: Apache-2.0
"""Atomic read-modify-writes, in global memory and in LDS. Lanes of a wave that meet at an address go one by one."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gcnsim.errors import MemoryFault, UnknownInstruction
from gcnsim.formats import bf16_to_f32, f32_to_bf16
from gcnsim.memory import from_planes, to_planes
from gcnsim.operands import Operand
from gcnsim.program import Instruction
from gcnsim.registers import U32, Array, Cohort, Step, read32, write32
from gcnsim.vmem import locate, reaching

GLOBAL = re.compile(r"(global|flat|buffer)_atomic_(\w+)$")
LDS = re.compile(r"ds_(\w+?)_(rtn_)?([bfiu]\d+|f16|bf16)$")


@dataclass(frozen=True)
class Operation:
    """`compute` gives the new value of the old one and the data, as arrays of `dtype`."""

    dtype: np.dtype
    compute: Callable[..., Array]
    sources: int = 1


def _increment(old: Array, limit: Array) -> Array:
    return np.where(old >= limit, np.zeros_like(old), old + np.ones_like(old))


def _decrement(old: Array, limit: Array) -> Array:
    return np.where((old == 0) | (old > limit), limit, old - np.ones_like(old))


def _compare_swap(old: Array, new: Array, expected: Array) -> Array:
    return np.where(old == expected, new, old)


def _add_bf16_pair(old: Array, data: Array) -> Array:
    total = bf16_to_f32(old.view(np.uint16)) + bf16_to_f32(data.view(np.uint16))
    return f32_to_bf16(total).astype(np.uint16).view(U32)


def _add_f16_pair(old: Array, data: Array) -> Array:
    return (old.view(np.float16) + data.view(np.float16)).view(U32)


# By the kind of number (u, i, f) and the name; the width comes with the opcode.
COMPUTE: dict[str, tuple[str, Callable[..., Array]]] = {
    "swap": ("u", lambda old, new: new),
    "cmpswap": ("u", _compare_swap),
    "add": ("u", np.add),
    "sub": ("u", np.subtract),
    "smin": ("i", np.minimum),
    "smax": ("i", np.maximum),
    "umin": ("u", np.minimum),
    "umax": ("u", np.maximum),
    "and": ("u", np.bitwise_and),
    "or": ("u", np.bitwise_or),
    "xor": ("u", np.bitwise_xor),
    "inc": ("u", _increment),
    "dec": ("u", _decrement),
    "add_f": ("f", np.add),
    "min_f": ("f", np.fmin),
    "max_f": ("f", np.fmax),
}
PAIRS: dict[str, Operation] = {
    "pk_add_f16": Operation(U32, _add_f16_pair),
    "pk_add_bf16": Operation(U32, _add_bf16_pair),
}


def global_operation(name: str) -> Operation:
    """The operation behind global_atomic_`name`."""
    if name in PAIRS:
        return PAIRS[name]
    match = re.match(r"(\w+?)(_x2|_f32|_f64)?$", name)
    base, suffix = (match[1], match[2] or "") if match else (name, "")
    base += "_f" if suffix.startswith("_f") else ""
    if base not in COMPUTE:
        raise UnknownInstruction(f"the atomic {name!r} is not implemented")
    kind, compute = COMPUTE[base]
    width = 8 if suffix in ("_x2", "_f64") else 4
    return Operation(np.dtype(f"{kind}{width}"), compute, 2 if base == "cmpswap" else 1)


def lds_operation(name: str, kind: str) -> Operation | None:
    """The operation behind ds_`name`_`kind`, None where that is no atomic."""
    if f"{name}_{kind}" in PAIRS:
        return PAIRS[f"{name}_{kind}"]
    names = {"wrxchg": "swap", "cmpst": "cmpswap"}
    if name in ("min", "max"):
        base = f"{name}_f" if kind[0] == "f" else {"i": "s", "u": "u"}[kind[0]] + name
    else:
        base = "add_f" if (name, kind[0]) == ("add", "f") else names.get(name, name)
    if base not in COMPUTE or kind[1:] not in ("32", "64"):
        return None
    letter, compute = COMPUTE[base]
    dtype = np.dtype(f"{letter}{int(kind[1:]) // 8}")
    if base == "cmpswap":  # LDS takes the expected value first
        return Operation(dtype, lambda old, expected, new: _compare_swap(old, new, expected), 2)
    return Operation(dtype, compute)


def turns(places: Array) -> Iterator[Array]:
    """Indices of `places` [n] in as many turns as the fullest place needs: no place twice in one turn, in order."""
    order = np.argsort(places, kind="stable")
    ranked = places[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    turn = np.arange(len(places)) - np.repeat(starts, np.diff(np.r_[starts, len(places)]))
    if turn.max() == 0:
        yield np.arange(len(places))
        return
    by_turn = np.argsort(turn, kind="stable")
    bounds = np.searchsorted(turn[by_turn], np.arange(turn.max() + 2))
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        yield order[by_turn[first:last]]


def modify(
    places: Array, data: list[Array], operation: Operation, load: Callable[[Array], Array], save: Callable[..., None]
) -> Array:
    """Runs the operation at `places` [n] with `data` (bytes [n, size] each) and returns the old bytes [n, size].

    `load(indices)` and `save(indices, bytes)` reach the memory of those of the n lanes.
    """
    size = operation.dtype.itemsize
    if (places % size).any():
        raise MemoryFault(f"an atomic of {size} bytes at an address that is no multiple of {size}")
    old = np.zeros((len(places), size), np.uint8)
    typed = [np.ascontiguousarray(values).view(operation.dtype)[:, 0] for values in data]
    for indices in turns(places):
        before = load(indices)
        after = operation.compute(before.view(operation.dtype)[:, 0], *[values[indices] for values in typed])
        save(indices, np.ascontiguousarray(after)[:, None].view(np.uint8))
        old[indices] = before
    return old


def data_of(operand: Operand, count: int, size: int, cohort: Cohort, lanes: Array) -> list[Array]:
    """`count` values of `size` bytes from consecutive registers, for the lanes of the mask: bytes [n, size] each."""
    words = size // 4
    planes = [np.broadcast_to(read32(operand, n)(cohort), lanes.shape)[lanes] for n in range(count * words)]
    return [from_planes(planes[n * words : (n + 1) * words], size) for n in range(count)]


def write_back(cohort: Cohort, destination: Operand, lanes: Array, old: Array) -> None:
    """The old bytes [n, size] of the lanes of the mask to a register; 0 to other active lanes."""
    for word, plane in enumerate(to_planes(old)):
        full = np.zeros(cohort.active.shape, U32)
        full[lanes] = plane
        write32(destination, word)(cohort, full)


def global_atomic(instruction: Instruction) -> Step | None:
    """The step of an atomic in global memory, None where the instruction is none."""
    match = GLOBAL.match(instruction.op)
    if not match:
        return None
    family, operation = match[1], global_operation(match[2])
    returns = bool({"sc0", "glc"} & instruction.flags)
    operands = instruction.operands
    if family == "buffer":  # data is first, and the old value comes back in its place
        data, address = operands[0], operands[1:]
        destination = data if returns else None
    else:
        destination = operands[0] if returns else None
        rest = operands[1:] if returns else operands
        data, address = rest[1], (rest[0], *rest[2:])
    find = locate(instruction, family, address, operation.dtype.itemsize)

    def step(cohort: Cohort) -> None:
        target = find(cohort)
        lanes = reaching(cohort, target)
        if not lanes.any():
            if destination:
                write_back(cohort, destination, lanes, np.zeros((0, operation.dtype.itemsize), np.uint8))
            return
        memory = cohort.residents.memory
        places = np.broadcast_to(target.addresses, lanes.shape)[lanes]
        old = modify(
            places,
            data_of(data, operation.sources, operation.dtype.itemsize, cohort, lanes),
            operation,
            lambda indices: memory.load(places[indices], operation.dtype.itemsize),
            lambda indices, values: memory.save(places[indices], values),
        )
        if destination:
            write_back(cohort, destination, lanes, old)

    return step
