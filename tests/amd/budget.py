# SPDX-License-Identifier: Apache-2.0
"""What a kernel's machine code must be, and what of it is not so.

A kernel that spills, or takes a detour through the LDS one value at a time, is correct and slow: without a GPU nothing
but these rules would notice.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.amd import isa

LDS = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}  # bytes of a compute unit; Triton does not check
WIDE_SHARE = 0.75  # of the bytes that the hot loop loads, those that must come 16 at a time
SCALAR_LDS = re.compile(r"ds_(read|write)_(u8|i8|u16|i16|b8|b16)")

# CDNA2 has no FP8: codes become FP16 in the kernel, and its conversion to FP8 is in software.
FP8_MATRIX = {
    "gfx90a": r"v_mfma_f32_\d+x\d+x\d+_?f16",
    "gfx942": r"v_mfma_f32_\d+x\d+x\d+_fp8_fp8",
    "gfx950": r"v_mfma_f32_\d+x\d+x\d+_(f8f6f4|fp8_fp8)",
}
FP8_CAST = {"gfx942": r"v_cvt_pk_fp8_f32", "gfx950": r"v_cvt_scalef32_pk_fp8_f32"}


@dataclass(frozen=True)
class Budget:
    """What one kernel must be on each architecture, beyond the rules that hold for every kernel.

    Attributes:
        matrix: the opcode of its matrix instructions, a pattern; it must have some, and no other.
        uses: an opcode that it must use, a pattern.
    """

    matrix: Mapping[str, str] = field(default_factory=dict)
    uses: Mapping[str, str] = field(default_factory=dict)


def resources(assembly: isa.Assembly, arch: str, lds: int) -> list[str]:
    """What is wrong with the registers, scratch and LDS of a kernel; holds for any input."""
    limits = {"vgpr_spill_count": 0, "sgpr_spill_count": 0, "private_segment_fixed_size": 0}
    found = [f"{name} is {assembly.resources[name]}" for name in limits if assembly.resources[name] > limits[name]]
    if lds > LDS[arch]:
        found.append(f"it takes {lds} bytes of LDS, {arch} has {LDS[arch]}")
    if any("irr.guard" in block.comment for block in assembly.blocks):
        found.append("a loop with two entries (irr.guard): lanes that wait for each other in it never meet")
    return found


def violations(assembly: isa.Assembly, arch: str, lds: int, budget: Budget) -> list[str]:
    """Everything that is wrong with a kernel compiled for the shapes of real models."""
    found = resources(assembly, arch, lds)
    opcodes = {instruction.opcode for instruction in assembly.instructions}
    matrix = {instruction.opcode for instruction in assembly.instructions if instruction.kind == "matrix"}
    meant = budget.matrix.get(arch)
    wrong = {opcode for opcode in matrix if not meant or not re.fullmatch(meant, opcode)}
    if wrong or bool(meant) != bool(matrix):
        found.append(f"its matrix instructions are {sorted(matrix) or 'none'}, {meant or 'none'} was meant")
    if arch in budget.uses and not any(re.fullmatch(budget.uses[arch], opcode) for opcode in opcodes):
        found.append(f"it has no {budget.uses[arch]}")
    loop = assembly.hot_loop
    hot = loop.instructions if loop else assembly.instructions
    loaded = [instruction.loaded_bytes for instruction in hot]
    if sum(size for size in loaded if size == 16) < WIDE_SHARE * sum(loaded):
        found.append(f"its loads bring {sorted(size for size in loaded if size)} bytes a lane, not 16 at a time")
    scalar = sorted({i.opcode for i in hot if SCALAR_LDS.match(i.opcode)})
    if scalar:
        found.append(f"values go through the LDS one at a time: {', '.join(scalar)}")
    return found


def explain(assembly: isa.Assembly, found: list[str]) -> str:
    """The violations, and the text of the loop they are about (of the whole kernel where there is no loop)."""
    loop = assembly.hot_loop
    listing = loop.listing() if loop else isa.Loop(tuple(assembly.blocks), 0).listing()
    return "\n".join([*(f"- {text}" for text in found), "The loop where the time goes:", listing])
