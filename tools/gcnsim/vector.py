# SPDX-License-Identifier: Apache-2.0
"""How any vector ALU instruction is run: read the sources as their types, compute, write the active lanes.

The instructions themselves are tables of `Alu` entries (integer.py, floating.py, convert.py). This file gives each the
modifiers it may carry: -x and |x|, omod and clamp (VOP3), halves (op_sel), bytes and words (SDWA), lanes (DPP).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gcnsim.dpp import dpp_source
from gcnsim.errors import UnknownInstruction
from gcnsim.operands import EXEC_PAIR, FP16_OVFL, MODE, VCC_PAIR, Operand, words
from gcnsim.program import Instruction
from gcnsim.registers import (
    U32,
    Array,
    Cohort,
    Read,
    Step,
    Write,
    read32,
    read64,
    read_mask,
    write32,
    write64,
    write_mask,
)

DTYPES = {f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}") for kind in "uif" for bits in (16, 32, 64)}
# The parts of a register that SDWA names: width and first bit.
BYTES, WORDS = {f"BYTE_{n}": (8, 8 * n) for n in range(4)}, {f"WORD_{n}": (16, 16 * n) for n in range(2)}
SELECTS = {"DWORD": (32, 0)} | BYTES | WORDS
OMOD = {("mul", "2"): 2.0, ("mul", "4"): 4.0, ("div", "2"): 0.5}
# Of the instructions with a 16-bit result most clear the upper half of the register. These came with GFX9 or later,
# and keep it.
KEEPS_UPPER_HALF = words(
    "v_fma_f16 v_div_fixup_f16 v_mad_u16 v_mad_i16 v_add_i16 v_sub_i16 v_max3_f16 v_min3_f16 v_med3_f16 v_bitop3_b16"
)
# Integer instructions whose clamp is implemented.
SATURATING = words(
    "v_add_u32 v_sub_u32 v_subrev_u32 v_add_i32 v_sub_i32 v_add_u16 v_sub_u16 v_subrev_u16 v_add_i16 v_sub_i16"
)


@dataclass(frozen=True)
class Alu:
    """A vector instruction as a function of typed arrays.

    `results` and `sources` are type names: u, i or f and 16, 32 or 64 bits, or "mask" for a lane mask. The last source
    may be one that the text does not name: "accumulate", the old destination, or "vcc". With two results, `compute`
    returns both; the second is always a mask.
    """

    results: tuple[str, ...]
    sources: tuple[str, ...]
    compute: Callable[..., Any]


def alu(results: str, sources: str, compute: Callable[..., Any]) -> Alu:
    return Alu(tuple(results.split()), tuple(sources.split()), compute)


def build(instruction: Instruction, entry: Alu) -> Step:
    """The step of one vector ALU instruction."""
    count = len(entry.results)
    implied = entry.sources[-1] if entry.sources[-1] in ("accumulate", "vcc") else ""
    kinds = entry.sources[:-1] if implied else entry.sources
    if len(instruction.operands) != count + len(kinds):
        raise UnknownInstruction(f"expected {count + len(kinds)} operands, found {len(instruction.operands)}")
    reads = [source(instruction, count + n, n, kind) for n, kind in enumerate(kinds)]
    if implied == "accumulate":
        reads.append(_register(instruction.operands[0], entry.results[0]))
    elif implied == "vcc":
        reads.append(read_mask(VCC_PAIR))
    if saturates_integer := "clamp" in instruction.flags and instruction.op in SATURATING:
        entry = replace(entry, compute=saturating(entry.compute, DTYPES[entry.results[0]]))
    finish = _finisher(instruction, entry.results[0], saturates_integer)
    compute = entry.compute
    if instruction.encoding.endswith("dpp"):
        return _dpp_step(instruction, entry, reads, finish)
    if entry.results == ("mask",):
        return _compare_step(instruction, entry, reads)
    write = _destination(instruction, entry.results[0], len(kinds))
    if count == 2:
        write_second = write_mask(instruction.operands[1])

        def step_with_mask(cohort: Cohort) -> None:
            first, second = compute(*[read(cohort) for read in reads])
            write(cohort, finish(cohort, first, ()))
            write_second(cohort, second)

        return step_with_mask

    def step(cohort: Cohort) -> None:
        values = [read(cohort) for read in reads]
        write(cohort, finish(cohort, compute(*values), values))

    return step


def _compare_step(instruction: Instruction, entry: Alu, reads: list[Read]) -> Step:
    write = write_mask(instruction.operands[0])
    write_exec = write_mask(EXEC_PAIR) if instruction.op.startswith("v_cmpx") else None
    compute = entry.compute

    def step(cohort: Cohort) -> None:
        mask = compute(*[read(cohort) for read in reads])
        write(cohort, mask)
        if write_exec:
            write_exec(cohort, mask)

    return step


def _dpp_step(instruction: Instruction, entry: Alu, reads: list[Read], finish: Callable[..., Array]) -> Step:
    if entry.results == ("mask",) or DTYPES[entry.results[0]].itemsize > 4 or len(entry.results) != 1:
        raise UnknownInstruction("DPP is implemented for results of 32 and 16 bits only")
    permute = dpp_source(instruction)
    first, others = reads[0], reads[1:]
    old, write = read32(instruction.operands[0]), write32(instruction.operands[0])
    compute = entry.compute

    def step(cohort: Cohort) -> None:
        value, enabled = permute(cohort, first(cohort))
        values = [value, *(read(cohort) for read in others)]
        result = finish(cohort, compute(*values), values).astype(U32, copy=False)
        write(cohort, np.where(enabled, result, old(cohort)))

    return step


# --- sources


def typed(read: Read, kind: str) -> Read:
    """32 bits read as a type of at most 32 bits; 16-bit types take the low half."""
    dtype = DTYPES[kind]
    if dtype.itemsize == 4:
        return read if kind == "u32" else lambda cohort: read(cohort).view(dtype)
    return lambda cohort: read(cohort).astype(np.uint16).view(dtype)


def _register(operand: Operand, kind: str) -> Read:
    """A register, a pair or a constant as an array of `kind`."""
    dtype = DTYPES[kind]
    if dtype.itemsize < 8:
        return typed(read32(operand, constant_width=16 if kind == "f16" else 32), kind)
    raw = read64(double_literal(operand) if kind == "f64" else operand)
    return raw if kind == "u64" else lambda cohort: raw(cohort).view(dtype)


def source(instruction: Instruction, position: int, number: int, kind: str) -> Read:
    """Source `number` (operand `position`) as an array of `kind`, with its modifiers."""
    operand = instruction.operands[position]
    if kind == "mask":
        return read_mask(operand)
    dtype = DTYPES[kind]
    if instruction.encoding == "sdwa":
        select = instruction.modifiers.get(f"src{number}_sel", "DWORD")
        read = typed(_selected(read32(operand), select, operand.sign_extend), kind)
    elif dtype.itemsize == 2 and instruction.integers("op_sel", (0, 0, 0, 0))[number]:
        read = typed(_selected(read32(operand), "WORD_1", False), kind)
    else:
        read = _register(operand, kind)
    return _signed(read, dtype, operand.negate, operand.absolute)


def double_literal(operand: Operand) -> Operand:
    """A 32-bit literal of a double is its upper half; small integers are inline constants, and stay integers."""
    if operand.kind == "int" and not -16 <= operand.value <= 64:
        return replace(operand, value=int(operand.value) << 32)
    return operand


def _selected(read: Read, select: str, sign_extend: bool) -> Read:
    width, shift = SELECTS[select]
    if width == 32:
        return read
    if sign_extend:
        return lambda cohort: (read(cohort).view(np.int32) << (32 - width - shift) >> (32 - width)).view(U32)
    shift_bits, mask = np.uint32(shift), np.uint32((1 << width) - 1)
    return lambda cohort: read(cohort) >> shift_bits & mask


def _signed(read: Read, dtype: np.dtype, negate: bool, absolute: bool) -> Read:
    """|x| and -x are operations on the sign bit, also of a NaN and of an operand that is no number."""
    if not negate and not absolute:
        return read
    bits = np.dtype(f"u{dtype.itemsize}")
    sign = bits.type(1 << (8 * dtype.itemsize - 1))

    def modified(cohort: Cohort) -> Array:
        value = read(cohort).view(bits)
        if absolute:
            value = value & ~sign
        if negate:
            value = value ^ sign
        return value.view(dtype)

    return modified


# --- results


def saturating(compute: Callable[..., Any], dtype: np.dtype[Any]) -> Callable[..., Array]:
    """The function without overflow: what is out of the type's range becomes the nearest number in it."""
    limits = np.iinfo(dtype)
    return lambda *sources: compute(*(x.astype(np.int64) for x in sources)).clip(limits.min, limits.max)


