# SPDX-License-Identifier: Apache-2.0
"""Conversions between number formats, packed and scaled ones included."""

import re
from collections.abc import Callable

import numpy as np

from gcnsim.errors import UnknownInstruction
from gcnsim.formats import SmallFloat, bf16_to_f32, f32_to_bf16, f32_to_f16_toward_zero, scale_e8m0, small_floats
from gcnsim.program import Instruction
from gcnsim.registers import U32, Array, Cohort, Read, Step, read32, write32
from gcnsim.vector import Alu, alu, saturate_f16, saturates, source

HALF = np.uint32(16)


def _to_integer(dtype: type) -> Alu:
    """Truncation toward zero; what is out of range saturates and NaN becomes 0."""
    limits = np.iinfo(dtype)

    def compute(x: Array) -> Array:
        return np.nan_to_num(np.trunc(x.astype(np.float64)), posinf=np.inf, neginf=-np.inf).clip(limits.min, limits.max)

    name = f"{'u' if limits.min == 0 else 'i'}{limits.bits}"
    return alu(name, "f32", lambda x: compute(x).astype(dtype))


def _byte_to_float(number: int) -> Alu:
    return alu("f32", "u32", lambda x: (x >> np.uint32(8 * number) & np.uint32(255)).astype(np.float32))


def _pack16(low: Array, high: Array) -> Array:
    """Two arrays of a 16-bit type as the halves of words."""
    return low.view(np.uint16).astype(U32) | high.view(np.uint16).astype(U32) << HALF


CONVERSIONS: dict[str, Alu] = {
    "v_cvt_f32_u32": alu("f32", "u32", lambda x: x.astype(np.float32)),
    "v_cvt_f32_i32": alu("f32", "i32", lambda x: x.astype(np.float32)),
    "v_cvt_u32_f32": _to_integer(np.uint32),
    "v_cvt_i32_f32": _to_integer(np.int32),
    "v_cvt_f32_f16": alu("f32", "f16", lambda x: x.astype(np.float32)),
    "v_cvt_f16_f32": alu("f16", "f32", lambda x: x.astype(np.float16)),
    "v_cvt_f32_f64": alu("f32", "f64", lambda x: x.astype(np.float32)),
    "v_cvt_f64_f32": alu("f64", "f32", lambda x: x.astype(np.float64)),
    "v_cvt_f64_i32": alu("f64", "i32", lambda x: x.astype(np.float64)),
    "v_cvt_f64_u32": alu("f64", "u32", lambda x: x.astype(np.float64)),
    "v_cvt_i32_f64": alu("i32", "f64", lambda x: np.nan_to_num(np.trunc(x)).clip(-(2**31), 2**31 - 1).astype(np.int32)),
    "v_cvt_u32_f64": alu("u32", "f64", lambda x: np.nan_to_num(np.trunc(x)).clip(0, 2**32 - 1).astype(np.uint32)),
    "v_cvt_f16_u16": alu("f16", "u16", lambda x: x.astype(np.float16)),
    "v_cvt_f16_i16": alu("f16", "i16", lambda x: x.astype(np.float16)),
    "v_cvt_u16_f16": alu("u16", "f16", lambda x: np.nan_to_num(np.trunc(x.astype(np.float64))).clip(0, 65535)),
    "v_cvt_i16_f16": alu("i16", "f16", lambda x: np.nan_to_num(np.trunc(x.astype(np.float64))).clip(-32768, 32767)),
    "v_cvt_f32_bf16": alu("f32", "u16", bf16_to_f32),
    **{f"v_cvt_f32_ubyte{number}": _byte_to_float(number) for number in range(4)},
    "v_cvt_pk_bf16_f32": alu("u32", "f32 f32", lambda a, b: f32_to_bf16(a) | f32_to_bf16(b) << HALF),
    "v_cvt_pk_u16_u32": alu(
        "u32", "u32 u32", lambda a, b: _pack16(*(x.clip(max=65535).astype(np.uint16) for x in (a, b)))
    ),
    "v_cvt_pk_i16_i32": alu(
        "u32", "i32 i32", lambda a, b: _pack16(*(x.clip(-32768, 32767).astype(np.int16) for x in (a, b)))
    ),
}
ROUND_TO_F16: dict[str, Callable[[Array], Array]] = {
    "v_cvt_pk_f16_f32": lambda x: x.astype(np.float16),
    "v_cvt_pkrtz_f16_f32": f32_to_f16_toward_zero,
}

