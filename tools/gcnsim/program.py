# SPDX-License-Identifier: Apache-2.0
"""Parsing: Triton's AMDGPU assembly text to a `Program`. Nothing here knows what an instruction does."""

import re
from dataclasses import dataclass, field

from gcnsim.errors import AssemblyError
from gcnsim.operands import Operand, parse_operand, words

ENCODINGS = ("_e32", "_e64", "_sdwa", "_e64_dpp", "_dpp")
# Words that follow the operands and take no value. The rest of an instruction's modifiers have the form name:value.
FLAGS = words("offen idxen sc0 sc1 nt glc slc lds gds clamp row_mirror row_half_mirror")
# Directives of the kernel descriptor that the launch needs; they are integers.
DESCRIPTOR = re.compile(r"^\s*\.amdhsa_(\w+)\s+(\d+)\s*$", re.MULTILINE)
LABEL = re.compile(r"([.\w$]+):")
# What separators part: it has none outside brackets and parentheses.
PIECE = {separator: re.compile(rf"(?:[^{separator}\[(]+|\[[^]]*]|\([^)]*\))+") for separator in ", "}
# v7, v[4:7] and the same of AGPRs, but not the end of a longer name. The look behind stands after the letter, since a
# pattern that begins with one cannot skip to where it may match.
VECTOR_REGISTER = re.compile(r"([va])(?<![\w.$].)(?:\[\d+:)?(\d+)\b")
ARGUMENT = re.compile(r"\.offset:\s*(\d+)\s+\.size:\s*(\d+)\s+\.value_kind:\s*(\w+)")


@dataclass(frozen=True)
class Argument:
    """One kernel argument: where its bytes lie in the kernarg segment. `kind` is the code object's value_kind."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Metadata:
    """The resources that the compiler reports. Sizes are bytes; `lds` is the static part, without Triton's;
    `max_workgroup` counts lanes."""

    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    wave_size: int
    max_workgroup: int
    kernarg_size: int
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Instruction:
    """One line of assembly. `op` is the opcode without its encoding suffix, `line` counts from 1 in the text,
    `source` is the Triton line ("file.py:27:9", with inlining sites after it), None before the first .loc."""

    op: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    flags: frozenset[str]
    text: str
    line: int
    source: str | None

    def integer(self, modifier: str, default: int = 0) -> int:
        return int(self.modifiers.get(modifier, str(default)), 0)

    def integers(self, modifier: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """The list of a modifier such as op_sel:[0,1]; padded with the default's tail where it is shorter."""
        if modifier not in self.modifiers:
            return default
        values = tuple(int(word, 0) for word in self.modifiers[modifier].strip("[]").split(","))
        return values + default[len(values) :]


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel: its instructions, and what its descriptor and metadata say. Two are equal if they are the same object.

    `labels` maps a label to the index of the instruction after it. `vector_registers` counts the register planes a
    wave needs: its VGPRs, then its AGPRs, which start at plane `agpr_base`.
    """

    arch: str
    kernel: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    descriptor: dict[str, int]
    metadata: Metadata
    vector_registers: int
    agpr_base: int = field(default=0)


def parse(text: str) -> Program:
    """The first kernel of `text`, the assembly Triton keeps as asm["amdgcn"]. Raises AssemblyError."""
    target = re.search(r"\.amdgcn_target\s+\"[^\"]*?(gfx\w+)", text)
    kernel = re.search(r"\.amdhsa_kernel\s+(\S+)", text)
    if not target or not kernel:
        raise AssemblyError("no .amdgcn_target or no .amdhsa_kernel: this is not the assembly of an AMDGPU kernel")
    highest = _highest_registers(text)
    agpr_base = highest["v"] + 1
    instructions, labels = _body(text, kernel[1], agpr_base)
    return Program(
        arch=target[1],
        kernel=kernel[1],
        instructions=tuple(instructions),
        labels=labels,
        descriptor={name: int(value) for name, value in DESCRIPTOR.findall(text)},
        metadata=_metadata(text),
        vector_registers=agpr_base + highest["a"] + 1,
        agpr_base=agpr_base,
    )


def _highest_registers(text: str) -> dict[str, int]:
    """The highest number of a VGPR ("v") and of an AGPR ("a"); -1 where there is none."""
    highest = {"v": -1, "a": -1}
    for letter, number in set(VECTOR_REGISTER.findall(text)):
        highest[letter] = max(highest[letter], int(number))
    return highest


def _body(text: str, kernel: str, agpr_base: int) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source: str | None = None
    inside = False
    for number, raw in enumerate(text.splitlines(), 1):
        code, _, comment = raw.partition(";")
        code = code.split("//")[0].strip()
        if label := LABEL.match(code):
            inside = inside or label[1] == kernel
            labels[label[1]] = len(instructions)
            continue
        if not inside or not code:
            continue
        if code.startswith(".section") and instructions:
            break
        if code.startswith(".loc"):
            # Line 0 is the compiler's own code: the last real line is the better hint.
            source = comment.strip() if code.split()[2] != "0" else source
        elif not code.startswith("."):
            instructions.append(parse_instruction(code, number, source, agpr_base))
    return instructions, labels


def parse_instruction(code: str, line: int, source: str | None, agpr_base: int) -> Instruction:
    """One instruction without its comment: opcode, comma-separated operands, and modifiers after the last of them."""
    op, rest = (code.split(maxsplit=1) + [""])[:2]
    encoding = next((suffix for suffix in ENCODINGS if op.endswith(suffix)), "")
    operands: list[Operand] = []
    modifiers: dict[str, str] = {}
    flags: set[str] = set()
    for piece in _split(rest, ","):
        for position, word in enumerate(_split(piece, " ")):
            name, colon, value = word.partition(":")
            if word in FLAGS:
                flags.add(word)
            elif colon and re.fullmatch(r"[a-z]\w*", name):
                modifiers[name] = value
            elif position == 0 or word.endswith(")"):  # s_waitcnt has no comma between its counters
                operands.append(parse_operand(word, agpr_base))
            else:
                raise AssemblyError(f"cannot read {word!r}", code, line, source)
    return Instruction(
        op=op.removesuffix(encoding),
        encoding=encoding.lstrip("_"),
        operands=tuple(operands),
        modifiers=modifiers,
        flags=frozenset(flags),
        text=code,
        line=line,
        source=source,
    )


def _split(text: str, separator: str) -> list[str]:
    """Splits outside brackets and parentheses, and drops empty pieces."""
    return [word for piece in PIECE[separator].findall(text) if (word := piece.strip())]


def _metadata(text: str) -> Metadata:
    def number(name: str, default: int = 0) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found[1]) if found else default

    return Metadata(
        vgprs=number("vgpr_count"),
        agprs=number("agpr_count"),
        sgprs=number("sgpr_count"),
        vgpr_spills=number("vgpr_spill_count"),
        sgpr_spills=number("sgpr_spill_count"),
        scratch=number("private_segment_fixed_size"),
        lds=number("group_segment_fixed_size"),
        wave_size=number("wavefront_size", 64),
        max_workgroup=number("max_flat_workgroup_size", 1024),
        kernarg_size=number("kernarg_segment_size"),
        arguments=tuple(Argument(int(offset), int(size), kind) for offset, size, kind in ARGUMENT.findall(text)),
    )