def _finisher(instruction: Instruction, kind: str, saturates_integer: bool) -> Callable[..., Array]:
    """Result modifiers, and the result as the unsigned integers that registers hold."""
    if kind == "mask":
        return lambda cohort, value, sources: value
    dtype = DTYPES[kind]
    clamp = "clamp" in instruction.flags
    factor = next((f for (name, n), f in OMOD.items() if instruction.modifiers.get(name) == n), None)
    if kind[0] != "f":
        if factor or (clamp and not saturates_integer):
            raise UnknownInstruction("clamp of this instruction, or omod of integers, is not implemented")
        bits = np.dtype(f"u{dtype.itemsize}")
        return lambda cohort, value, sources: value.astype(dtype, copy=False).view(bits)

    def finish(cohort: Cohort, value: Array, sources: list[Array]) -> Array:
        value = value.astype(dtype, copy=False)
        if kind == "f16":
            value = saturate_f16(cohort, value, sources)
        if factor:
            value = value * dtype.type(factor)
        if clamp:
            value = clamped(value)
        return value.view(f"u{dtype.itemsize}")

    return finish


def clamped(value: Array) -> Array:
    """A number between 0 and 1; NaN becomes 0, as MODE.DX10_CLAMP has it, which compute kernels run with."""
    return np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))


