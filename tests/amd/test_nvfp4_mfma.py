# SPDX-License-Identifier: Apache-2.0
"""What the CDNA kernel's loop over K costs: vector instructions a weight, no weight in the LDS, loads far ahead."""

import re
from itertools import product

import pytest

from tests.amd import isa, tritons
from tests.amd.prove import prove
from tests.amd.virtual_gpu import Launch

# Vector instructions for 8 weights of a lane, everything in the loop counted, by architecture: what issue 4 allows, and
# by architecture and x what both Tritons need with 16 rows and whole steps, moves of accumulators included.
ALLOWED = {"gfx942": 21.0, "gfx950": 18.0, "gfx90a": 28.0}
VECTOR = {
    ("gfx942", "bf16"): 16.5,
    ("gfx942", "fp16"): 12.5,
    ("gfx950", "bf16"): 12.25,
    ("gfx950", "fp16"): 9.75,
    ("gfx90a", "bf16"): 20.0,
    ("gfx90a", "fp16"): 17.0,
}
STEPS = 2  # of 128 columns, written out in the loop
MATRIX = [
    pytest.param(triton, arch, id=f"{arch}-triton{triton}")
    for triton, arch in product(tritons.VERSIONS, ("gfx90a", "gfx942", "gfx950"))
]


def dtype(loop: list[isa.Instruction]) -> str:
    return "bf16" if any("bf16" in i.opcode for i in loop if i.kind == "matrix") else "fp16"


def problems(arch: str, launch: Launch) -> list[str]:
    """What is wrong with the loop over K."""
    hot = isa.read(launch.assembly).hot_loop
    assert hot
    loop, lanes = hot.instructions, 64 * launch.warps
    block_m, block_n = launch.constants["BLOCK_M"], launch.constants["BLOCK_N"]
    count = isa.count(loop)
    found = []
    vector = 8 * (count["vector"] + count["move"]) / (STEPS * block_n * 128 / lanes)
    tight = block_m == 16 and launch.constants["EVEN_K"]
    if vector > (VECTOR[arch, dtype(loop)] if tight else ALLOWED[arch]):
        found.append(f"{vector:.2f} vector instructions for 8 weights of {dtype(loop)}")
    # All that is written to the LDS is x, and nothing passes between lanes in another way.
    written = sum({"ds_write_b64": 8, "ds_write_b128": 16}.get(i.opcode, 64) for i in loop if "ds_write" in i.opcode)
    if written != STEPS * block_m * 128 * 2 / lanes:
        found.append(f"{written} bytes a lane go to the LDS")
    crossing = [i.text for i in loop if re.search(r"permute|swizzle|swap|dpp|row_|quad_perm|lane", i.text)]
    found += [f"moves values between lanes: {text}" for text in crossing]
    # When the loop waits for codes, those of the other step are on their way still: at least 3 loads.
    waits = [int(n) for i in loop for n in re.findall(r"vmcnt\((\d+)\)", i.text)]
    if not waits or min(waits) < 3:
        found.append(f"it waits until fewer than 3 loads are on their way: {waits}")
    return found


@pytest.mark.parametrize(("triton", "arch"), MATRIX)
def test_loop(triton: str, arch: str) -> None:
    proof = prove(triton, arch, "nvfp4_mfma", execute=False)
    launches = [(case, launch) for case, launch in proof.kernels if launch.kernel == "nvfp4_mfma_kernel"]
    assert {launch.constants["BLOCK_M"] for _, launch in launches} == {16, 32, 64, 128}
    found = {case: problems(arch, launch) for case, launch in launches}
    assert not any(found.values()), "\n".join(f"{case}: {text}" for case, texts in found.items() for text in texts)


@pytest.mark.parametrize(("triton", "arch"), MATRIX)
def test_inline_assembly_keeps_its_distance(triton: str, arch: str) -> None:
    """CDNA wants two other instructions (or s_nop) between the one that writes an operand and the matrix instruction
    that reads it, and more between a matrix instruction and one that writes what were its sums. The compiler counts
    them, except where inline assembly writes: so that writes neither operands nor, ever, accumulation registers, and
    all sums are in these. And subnormals must not be flushed."""
    proof = prove(triton, arch, "nvfp4_mfma", execute=False)
    for case, launch in proof.kernels:
        assert ".amdhsa_float_denorm_mode_16_64 3" in launch.assembly, case
        inline = _written_inline(launch.assembly)
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
