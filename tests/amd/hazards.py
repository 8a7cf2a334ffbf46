# SPDX-License-Identifier: Apache-2.0
"""Neighbours that the hardware does not tell apart, where inline assembly is one of them.

From MI300 on some results must not be read by the next vector instruction: those of transcendental instructions (by
others), and those that are shifted into a part of a register, which who writes another part of it reads as well (AMD's
manuals of the instruction sets, "Manually inserted wait states"). LLVM puts an s_nop between such instructions, but not
into inline assembly, nor between a transcendental instruction and inline assembly. gcnsim does not see any of this.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from tests.amd.isa import Instruction, registers

ARCHS = ("gfx942", "gfx950")
_TRANSCENDENTAL = re.compile(r"v_(rcp|rsq|sqrt|exp|log|sin|cos)_")
_NARROW = re.compile(r"v_cvt_(scalef32_)?(sr_)?(pk\d*_)?(fp4|fp8|bf8)_")  # to codes, in the part that op_sel names


def around_inline(instructions: Sequence[Instruction], arch: str) -> list[str]:
    """The neighbours among a kernel's instructions that want another one between them."""
    if arch not in ARCHS:
        return []
    return [
        f"nothing between {before.text!r} and {after.text!r}"
        for before, after in pairwise(instructions)
        if (before.inline or after.inline)
        and before.text.startswith("v_")
        and after.text.startswith("v_")
        and registers(before.operands[0]) & _read(after)
        and (_writes_a_part(before) or (_is_transcendental(before) and not _is_transcendental(after)))
    ]


def _read(instruction: Instruction) -> set[str]:
    sources = instruction.operands[0 if _writes_a_part(instruction) else 1 :]
    return {register for operand in sources for register in registers(operand)}


def _writes_a_part(instruction: Instruction) -> bool:
    """Whether it shifts its result into a part of a register that is not the lowest."""
    if re.search(r"dst_sel:(?!DWORD|BYTE_0|WORD_0)", instruction.text):
        return True
    selected = re.search(r"op_sel:\[([\d,]+)\]", instruction.text)
    if not selected:
        return False
    bits = selected[1].split(",")
    if _NARROW.match(instruction.text):
        return "1" in bits
    return len(bits) == len(instruction.operands) and bits[-1] == "1"  # one bit for each source, and the result's


def _is_transcendental(instruction: Instruction) -> bool:
    return _TRANSCENDENTAL.match(instruction.text) is not None