def saturates(cohort: Cohort) -> Array:
    """[wave, 1]: whether MODE.FP16_OVFL is set."""
    return (cohort.scalar[:, MODE, None] & np.uint32(FP16_OVFL)).astype(bool)


def saturate_f16(cohort: Cohort, value: Array, sources: Sequence[Array]) -> Array:
    """Under MODE.FP16_OVFL an overflow becomes the largest number; an infinity that was a source stays."""
    clamped = saturates(cohort)
    if not clamped.any():
        return value
    overflow = np.isinf(value) & clamped
    for source in sources:
        if source.dtype.kind == "f":
            overflow = overflow & np.isfinite(source)
    return np.where(overflow, np.copysign(np.float16(65504), value), value)


def _destination(instruction: Instruction, kind: str, sources: int) -> Write:
    """Where the first result goes: registers, or a part of one."""
    operand = instruction.operands[0]
    if DTYPES[kind].itemsize == 8:
        return write64(operand)
    write, old = write32(operand), read32(operand)
    if instruction.encoding == "sdwa":
        width, shift = SELECTS[instruction.modifiers.get("dst_sel", "DWORD")]
        unused = instruction.modifiers.get("dst_unused", "UNUSED_PAD")
        if width < 32 and unused == "UNUSED_SEXT":
            raise UnknownInstruction("dst_unused:UNUSED_SEXT is not implemented")
        return _partial(write, old, width, shift, keep=unused == "UNUSED_PRESERVE")
    if DTYPES[kind].itemsize == 2:
        op_sel = instruction.integers("op_sel", (0,) * (sources + 1))
        upper = len(op_sel) > sources and op_sel[sources]
        if upper or instruction.op in KEEPS_UPPER_HALF:
            return _partial(write, old, 16, 16 if upper else 0, keep=True)
        return lambda cohort, value: write(cohort, value.astype(U32))
    return write


def _partial(write: Write, old: Read, width: int, shift: int, keep: bool) -> Write:
    """Writes the low `width` bits of a result at bit `shift`; the rest of the register is kept or zeroed."""
    if width == 32:
        return write
    place = np.uint32(((1 << width) - 1) << shift)
    amount = np.uint32(shift)

    def write_part(cohort: Cohort, value: Array) -> None:
        value = value.astype(U32, copy=False) << amount & place
        write(cohort, value | old(cohort) & ~place if keep else value)

    return write_part
