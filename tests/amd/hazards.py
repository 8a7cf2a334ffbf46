# SPDX-License-Identifier: Apache-2.0
"""Neighbours that the hardware does not tell apart, where inline assembly is one of them.

From MI300 on some results must not be read by the next vector instruction: those of transcendental instructions (by
others), and those that are shifted into a part of a register, which who writes another part of it reads as well (AMD's
manuals of the instruction sets, "Manually inserted wait states"). LLVM puts an s_nop between such instructions, but not
into inline assembly, nor between a transcendental instruction and inline assembly. gcnsim does not see any of this.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

ARCHS = ("gfx942", "gfx950")
_TRANSCENDENTAL = re.compile(r"v_(rcp|rsq|sqrt|exp|log|sin|cos)_")
_NARROW = re.compile(r"v_cvt_(scalef32_)?(sr_)?(pk\d*_)?(fp4|fp8|bf8)_")  # to codes, in the part that op_sel names


@dataclass(frozen=True)
class _Vector:
    """A vector instruction: its text, its operands, and whether it is inline assembly."""

    text: str
    operands: list[str]
    inline: bool

    @property
    def written(self) -> set[str]:
        return registers(self.operands[0])

    @property
    def read(self) -> set[str]:
        found = {register for operand in self.operands[1:] for register in registers(operand)}
        return found | (self.written if self.writes_a_part else set())

    @property
    def writes_a_part(self) -> bool:
        """Whether it shifts its result into a part of a register that is not the lowest."""
        if re.search(r"dst_sel:(?!DWORD|BYTE_0|WORD_0)", self.text):
            return True
        selected = re.search(r"op_sel:\[([\d,]+)\]", self.text)
        if not selected:
            return False
        bits = selected[1].split(",")
        if _NARROW.match(self.text):
            return "1" in bits
        return len(bits) == len(self.operands) and bits[-1] == "1"  # one bit for each source, and the result's

    @property
    def transcendental(self) -> bool:
        return _TRANSCENDENTAL.match(self.text) is not None


def registers(operand: str) -> set[str]:
    """The vector registers of an operand: v7, v[8:11], a3."""
    found = re.match(r"\W*([va])(?:(\d+)|\[(\d+):(\d+)\])", operand)
    if not found:
        return set()
    first, last = (int(found[2]), int(found[2])) if found[2] else (int(found[3]), int(found[4]))
    return {f"{found[1]}{number}" for number in range(first, last + 1)}


def inline_lines(assembly: str) -> set[int]:
    """The lines, from 1 on, of instructions that are inline assembly."""
    inside, found = False, set()
    for number, line in enumerate(assembly.splitlines(), 1):
        if "ASMSTART" in line or "ASMEND" in line:
            inside = "ASMSTART" in line
        elif inside and line.strip() and not line.strip().startswith((";", ".")):
            found.add(number)
    return found


def around_inline(assembly: str, arch: str) -> list[str]:
    """The neighbours in a kernel's assembly that want another instruction between them."""
    if arch not in ARCHS:
        return []
    return [
        f"nothing between {before.text!r} and {after.text!r}"
        for before, after in _neighbours(assembly)
        if (before.inline or after.inline)
        and before.written & after.read
        and (before.writes_a_part or (before.transcendental and not after.transcendental))
    ]


def _neighbours(assembly: str) -> Iterator[tuple[_Vector, _Vector]]:
    """Vector instructions without any other instruction between them."""
    inline, before = inline_lines(assembly), None
    for number, line in enumerate(assembly.splitlines(), 1):
        text = line.partition(";")[0].strip()
        if not re.match(r"[a-z]+_", text):
            continue
        after = None
        if text.startswith("v_"):
            operands = re.split(r",\s*", text.split(maxsplit=1)[1]) if " " in text else [""]
            # What follows the last operand names no register: op_sel, dst_sel and their like
            named = re.sub(r"\s+\w+:.*", "", ", ".join(operands)).split(", ")
            after = _Vector(text, named, number in inline)
            if before:
                yield before, after
        before = after
