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
        blocks = isa.read(launch.assembly).blocks
        inline = [instruction for block in blocks for instruction in block.instructions if instruction.inline]
        assert inline, case
        written = {register for instruction in inline for register in isa.registers(instruction.operands[0])}
        assert not any(register.startswith("a") for register in written), case
        for block in blocks:
            for index, instruction in enumerate(block.instructions):
                if instruction.kind != "matrix":
                    continue
                operands = instruction.operands
                assert all(re.match(r"a\[|0", operand) for operand in (operands[0], operands[3])), (
                    f"{case}: sums outside accumulation registers: {instruction.text}"
                )
                read = isa.registers(operands[1]) | isa.registers(operands[2])
                for before in block.instructions[max(0, index - 3) : index]:
                    assert not (before.inline and read & isa.registers(before.operands[0])), (
                        f"{case}: line {before.line}: {before.text} in front of {instruction.text}"
                    )
