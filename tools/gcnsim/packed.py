# SPDX-License-Identifier: Apache-2.0
"""Packed math (VOP3P): one instruction on two values, each source half chosen by op_sel, its sign by neg."""

import re
from collections.abc import Callable

import numpy as np

from gcnsim.errors import UnknownInstruction
from gcnsim.floating import flushed, fma16, fma32, maximum, maximum_number, minimum, minimum_number
from gcnsim.formats import bf16_to_f32
from gcnsim.operands import Operand, words
from gcnsim.program import Instruction
from gcnsim.registers import U32, Array, Cohort, Read, Step, read32, write32
from gcnsim.vector import DTYPES, clamped, saturate_f16, saturating

NONE, ALL = (0, 0, 0), (1, 1, 1)
HALF = np.uint32(16)
Function = Callable[..., Array]

PAIRS32: dict[str, Function] = {"v_pk_add_f32": np.add, "v_pk_mul_f32": np.multiply, "v_pk_fma_f32": fma32}

PAIRS16: dict[str, tuple[str, Function]] = {
    "v_pk_add_f16": ("f16", np.add),
    "v_pk_mul_f16": ("f16", np.multiply),
    "v_pk_fma_f16": ("f16", fma16),
    "v_pk_max_f16": ("f16", maximum_number),
    "v_pk_min_f16": ("f16", minimum_number),
    "v_pk_maximum3_f16": ("f16", lambda a, b, c: maximum(maximum(a, b), c)),
    "v_pk_minimum3_f16": ("f16", lambda a, b, c: minimum(minimum(a, b), c)),
    "v_pk_add_u16": ("u16", np.add),
    "v_pk_add_i16": ("i16", np.add),
    "v_pk_sub_u16": ("u16", np.subtract),
    "v_pk_sub_i16": ("i16", np.subtract),
    "v_pk_mul_lo_u16": ("u16", np.multiply),
    "v_pk_mad_u16": ("u16", lambda a, b, c: a * b + c),
    "v_pk_mad_i16": ("i16", lambda a, b, c: a * b + c),
    "v_pk_max_u16": ("u16", np.maximum),
    "v_pk_min_u16": ("u16", np.minimum),
    "v_pk_max_i16": ("i16", np.maximum),
    "v_pk_min_i16": ("i16", np.minimum),
    "v_pk_lshlrev_b16": ("u16", lambda a, b: b << (a & np.uint16(15))),
    "v_pk_lshrrev_b16": ("u16", lambda a, b: b >> (a & np.uint16(15))),
    "v_pk_ashrrev_i16": ("i16", lambda a, b: b >> (a & np.int16(15))),
}
# Integer instructions whose clamp is implemented.
SATURATING_PAIRS = words("v_pk_add_u16 v_pk_add_i16 v_pk_sub_u16 v_pk_sub_i16")
MIX = re.compile(r"v_(?:fma|mad)_mix(lo_f16|hi_f16|_f32)$")
DOT2 = re.compile(r"v_dot2(c?)_f32_(f16|bf16)$")


def packed(instruction: Instruction, arch: str) -> Step | None:
    """The step of a packed instruction, None where it is none."""
    if instruction.op == "v_pk_mov_b32":
        return _move(instruction)
    if instruction.op in PAIRS32:
        return _pairs32(instruction, PAIRS32[instruction.op])
    if instruction.op in PAIRS16:
        return _pairs16(instruction, *PAIRS16[instruction.op])
    if match := MIX.match(instruction.op):
        return _mix(instruction, match[1])
    if match := DOT2.match(instruction.op):
        return _dot2(instruction, match[2], accumulate=bool(match[1]), flushes=arch == "gfx90a")
    return None


def _register_half(operand: Operand, high: int) -> Read:
    return read32(operand, high if operand.kind in "vs" and operand.count > 1 else 0)


def _move(instruction: Instruction) -> Step:
    """The low result is a register of source 0, the high one of source 1; op_sel names which of the pair."""
    if "clamp" in instruction.flags:
        raise UnknownInstruction("clamp of a move is not implemented")
    low, high = instruction.integers("op_sel", NONE)[:2]
    read_low = _register_half(instruction.operands[1], low)
    read_high = _register_half(instruction.operands[2], high)
    write_low, write_high = write32(instruction.operands[0]), write32(instruction.operands[0], 1)

    def step(cohort: Cohort) -> None:
        first, second = read_low(cohort).copy(), read_high(cohort).copy()
        write_low(cohort, first)
        write_high(cohort, second)

    return step


def _pairs32(instruction: Instruction, compute: Function) -> Step:
    halves = []
    for select, negate in (
        (instruction.integers("op_sel", NONE), instruction.integers("neg_lo", NONE)),
        (instruction.integers("op_sel_hi", ALL), instruction.integers("neg_hi", NONE)),
    ):
        sources = instruction.operands[1:]
        halves.append([_float32(_register_half(o, select[n]), negate[n]) for n, o in enumerate(sources)])
    writes = [write32(instruction.operands[0], n) for n in range(2)]
    finish = clamped if "clamp" in instruction.flags else _unchanged

    def step(cohort: Cohort) -> None:
        results = [finish(compute(*[read(cohort) for read in reads])).view(U32) for reads in halves]
        for write, result in zip(writes, results, strict=True):
            write(cohort, result)

    return step


