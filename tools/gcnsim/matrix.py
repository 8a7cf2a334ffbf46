# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions (MFMA): D = A B + C for one block of M x N x K, spread over the lanes of a wave.

Lane l holds row l mod M of A and column l mod N of B, and of these the K values of group l div M: consecutive ones,
but for 8-bit elements of the f8f6f4 instructions, whose groups take turns of sixteen. The products and their sum are
taken in double, and rounded once when C is added; the hardware rounds in between, in an order AMD does not document.
Integers are exact and wrap. gfx90a flushes denormals of fp16 and bf16 instructions, sources and results.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gcnsim.errors import UnknownInstruction
from gcnsim.formats import bf16_to_f32, scale_e8m0, small_floats
from gcnsim.operands import Operand
from gcnsim.program import Instruction
from gcnsim.registers import LANES, U32, Array, Cohort, Step, constant_bits, read32

MFMA = re.compile(r"v_mfma_(scale_)?(f32|f64|i32)_(\d+)x(\d+)x(\d+)_?([a-z0-9_]+)$")
F8F6F4 = {0: "fp8", 1: "bf8", 2: "fp6", 3: "bf6", 4: "fp4"}
BITS = {
    "f16": 16,
    "bf16": 16,
    "i8": 8,
    "f32": 32,
    "xf32": 32,
    "f64": 64,
    "fp8": 8,
    "bf8": 8,
    "fp6": 6,
    "bf6": 6,
    "fp4": 4,
}
BLOCK = 32  # elements along K that share a scale
TURN = 16  # 8-bit elements of f8f6f4 that follow each other in one lane


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int

    @property
    def groups(self) -> int:
        """Groups of lanes along K."""
        return LANES // self.m

    @property
    def per_lane(self) -> int:
        return self.k // self.groups


def matrix(instruction: Instruction, arch: str) -> Step | None:
    """The step of a matrix instruction, None where it is none."""
    match = MFMA.match(instruction.op)
    if not match:
        return None
    scaled, result, kinds = bool(match[1]), match[2], match[6]
    shape = Shape(*(int(match[n]) for n in (3, 4, 5)))
    if shape.m * shape.n not in (256, 1024) or shape.m != shape.n:
        raise UnknownInstruction("only the 16x16 and 32x32 matrix instructions of one block are implemented")
    is_f8f6f4 = kinds == "f8f6f4"
    if not is_f8f6f4 and (instruction.integer("cbsz") or instruction.integer("abid") or instruction.integer("blgp")):
        raise UnknownInstruction("broadcasts of matrix instructions (cbsz, abid, blgp) are not implemented")
    kind_a, kind_b = _kinds(instruction, kinds)
    destination, a, b, c = instruction.operands[:4]
    read_a, read_b = (_elements(o, kind, shape, arch, is_f8f6f4) for o, kind in ((a, kind_a), (b, kind_b)))
    if scaled:
        scales, op_sel = instruction.operands[4:6], instruction.integers("op_sel", (0, 0))
        op_sel_hi = instruction.integers("op_sel_hi", (0, 0))
        read_a = _scaled(read_a, scales[0], op_sel[0] + 2 * op_sel_hi[0], shape)
        read_b = _scaled(read_b, scales[1], op_sel[1] + 2 * op_sel_hi[1], shape)
    flushes = arch == "gfx90a" and kind_a in ("f16", "bf16")
    if flushes:
        read_a, read_b = _flushed(read_a, kind_a), _flushed(read_b, kind_b)
    accumulate = _accumulator(c, destination, result, shape, flushes)

    def step(cohort: Cohort) -> None:
        product = np.matmul(read_a(cohort), read_b(cohort).swapaxes(1, 2))
        accumulate(cohort, product)

    return step


def _kinds(instruction: Instruction, kinds: str) -> tuple[str, str]:
    """The element types of A and B."""
    if kinds == "f8f6f4":
        return F8F6F4[instruction.integer("cbsz")], F8F6F4[instruction.integer("blgp")]
    kinds = kinds.removesuffix("_1k")
    first, _, second = kinds.partition("_")
    if first not in BITS or (second and second not in BITS):
        raise UnknownInstruction(f"matrix elements of type {kinds!r} are not implemented")
    return first, second or first


def _elements(operand: Operand, kind: str, shape: Shape, arch: str, is_f8f6f4: bool) -> Callable[[Cohort], Array]:
    """A reader of A as doubles [wave, M, K], or of B transposed, [wave, N, K]."""
    bits = BITS[kind]
    words, rest = divmod(bits * shape.per_lane, 32)
    if rest or words == 0 or operand.count < words or (operand.count > words and not is_f8f6f4):
        raise UnknownInstruction("matrix instructions of several blocks are not implemented")
    if operand.kind != "v":
        raise UnknownInstruction("A and B of a matrix instruction must be registers")
    planes = slice(operand.index, operand.index + words)
    decode = _decoder(kind, arch)
    turn = TURN if is_f8f6f4 and bits == 8 else shape.per_lane

    def read(cohort: Cohort) -> Array:
        raw = np.ascontiguousarray(cohort.vector[planes].transpose(1, 2, 0)).view(np.uint8)
        values = decode(raw)[..., : shape.per_lane]
        lanes = values.reshape(cohort.waves, shape.groups, shape.m, -1, turn)
        by_row = lanes.transpose(0, 2, 3, 1, 4).reshape(cohort.waves, shape.m, shape.k)
        return np.ascontiguousarray(by_row, np.float64)

    return read


