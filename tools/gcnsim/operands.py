# SPDX-License-Identifier: Apache-2.0
"""What an instruction names: registers, constants, labels. `registers` says how each is read and written."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

# Architected scalar registers, by their number in the encoding. MODE has no number there; it takes a free one.
VCC, M0, EXEC, MODE = 106, 124, 126, 128
SCALAR_REGISTERS = 129
# MODE's low byte: rounding to nearest even, denormals kept. It is the only setting that is modelled.
FLOAT_MODE, FLOAT_MODE_BITS = 0xF0, 0xFF
FP16_OVFL = 1 << 23  # in MODE: what overflows a format of 16 or 8 bits becomes its largest number
NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
}
REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\]|\[(\d+)\])$")
# The inline constant the assembler writes as 0.15915494 is 1 / (2 pi) to the width of the operand.
INVERSE_TWO_PI = 0.15915494309189532


def words(text: str) -> frozenset[str]:
    """The words of a list of names."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Operand:
    """`kind` is "v" (vector register: VGPR, or AGPR behind them), "s" (scalar register), "int", "float" (inline
    constant), "off" (no register) or "name" (label or anything else, in `name`). `index` is the register's plane or
    number, `count` how many registers. The modifiers are -x, |x| and sext(x) of the source."""

    kind: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    name: str = ""
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False

    def at(self, offset: int) -> "Operand":
        """The register `offset` after this one."""
        return replace(self, index=self.index + offset, count=1)


EXEC_PAIR = Operand("s", EXEC, 2)
VCC_PAIR = Operand("s", VCC, 2)
OFF = Operand("off")


@lru_cache(maxsize=1 << 15)
def parse_operand(text: str, agpr_base: int) -> Operand:
    """One operand with its modifiers; AGPR n becomes vector plane agpr_base + n."""
    sign_extend = text.startswith("sext(")
    if sign_extend:
        text = text[5:-1]
    negate = bool(re.match(r"-[|a-z]", text)) or text.startswith("neg(")
    if negate:
        text = text[4:-1] if text.startswith("neg(") else text[1:]
    absolute = text.startswith(("|", "abs("))
    if absolute:
        text = text[4:-1] if text.startswith("abs(") else text.strip("|")
    return replace(_plain(text, agpr_base), negate=negate, absolute=absolute, sign_extend=sign_extend)


def _plain(text: str, agpr_base: int) -> Operand:
    if register := REGISTER.match(text):
        letter, single, first, last, bracketed = register.groups()
        start = int(single or first or bracketed)
        count = int(last) - start + 1 if last else 1
        return Operand("s", start, count) if letter == "s" else Operand("v", start + agpr_base * (letter == "a"), count)
    if text in NAMED:
        return Operand("s", *NAMED[text])
    if text == "off":
        return OFF
    if re.match(r"0\.15915494", text):
        return Operand("float", value=INVERSE_TWO_PI)
    try:
        return Operand("int", value=int(text, 0))
    except ValueError:
        pass
    try:
        return Operand("float", value=float(text))
    except ValueError:
        return Operand("name", name=text)