UNPACK = re.compile(r"v_cvt(_pk)?_f32_(fp8|bf8)$")
PACK = re.compile(r"v_cvt_pk_(fp8|bf8)_f32$")
SCALED = re.compile(r"v_cvt_scalef32(_pk)?_(f32|f16|bf16|fp8|bf8|fp4)_(f32|f16|bf16|fp8|bf8|fp4)$")


def small_conversion(instruction: Instruction, arch: str) -> Step | None:
    """The step of a conversion to a pair of fp16, or from or to 8 or 4 bits, None where the instruction is none."""
    formats = small_floats(arch)
    if instruction.op in ROUND_TO_F16:
        return _pack_f16(instruction, ROUND_TO_F16[instruction.op])
    if match := UNPACK.match(instruction.op):
        return _unpack(instruction, formats[match[2]], 2 if match[1] else 1)
    if match := PACK.match(instruction.op):
        return _pack(instruction, formats[match[1]])
    if match := SCALED.match(instruction.op):
        if arch != "gfx950":
            raise UnknownInstruction(f"{arch} has no {instruction.op}")
        if match[3] in formats:
            return (_scaled_unpack if match[1] else _scaled_unpack_one)(instruction, formats[match[3]], match[2])
        if match[1] and match[2] in formats:
            return _scaled_pack(instruction, formats[match[2]], match[3])
    return None


def _pack_f16(instruction: Instruction, rounded: Callable[[Array], Array]) -> Step:
    reads = [source(instruction, 1 + n, n, "f32") for n in range(2)]
    write = write32(instruction.operands[0])

    def step(cohort: Cohort) -> None:
        values = [read(cohort) for read in reads]
        write(cohort, _pack16(*(saturate_f16(cohort, rounded(x), [x]) for x in values)))

    return step


def _part(instruction: Instruction, width: int) -> int:
    """The first bit of the part of source 0 that holds the codes: by SDWA or by op_sel, in units of `width` bits."""
    if instruction.encoding == "sdwa":
        name, _, number = instruction.modifiers.get("src0_sel", "BYTE_0").partition("_")
        return {"BYTE": 8, "WORD": 16, "DWORD": 0}[name] * int(number or 0)
    low, high = instruction.integers("op_sel", (0, 0))[:2]
    # Of four bytes both bits choose; op_sel names the upper bit of a byte's number last. Of two words the first does.
    return width * (low + 2 * high if width == 8 else low)


def _unpack(instruction: Instruction, fmt: SmallFloat, count: int) -> Step:
    read = read32(instruction.operands[1])
    writes = [write32(instruction.operands[0], n) for n in range(count)]
    start = _part(instruction, 8 * count)

    def step(cohort: Cohort) -> None:
        word = read(cohort)
        values = [fmt.decode(word >> np.uint32(start + 8 * n) & np.uint32(255)).view(U32) for n in range(count)]
        for write, value in zip(writes, values, strict=True):
            write(cohort, value)

    return step


def _pack(instruction: Instruction, fmt: SmallFloat) -> Step:
    reads = [source(instruction, 1 + n, n, "f32") for n in range(2)]
    shift = np.uint32(16 * instruction.integers("op_sel", (0, 0, 0))[2])
    keep = ~(np.uint32(0xFFFF) << shift)
    old, write = read32(instruction.operands[0]), write32(instruction.operands[0])

    def step(cohort: Cohort) -> None:
        low, high = (fmt.encode(read(cohort), saturates(cohort)) for read in reads)
        write(cohort, old(cohort) & keep | (low | high << np.uint32(8)) << shift)

    return step