def _unchanged(value: Array) -> Array:
    return value


def _float32(read: Read, negate: int) -> Read:
    sign = np.uint32(negate << 31)
    return (lambda cohort: (read(cohort) ^ sign).view(np.float32)) if negate else lambda cohort: read(cohort).view("f4")


def _half(operand: Operand, high: int, negate: int, kind: str) -> Read:
    """One 16-bit half of a source; a floating-point constant has its value in the low half."""
    read = read32(operand, constant_width=16 if kind == "f16" else 32)
    shift, sign, dtype = np.uint32(16 * high), np.uint16(negate << 15), DTYPES[kind]
    return lambda cohort: ((read(cohort) >> shift).astype(np.uint16) ^ sign).view(dtype)


def _pairs16(instruction: Instruction, kind: str, compute: Function) -> Step:
    halves = []
    for select, negate in (
        (instruction.integers("op_sel", NONE), instruction.integers("neg_lo", NONE)),
        (instruction.integers("op_sel_hi", ALL), instruction.integers("neg_hi", NONE)),
    ):
        sources = instruction.operands[1:]
        halves.append([_half(o, select[n], negate[n], kind) for n, o in enumerate(sources)])
    write = write32(instruction.operands[0])
    clamp = "clamp" in instruction.flags
    if clamp and kind != "f16":
        if instruction.op not in SATURATING_PAIRS:
            raise UnknownInstruction("clamp of this instruction is not implemented")
        compute = saturating(compute, DTYPES[kind])

    def result(cohort: Cohort, sources: list[Array]) -> Array:
        value = compute(*sources).astype(DTYPES[kind], copy=False)
        if kind == "f16":
            value = saturate_f16(cohort, value, sources)
            value = clamped(value) if clamp else value
        return value.view(np.uint16).astype(U32)

    def step(cohort: Cohort) -> None:
        low, high = (result(cohort, [read(cohort) for read in reads]) for reads in halves)
        write(cohort, low | high << HALF)

    return step


def _mix(instruction: Instruction, result: str) -> Step:
    """v_fma_mix: fp32 fused multiply-add, each source fp32 or, where op_sel_hi is set, the fp16 half op_sel names."""
    is_half, select = instruction.integers("op_sel_hi", NONE), instruction.integers("op_sel", NONE)
    reads = [_mixed(o, is_half[n], select[n]) for n, o in enumerate(instruction.operands[1:])]
    write, old = write32(instruction.operands[0]), read32(instruction.operands[0])
    finish = clamped if "clamp" in instruction.flags else _unchanged

    def step(cohort: Cohort) -> None:
        sources = [read(cohort) for read in reads]
        value = finish(fma32(*sources))
        if result == "_f32":
            write(cohort, value.view(U32))
            return
        half = saturate_f16(cohort, value.astype(np.float16), sources).view(np.uint16).astype(U32)
        if result == "lo_f16":
            write(cohort, old(cohort) & np.uint32(0xFFFF0000) | half)
        else:
            write(cohort, old(cohort) & np.uint32(0xFFFF) | half << HALF)

    return step


def _mixed(operand: Operand, is_half: int, high: int) -> Read:
    read = read32(operand, constant_width=16 if is_half else 32)
    shift = np.uint32(16 * high)

    def value(cohort: Cohort) -> Array:
        word = read(cohort)
        number = (word >> shift).astype(np.uint16).view(np.float16).astype(np.float32) if is_half else word.view("f4")
        number = np.abs(number) if operand.absolute else number
        return -number if operand.negate else number

    return value


def _dot2(instruction: Instruction, kind: str, accumulate: bool, flushes: bool) -> Step:
    """Two products of halves and an fp32 addend, summed in double and rounded once. gfx90a flushes denormals."""
    if instruction.modifiers or instruction.flags:
        raise UnknownInstruction("modifiers of dot products are not implemented")
    words = [read32(operand) for operand in instruction.operands[1:3]]
    addend = read32(instruction.operands[0] if accumulate else instruction.operands[3])
    write = write32(instruction.operands[0])

    def halves(word: Array) -> list[Array]:
        parts = [(word >> np.uint32(shift)).astype(np.uint16) for shift in (0, 16)]
        numbers = [bf16_to_f32(part) if kind == "bf16" else part.view(np.float16) for part in parts]
        return [(flushed(number) if flushes else number).astype(np.float64) for number in numbers]

    def step(cohort: Cohort) -> None:
        (a, b), (c, d) = (halves(read(cohort)) for read in words)
        total = (a * c + b * d + addend(cohort).view(np.float32)).astype(np.float32)
        write(cohort, (flushed(total) if flushes else total).view(U32))

    return step
