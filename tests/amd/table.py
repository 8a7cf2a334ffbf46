# SPDX-License-Identifier: Apache-2.0
"""The table of docs/amd.md: what was found of every kernel on every architecture with every Triton."""

from collections.abc import Iterable
from pathlib import Path

from tests.amd import isa
from tests.amd.prove import Proof

PAGE = Path(__file__).parents[2] / "docs" / "amd.md"
BEGIN = "<!-- The table below is written by tools/amd_report.py and checked by tests/amd/test_matrix.py. -->"
END = "<!-- End of the table. -->"
KEYS = ("Kernel", "GPU", "Triton")
FOUND = ("Compiled", "Registers", "Spilled", "LDS", "Matrix instructions", "Instructions", "Executed")

Key = tuple[str, str, str]  # kernel, architecture, Triton version
Row = dict[str, str]  # by column of FOUND


def machine_code(proof: Proof, kernel: str) -> Row:
    """The columns about the machine code of `kernel`, over all variants of the shipped cases."""
    launches = [launch for _, launch in proof.kernels if launch.kernel == kernel]
    assemblies = [isa.read(launch.assembly) for launch in launches]
    loops = [assembly.hot_loop for assembly in assemblies]
    counts = [isa.count(loop.instructions) for loop in loops if loop]
    opcodes = sorted({name for count in counts for name in count if name.startswith("matrix ")})
    matrix = [f"{_range(c[name] for c in counts if c[name])} `{name.removeprefix('matrix ')}`" for name in opcodes]
    spilled = [a.resources["vgpr_spill_count"] + a.resources["sgpr_spill_count"] for a in assemblies]
    return {
        "Compiled": str(len(launches)),
        "Registers": _range(assembly.resources["vgpr_count"] for assembly in assemblies),
        "Spilled": _range(spilled),
        "LDS": _range(launch.lds for launch in launches),
        "Matrix instructions": ", ".join(matrix) or "none",
        "Instructions": f"{_range(len(loop.instructions) for loop in loops if loop)} a loop"
        if counts
        else f"{_range(len(assembly.instructions) for assembly in assemblies)}, no loop",
    }


def executed(proof: Proof, kernel: str) -> Row:
    """The column about what was executed: the variants of `kernel`, and the cases they ran in, all of which passed."""
    variants = sum(launch.kernel == kernel for _, launch in proof.kernels)
    cases = sum(kernel in kernels for kernels in proof.cases.values())
    return {"Executed": f"{variants} in {cases} cases"}


def _range(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(rows: dict[Key, Row]) -> None:
    """Puts the table of `rows` into the page."""
    lines = [_line((*KEYS, *FOUND)), _line("---" for _ in (*KEYS, *FOUND))]
    for (kernel, arch, triton), row in rows.items():
        lines.append(_line((f"`{kernel}`", arch, triton, *(row[column] for column in FOUND))))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")


def read() -> dict[Key, Row]:
    """The table as it stands in the page."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    found: dict[Key, Row] = {}
    for line in lines:
        kernel, arch, triton, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[kernel.strip("`"), arch, triton] = dict(zip(FOUND, cells, strict=True))
    return found