def _scale(read: Read) -> Read:
    """The scale operand counts by its exponent alone: it is an E8M0 code in bits 23 to 30."""
    return lambda cohort: scale_e8m0(read(cohort) >> np.uint32(23) & np.uint32(255))


def _scaled_unpack(instruction: Instruction, fmt: SmallFloat, target: str) -> Step:
    """Two codes times the scale, to two fp32 registers or to the halves of one."""
    read, scale = read32(instruction.operands[1]), _scale(read32(instruction.operands[2]))
    destination = instruction.operands[0]
    write = write32(destination)
    write_high = write32(destination, 1) if destination.count > 1 else write
    start = _part(instruction, 2 * fmt.bits)
    mask = np.uint32((1 << fmt.bits) - 1)

    def step(cohort: Cohort) -> None:
        word, factor = read(cohort), scale(cohort)
        low, high = (
            (fmt.decode(word >> np.uint32(start + n * fmt.bits) & mask) * factor).astype(np.float32) for n in range(2)
        )
        if target == "f32":
            write(cohort, low.view(U32))
            write_high(cohort, high.view(U32))
        elif target == "bf16":
            write(cohort, f32_to_bf16(low) | f32_to_bf16(high) << HALF)
        else:
            write(cohort, _pack16(*(saturate_f16(cohort, x.astype(np.float16), [x]) for x in (low, high))))

    return step


def _scaled_unpack_one(instruction: Instruction, fmt: SmallFloat, target: str) -> Step:
    """One 8-bit code times the scale, to an fp32 register or, as fp16, to the half that op_sel names."""
    read, scale = read32(instruction.operands[1]), _scale(read32(instruction.operands[2]))
    old, write = read32(instruction.operands[0]), write32(instruction.operands[0])
    start = np.uint32(_part(instruction, 8))
    shift = np.uint32(16 * instruction.integers("op_sel", (0, 0, 0))[2])
    keep = ~(np.uint32(0xFFFF) << shift)

    def step(cohort: Cohort) -> None:
        value = (fmt.decode(read(cohort) >> start & np.uint32(255)) * scale(cohort)).astype(np.float32)
        if target == "f32":
            write(cohort, value.view(U32))
        else:
            half = value.astype(np.float16).view(np.uint16).astype(U32)
            write(cohort, old(cohort) & keep | half << shift)

    return step


def _scaled_pack(instruction: Instruction, fmt: SmallFloat, origin: str) -> Step:
    """Two values divided by the scale and rounded, into the half (fp8) or the byte (fp4) that op_sel names."""
    op_sel = instruction.integers("op_sel", (0, 0, 0, 0))
    scale_position = 3 if origin == "f32" else 2
    scale = _scale(read32(instruction.operands[scale_position]))
    shift = np.uint32(8 * (op_sel[2] + 2 * op_sel[3]) if fmt.bits == 4 else 16 * op_sel[scale_position])
    keep = ~(np.uint32((1 << 2 * fmt.bits) - 1) << shift)
    old, write = read32(instruction.operands[0]), write32(instruction.operands[0])
    if origin == "f32":
        reads = [source(instruction, 1 + n, n, "f32") for n in range(2)]
    else:
        word = read32(instruction.operands[1])
        reads = [_half(word, shift, origin) for shift in (0, 16)]

    def step(cohort: Cohort) -> None:
        factor, saturate = scale(cohort), saturates(cohort)
        low, high = (fmt.encode(read(cohort) / factor, saturate) for read in reads)
        write(cohort, old(cohort) & keep | (low | high << np.uint32(fmt.bits)) << shift)

    return step


def _half(word: Read, shift: int, kind: str) -> Read:
    amount = np.uint32(shift)
    if kind == "bf16":
        return lambda cohort: bf16_to_f32(word(cohort) >> amount & np.uint32(0xFFFF))
    return lambda cohort: (word(cohort) >> amount).astype(np.uint16).view(np.float16)
