# SPDX-License-Identifier: Apache-2.0
"""Inline assembly of the NVFP4 kernel of CDNA, which the compiler does not keep away from matrix instructions."""

import re
from itertools import product

import pytest

from tests.amd import budget, isa, tritons
from tests.amd.prove import prove

MATRIX = [
    pytest.param(triton, arch, id=f"{arch}-triton{triton}") for triton, arch in product(tritons.VERSIONS, budget.LDS)
]


@pytest.mark.parametrize(("triton", "arch"), MATRIX)
def test_it_keeps_its_distance(triton: str, arch: str) -> None:
    """CDNA wants two other instructions (or s_nop) between the one that writes an operand and the matrix instruction
    that reads it, and more between a matrix instruction and one that writes what were its sums. The compiler counts
    them, except where inline assembly writes: so that writes neither operands nor, ever, accumulation registers, and
    all sums are in these. And subnormals must not be flushed."""
    proof = prove(triton, arch, "nvfp4_mfma", execute=False)
    for case, launch in proof.kernels:
        if launch.kernel != "nvfp4_mfma_kernel":
            continue
        assert ".amdhsa_float_denorm_mode_16_64 3" in launch.assembly, case
        inline = _written_inline(launch.assembly)
        assert inline, case
        assert not any(register.startswith("a") for written in inline.values() for register in written), case
        for block in isa.read(launch.assembly).blocks:
            for index, instruction in enumerate(block.instructions):
                if instruction.kind != "matrix":
                    continue
                operands = instruction.text.split(maxsplit=1)[1].split(", ")
                assert all(re.match(r"a\[|0", operand) for operand in (operands[0], operands[3])), (
                    f"{case}: sums outside accumulation registers: {instruction.text}"
                )
                read = _registers(operands[1]) | _registers(operands[2])
                for before in block.instructions[max(0, index - 3) : index]:
                    assert before.line not in inline or not read & inline[before.line], (
                        f"{case}: line {before.line}: {before.text} in front of {instruction.text}"
                    )


def _registers(operand: str) -> set[str]:
    """The vector registers of an operand: v7, v[8:11], a3."""
    found = re.match(r"\s*([va])(?:(\d+)|\[(\d+):(\d+)\])", operand)
    if not found:
        return set()
    first, last = (int(found[2]), int(found[2])) if found[2] else (int(found[3]), int(found[4]))
    return {f"{found[1]}{number}" for number in range(first, last + 1)}


def _written_inline(assembly: str) -> dict[int, set[str]]:
    """By line of the assembly, the registers that an instruction of inline assembly writes."""
    inside, found = False, {}
    for number, line in enumerate(assembly.splitlines(), 1):
        if "ASMSTART" in line or "ASMEND" in line:
            inside = "ASMSTART" in line
        elif inside and line.strip() and not line.strip().startswith((";", ".")):
            found[number] = _registers(line.split(maxsplit=1)[1])
    return found
