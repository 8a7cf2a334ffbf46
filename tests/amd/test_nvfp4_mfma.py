# SPDX-License-Identifier: Apache-2.0
"""Inline assembly of the NVFP4 kernel of CDNA, which the compiler does not keep away from matrix instructions."""

import re
from itertools import product

import pytest

from tests.amd import budget, isa, tritons
from tests.amd.hazards import inline_lines, registers
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
        blocks, lines = isa.read(launch.assembly).blocks, inline_lines(launch.assembly)
        inline = {i.line: _written(i) for block in blocks for i in block.instructions if i.line in lines}
        assert inline, case
        assert not any(register.startswith("a") for written in inline.values() for register in written), case
        for block in blocks:
            for index, instruction in enumerate(block.instructions):
                if instruction.kind != "matrix":
                    continue
                operands = instruction.text.split(maxsplit=1)[1].split(", ")
                assert all(re.match(r"a\[|0", operand) for operand in (operands[0], operands[3])), (
                    f"{case}: sums outside accumulation registers: {instruction.text}"
                )
                read = registers(operands[1]) | registers(operands[2])
                for before in block.instructions[max(0, index - 3) : index]:
                    assert before.line not in inline or not read & inline[before.line], (
                        f"{case}: line {before.line}: {before.text} in front of {instruction.text}"
                    )


def _written(instruction: isa.Instruction) -> set[str]:
    return registers(instruction.text.split(maxsplit=1)[1])