def _flushed(read: Callable[[Cohort], Array], kind: str) -> Callable[[Cohort], Array]:
    """Denormals of the format read as 0."""
    smallest = 2.0**-14 if kind == "f16" else 2.0**-126

    def flushed(cohort: Cohort) -> Array:
        values = read(cohort)
        return np.where(np.abs(values) < smallest, 0.0, values)

    return flushed


def _decoder(kind: str, arch: str) -> Callable[[Array], Array]:
    """Bytes of a lane's registers [..., bytes] to values [..., elements]."""
    if kind in ("f16", "f32", "f64", "i8"):
        dtype = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "i8": np.int8}[kind]
        return lambda raw: raw.view(dtype)
    if kind == "bf16":
        return lambda raw: bf16_to_f32(raw.view(np.uint16))
    if kind == "xf32":
        return lambda raw: _rounded_to_xf32(raw.view(np.float32))
    fmt = small_floats(arch)[kind]
    if fmt.bits == 8:
        return fmt.decode
    weights = 1 << np.arange(fmt.bits)

    def decode(raw: Array) -> Array:
        bits = np.unpackbits(raw, axis=-1, bitorder="little")
        count = bits.shape[-1] // fmt.bits
        return fmt.decode(bits[..., : count * fmt.bits].reshape(*bits.shape[:-1], count, fmt.bits) @ weights)

    return decode


def _rounded_to_xf32(x: Array) -> Array:
    """fp32 with the ten bits of mantissa that XF32 has, to nearest even: how the hardware rounds is not documented."""
    bits = x.view(U32)
    rounded = bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits).view(np.float32)


def _scaled(read: Callable[[Cohort], Array], scale: Operand, byte: int, shape: Shape) -> Callable[[Cohort], Array]:
    """Multiplies each block of 32 along K by its E8M0 scale: byte `byte` of the scale register of the block's lane."""
    word, shift = read32(scale), np.uint32(8 * byte)

    def scaled(cohort: Cohort) -> Array:
        codes = np.broadcast_to(word(cohort) >> shift & np.uint32(255), cohort.active.shape)
        by_row = scale_e8m0(codes).reshape(cohort.waves, shape.groups, shape.m).swapaxes(1, 2)
        return read(cohort) * np.repeat(by_row, BLOCK, axis=2)

    return scaled


def _accumulator(
    c: Operand, destination: Operand, result: str, shape: Shape, flushes: bool
) -> Callable[[Cohort, Array], None]:
    """Adds C to the product [wave, M, N] and writes D. MFMA does not heed EXEC."""
    dtype = np.dtype({"f32": np.float32, "f64": np.float64, "i32": np.int32}[result])
    words = dtype.itemsize // 4
    registers = shape.m * shape.n // LANES
    planes = slice(destination.index, destination.index + registers * words)
    constant = None
    if c.kind != "v":
        constant = np.array(constant_bits(c, 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)

    def accumulate(cohort: Cohort, product: Array) -> None:
        waves = cohort.waves
        spread = _by_register(product, shape, result)
        if constant is not None:
            old = constant
        else:
            raw = cohort.vector[c.index : c.index + registers * words].reshape(registers, words, waves, LANES)
            old = np.ascontiguousarray(raw.transpose(0, 2, 3, 1)).view(dtype)[..., 0]
        if result == "i32":
            total = (spread.astype(np.int64) + old).astype(np.int32)
        else:
            total = (spread + old).astype(dtype)
            if flushes:
                total = np.where(np.abs(total) < np.finfo(np.float32).tiny, dtype.type(0), total)
        raw = np.ascontiguousarray(total).view(U32).reshape(registers, waves, LANES, words)
        cohort.vector[planes] = raw.transpose(0, 3, 1, 2).reshape(registers * words, waves, LANES)

    return accumulate


def _by_register(product: Array, shape: Shape, result: str) -> Array:
    """The product [wave, M, N] as each lane holds it, [register, wave, lane]: a lane has one column, and four rows
    that follow each other for each block of rows (for doubles, rows four apart)."""
    waves = len(product)
    groups = LANES // shape.n
    if result == "f64":
        return product.reshape(waves, 4, 4, shape.n).transpose(1, 0, 2, 3).reshape(-1, waves, LANES)
    blocks = product.reshape(waves, -1, groups, 4, shape.n)
    return blocks.transpose(1, 3, 0, 2, 4).reshape(-1, waves, LANES)
