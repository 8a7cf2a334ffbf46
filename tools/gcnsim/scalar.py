# SPDX-License-Identifier: Apache-2.0
"""Scalar instructions: one value a wave, the condition code SCC, EXEC, and scalar loads."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcnsim.errors import UnknownInstruction
from gcnsim.integer import (
    COMPARES,
    bit_reverse,
    count_ones,
    field_signed,
    field_unsigned,
    first_one_high,
    first_one_low,
    first_sign_change,
)
from gcnsim.memory import to_planes
from gcnsim.operands import EXEC_PAIR, FLOAT_MODE, FLOAT_MODE_BITS, MODE, Operand
from gcnsim.program import Instruction
from gcnsim.registers import (
    U32,
    U64,
    Array,
    Cohort,
    Read,
    Step,
    read_scalar32,
    read_scalar64,
    write_scalar32,
    write_scalar64,
)

B5, B6 = np.uint32(31), np.uint32(63)
ONE = np.uint64(1)
NO_ONE = np.uint32(0xFFFFFFFF)
DTYPES: dict[str, np.dtype[Any]] = {
    "b32": U32,
    "u32": U32,
    "i32": np.dtype(np.int32),
    "b64": U64,
    "u64": U64,
    "i64": np.dtype(np.int64),
}


@dataclass(frozen=True)
class Scalar:
    """`result` and `sources` are types of DTYPES; the source "old" is the destination's value. `scc` is "" (kept),
    "nonzero" (of the result), or "returned": then `compute` gives the result and SCC. With `reads_scc`, SCC is its last
    argument."""

    result: str
    sources: tuple[str, ...]
    compute: Callable[..., Any]
    scc: str = ""
    reads_scc: bool = False


def _entry(result: str, sources: str, compute: Callable[..., Any], scc: str = "") -> Scalar:
    return Scalar(result, tuple(sources.split()), compute, scc)


def _with_scc(result: str, sources: str, compute: Callable[..., Any], scc: str = "") -> Scalar:
    return Scalar(result, tuple(sources.split()), compute, scc, reads_scc=True)


def _add(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    return total, total < a


def _add_signed(a: Array, b: Array) -> tuple[Array, Array]:
    total = a.astype(np.int64) + b
    return total.astype(np.int32), total != total.astype(np.int32)


def _subtract_signed(a: Array, b: Array) -> tuple[Array, Array]:
    total = a.astype(np.int64) - b
    return total.astype(np.int32), total != total.astype(np.int32)


def _add_carry(a: Array, b: Array, scc: Array) -> tuple[Array, Array]:
    total = a.astype(U64) + b + scc
    return total.astype(U32), total >> np.uint64(32) != 0


def _subtract_borrow(a: Array, b: Array, scc: Array) -> tuple[Array, Array]:
    total = a.astype(np.int64) - b - scc
    return total.astype(U32), total < 0


def _shift_add(amount: int) -> Scalar:
    def compute(a: Array, b: Array) -> tuple[Array, Array]:
        total = (a.astype(U64) << np.uint64(amount)) + b
        return total.astype(U32), total >> np.uint64(32) != 0

    return _entry("u32", "u32 u32", compute, "returned")


def _field(word: Array) -> tuple[Array, Array]:
    return word & B5, word >> np.uint32(16) & np.uint32(127)


def _bfe(a: Array, field: Array, extract: Callable[[Array, Array, Array], Array]) -> Array:
    offset, width = _field(field)
    whole = a.view(np.int32) >> offset.view(np.int32) if extract is field_signed else a >> offset
    return np.where(width >= 32, whole.view(U32), extract(a, offset, width))


def _bfe64(a: Array, field: Array) -> Array:
    offset, width = (field & B6).astype(U64), (field >> np.uint32(16) & np.uint32(127)).astype(U64)
    return a >> offset & np.where(width >= 64, ~np.uint64(0), (ONE << np.minimum(width, 63)) - ONE)


def _leading_zeros64(a: Array) -> Array:
    high, low = (a >> np.uint64(32)).astype(U32), a.astype(U32)
    return np.where(high != 0, first_one_high(high), np.where(low != 0, np.uint32(32) + first_one_high(low), NO_ONE))


def _bfe64_signed(a: Array, field: Array) -> Array:
    width = (field >> np.uint32(16) & np.uint32(127)).astype(np.int64).clip(max=64)
    spare = (64 - width).clip(max=63)
    value = (a.view(np.int64) >> (field & B6).astype(np.int64)) << spare >> spare
    return np.where(width == 0, 0, value).view(U64)


def _six(x: Array) -> Array:
    return (x & B6).astype(U64)


def _trailing_zeros64(a: Array) -> Array:
    lowest = (a & (~a + ONE)) - ONE
    return np.where(a == 0, NO_ONE, np.bitwise_count(lowest).astype(U32))


def _pick(function: Callable[[Array, Array], Array], first_wins: Callable[[Array, Array], Array], kind: str) -> Scalar:
    return _entry(kind, f"{kind} {kind}", lambda a, b: (function(a, b), first_wins(a, b)), "returned")


def _logic(compute: Callable[..., Array], sources: int = 2) -> dict[str, Scalar]:
    return {kind: Scalar(kind, (kind,) * sources, compute, "nonzero") for kind in ("b32", "b64")}


LOGIC: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
# With saveexec also the mirrored forms, which negate source 0.
SAVE_EXEC_LOGIC = LOGIC | {"andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}

SCALAR: dict[str, Scalar] = {
    "s_mov_b32": _entry("b32", "b32", lambda a: a),
    "s_mov_b64": _entry("b64", "b64", lambda a: a),
    "s_add_u32": _entry("u32", "u32 u32", _add, "returned"),
    "s_sub_u32": _entry("u32", "u32 u32", lambda a, b: (a - b, a < b), "returned"),
    "s_add_i32": _entry("i32", "i32 i32", _add_signed, "returned"),
    "s_sub_i32": _entry("i32", "i32 i32", _subtract_signed, "returned"),
    "s_addc_u32": _with_scc("u32", "u32 u32", _add_carry, "returned"),
    "s_subb_u32": _with_scc("u32", "u32 u32", _subtract_borrow, "returned"),
    "s_mul_i32": _entry("u32", "u32 u32", np.multiply),
    "s_mul_hi_u32": _entry("u32", "u32 u32", lambda a, b: a.astype(U64) * b.astype(U64) >> np.uint64(32)),
    "s_mul_hi_i32": _entry("i32", "i32 i32", lambda a, b: a.astype(np.int64) * b.astype(np.int64) >> 32),
    "s_abs_i32": _entry("i32", "i32", np.abs, "nonzero"),
    "s_absdiff_i32": _entry("i32", "i32 i32", lambda a, b: np.abs(a - b), "nonzero"),
    "s_min_i32": _pick(np.minimum, np.less, "i32"),
    "s_max_i32": _pick(np.maximum, np.greater, "i32"),
    "s_min_u32": _pick(np.minimum, np.less, "u32"),
    "s_max_u32": _pick(np.maximum, np.greater, "u32"),
    "s_lshl_b32": _entry("b32", "b32 b32", lambda a, b: a << (b & B5), "nonzero"),
    "s_lshr_b32": _entry("b32", "b32 b32", lambda a, b: a >> (b & B5), "nonzero"),
    "s_ashr_i32": _entry("i32", "i32 b32", lambda a, b: a >> (b & B5).view(np.int32), "nonzero"),
    "s_lshl_b64": _entry("b64", "b64 b32", lambda a, b: a << (b & B6).astype(U64), "nonzero"),
    "s_lshr_b64": _entry("b64", "b64 b32", lambda a, b: a >> (b & B6).astype(U64), "nonzero"),
    "s_ashr_i64": _entry("i64", "i64 b32", lambda a, b: a >> (b & B6).astype(np.int64), "nonzero"),
    **{f"s_lshl{n}_add_u32": _shift_add(n) for n in (1, 2, 3, 4)},
    "s_bfe_u32": _entry("b32", "b32 b32", lambda a, f: _bfe(a, f, field_unsigned), "nonzero"),
    "s_bfe_i32": _entry("b32", "b32 b32", lambda a, f: _bfe(a, f, field_signed), "nonzero"),
    "s_bfe_u64": _entry("b64", "b64 b32", _bfe64, "nonzero"),
    "s_bfm_b32": _entry("b32", "b32 b32", lambda a, b: ((np.uint32(1) << (a & B5)) - np.uint32(1)) << (b & B5)),
    "s_bfe_i64": _entry("b64", "b64 b32", _bfe64_signed, "nonzero"),
    "s_bfm_b64": _entry("b64", "b32 b32", lambda a, b: ((ONE << _six(a)) - ONE) << _six(b)),
    "s_brev_b32": _entry("b32", "b32", bit_reverse),
    "s_bcnt1_i32_b32": _entry("b32", "b32", count_ones, "nonzero"),
    "s_bcnt1_i32_b64": _entry("b32", "b64", lambda a: np.bitwise_count(a).astype(U32), "nonzero"),
    "s_ff1_i32_b32": _entry("b32", "b32", first_one_low),
    "s_ff1_i32_b64": _entry("b32", "b64", _trailing_zeros64),
    "s_flbit_i32_b32": _entry("b32", "b32", first_one_high),
    "s_flbit_i32_b64": _entry("b32", "b64", _leading_zeros64),
    "s_flbit_i32": _entry("b32", "b32", first_sign_change),
    "s_sext_i32_i8": _entry("i32", "i32", lambda a: a << 24 >> 24),
    "s_sext_i32_i16": _entry("i32", "i32", lambda a: a << 16 >> 16),
    "s_pack_ll_b32_b16": _entry("b32", "b32 b32", lambda a, b: a & np.uint32(0xFFFF) | b << np.uint32(16)),
    "s_pack_lh_b32_b16": _entry("b32", "b32 b32", lambda a, b: a & np.uint32(0xFFFF) | b & np.uint32(0xFFFF0000)),
    "s_pack_hh_b32_b16": _entry("b32", "b32 b32", lambda a, b: a >> np.uint32(16) | b & np.uint32(0xFFFF0000)),
    "s_cmov_b32": _with_scc("b32", "b32 old", lambda a, old, scc: np.where(scc, a, old)),
    "s_cmov_b64": _with_scc("b64", "b64 old", lambda a, old, scc: np.where(scc, a, old)),
    "s_cselect_b32": _with_scc("b32", "b32 b32", lambda a, b, scc: np.where(scc, a, b)),
    "s_cselect_b64": _with_scc("b64", "b64 b64", lambda a, b, scc: np.where(scc, a, b)),
    "s_not_b32": _logic(np.invert, 1)["b32"],
    "s_not_b64": _logic(np.invert, 1)["b64"],
    **{f"s_{name}_{kind}": entry for name, f in LOGIC.items() for kind, entry in _logic(f).items()},
}

COMPARE = re.compile(r"s_cmp(k?)_(eq|lg|gt|ge|lt|le)_(\w+)$")
SAVE_EXEC = re.compile(r"s_(\w+)_saveexec_b64$")
BIT_COMPARE = re.compile(r"s_bitcmp([01])_(b32|b64)$")
BIT_SET = re.compile(r"s_bitset([01])_b32$")
LOAD = re.compile(r"s_load_dword(?:x(\d+))?$")
SET_REGISTER = re.compile(r"hwreg\(HW_REG_MODE,(\d+),(\d+)\)$")
CONSTANT_OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "s_addk_i32": np.add,
    "s_mulk_i32": np.multiply,
}


def scalar(instruction: Instruction) -> Step | None:
    """The step of a scalar instruction, None where it is none."""
    op, operands = instruction.op, instruction.operands
    if op in SCALAR:
        return _generic(instruction, SCALAR[op])
    if match := COMPARE.match(op):
        return _compare(instruction, COMPARES["ne" if match[2] == "lg" else match[2]], match[3], bool(match[1]))
    if match := SAVE_EXEC.match(op):
        return _save_exec(instruction, SAVE_EXEC_LOGIC[match[1]])
    if match := BIT_COMPARE.match(op):
        return _bit_compare(instruction, int(match[1]), match[2])
    if match := BIT_SET.match(op):
        return _bit_set(instruction, int(match[1]))
    if match := LOAD.match(op):
        return _load(instruction, int(match[1] or 1))
    if op == "s_movk_i32":
        write, constant = write_scalar32(operands[0]), np.array([_short(operands[1].value)], np.int32).view(U32)
        return lambda cohort: write(cohort, constant)
    if op == "s_cmovk_i32":
        write, old = write_scalar32(operands[0]), read_scalar32(operands[0])
        constant = np.array([_short(operands[1].value)], np.int32).view(U32)
        return lambda cohort: write(cohort, np.where(cohort.scc, constant, old(cohort)))
    if op in CONSTANT_OPERATIONS:
        return _constant_operation(instruction, CONSTANT_OPERATIONS[op])
    if op in ("s_setreg_imm32_b32", "s_setreg_b32"):
        return _set_register(instruction)
    if op in ("s_memtime", "s_memrealtime"):
        return _clock(instruction)
    return None


def _typed(instruction: Instruction, position: int, kind: str) -> Read:
    operand, dtype = instruction.operands[position], DTYPES[kind]
    read = read_scalar64(operand) if dtype.itemsize == 8 else read_scalar32(operand)
    return lambda cohort: read(cohort).view(dtype) if kind[0] == "i" else read(cohort)


def _generic(instruction: Instruction, entry: Scalar) -> Step:
    named = [kind for kind in entry.sources if kind != "old"]
    if len(instruction.operands) != 1 + len(named):
        raise UnknownInstruction(f"expected {1 + len(named)} operands, found {len(instruction.operands)}")
    reads = [_typed(instruction, 1 + n, kind) for n, kind in enumerate(named)]
    if "old" in entry.sources:
        reads.append(_typed(instruction, 0, entry.result))
    dtype = DTYPES[entry.result]
    bits = U64 if dtype.itemsize == 8 else U32
    write = write_scalar64(instruction.operands[0]) if dtype.itemsize == 8 else write_scalar32(instruction.operands[0])
    compute = entry.compute

    def step(cohort: Cohort) -> None:
        sources = [read(cohort) for read in reads]
        if entry.reads_scc:
            sources.append(cohort.scc)
        result = compute(*sources)
        if entry.scc == "returned":
            result, scc = result
            cohort.set_scc(scc)
        elif entry.scc == "nonzero":
            cohort.set_scc(result != 0)
        write(cohort, result.astype(dtype, copy=False).view(bits))

    return step


def _short(value: int | float) -> int:
    """A 16-bit immediate, sign-extended."""
    return (int(value) & 0xFFFF ^ 0x8000) - 0x8000


def _compare(instruction: Instruction, compare: Callable[[Array, Array], Array], kind: str, immediate: bool) -> Step:
    first = _typed(instruction, 0, kind)
    if immediate:
        value = _short(instruction.operands[1].value) if kind == "i32" else int(instruction.operands[1].value) & 0xFFFF
        constant = np.array([value], DTYPES[kind])
        second: Read = lambda cohort: constant  # noqa: E731
    else:
        second = _typed(instruction, 1, kind)

    def step(cohort: Cohort) -> None:
        cohort.set_scc(compare(first(cohort), second(cohort)))

    return step


def _save_exec(instruction: Instruction, combine: Callable[[Array, Array], Array]) -> Step:
    """Saves EXEC, combines it with the source, and sets SCC where lanes are left."""
    read, read_exec = read_scalar64(instruction.operands[1]), read_scalar64(EXEC_PAIR)
    write, write_exec = write_scalar64(instruction.operands[0]), write_scalar64(EXEC_PAIR)

    def step(cohort: Cohort) -> None:
        saved = read_exec(cohort).copy()
        result = combine(read(cohort), saved)
        write(cohort, saved)
        write_exec(cohort, result)
        cohort.set_scc(result != 0)

    return step


def _bit_compare(instruction: Instruction, wanted: int, kind: str) -> Step:
    read, position = _typed(instruction, 0, kind), read_scalar32(instruction.operands[1])
    mask = B6 if kind == "b64" else B5

    def step(cohort: Cohort) -> None:
        value = read(cohort)
        bit = value >> (position(cohort) & mask).astype(value.dtype) & value.dtype.type(1)
        cohort.set_scc(bit == wanted)

    return step


def _bit_set(instruction: Instruction, value: int) -> Step:
    position, write = read_scalar32(instruction.operands[1]), write_scalar32(instruction.operands[0])
    old = read_scalar32(instruction.operands[0])

    def step(cohort: Cohort) -> None:
        bit = np.uint32(1) << (position(cohort) & B5)
        write(cohort, old(cohort) | bit if value else old(cohort) & ~bit)

    return step


def _constant_operation(instruction: Instruction, combine: Callable[..., Array]) -> Step:
    """s_addk, s_mulk. The overflow that s_addk leaves in SCC is modelled, s_mulk leaves SCC alone."""
    constant = np.int64(_short(instruction.operands[1].value))
    old, write = read_scalar32(instruction.operands[0]), write_scalar32(instruction.operands[0])
    adds = combine is np.add

    def step(cohort: Cohort) -> None:
        exact = combine(old(cohort).view(np.int32).astype(np.int64), constant)
        if adds:
            cohort.scc = exact != exact.astype(np.int32)
        write(cohort, exact.astype(np.int32).view(U32))

    return step


def _set_register(instruction: Instruction) -> Step:
    """Writes a field of MODE. Of its bits FP16_OVFL is modelled; rounding and denormals must stay as they are."""
    field = SET_REGISTER.match(instruction.operands[0].name.replace(" ", ""))
    if not field:
        raise UnknownInstruction("only the MODE register is implemented")
    offset, width = int(field[1]), int(field[2])
    value = read_scalar32(instruction.operands[1])
    mask = np.uint32((1 << width) - 1 << offset)

    def step(cohort: Cohort) -> None:
        mode = cohort.scalar[:, MODE]
        mode = mode & ~mask | value(cohort) << np.uint32(offset) & mask
        if ((mode & FLOAT_MODE_BITS) != FLOAT_MODE).any():
            raise UnknownInstruction("rounding other than to nearest even, and flushing denormals, are not implemented")
        cohort.scalar[:, MODE] = mode

    return step


def _clock(instruction: Instruction) -> Step:
    """A counter that grows with every read: time itself is not modelled."""
    write = write_scalar64(instruction.operands[0])

    def step(cohort: Cohort) -> None:
        cohort.residents.clock += 1
        write(cohort, np.full(cohort.waves, cohort.residents.clock, U64))

    return step


def _offset(operand: Operand) -> Read:
    """A scalar offset is unsigned, a constant one signed."""
    return read_scalar64(operand) if operand.kind == "int" else read_scalar32(operand)


def _load(instruction: Instruction, count: int) -> Step:
    """Scalar loads, `count` dwords; addresses are rounded down to a dword."""
    base, offset = read_scalar64(instruction.operands[1]), _offset(instruction.operands[2])
    constant = np.uint64(instruction.integer("offset") & (1 << 64) - 1)
    writes = [write_scalar32(instruction.operands[0], n) for n in range(count)]

    def step(cohort: Cohort) -> None:
        addresses = (base(cohort) + offset(cohort) + constant) & ~np.uint64(3)
        for write, plane in zip(writes, to_planes(cohort.residents.memory.load(addresses, 4 * count)), strict=True):
            write(cohort, plane)

    return step
