# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/amd.md: every kernel compiled, inspected and executed for AMD. Takes some minutes.

`python tools/amd_report.py`, in the environment that `make venv` makes; with names of operators, for their rows alone.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.amd import budget, operators, table, tritons  # noqa: E402
from tests.amd.prove import prove  # noqa: E402


def rows(triton: str, names: list[str]) -> dict[table.Key, table.Row]:
    """What is found of these operators with one Triton."""
    found: dict[table.Key, table.Row] = {}
    for name, arch in product(names, budget.LDS):
        shipped, executed = (prove(triton, arch, name, execute) for execute in (False, True))
        if shipped.failures or executed.failures:
            raise SystemExit(f"{name} on {arch} with Triton {triton}:\n{shipped.report()}\n\n{executed.report()}")
        for kernel in operators.operator(name).BUDGETS:
            found[kernel, arch, triton] = table.machine_code(shipped, kernel) | table.executed(executed, kernel)
        print(f"{name} on {arch} with Triton {triton}", flush=True)
    return found


def main() -> None:
    missing = [reason for triton in tritons.VERSIONS if (reason := tritons.refusal(triton))]
    if missing:
        sys.exit("\n".join(missing))
    names = sys.argv[1:] or operators.NAMES
    found = table.read() if sys.argv[1:] else {}
    with ProcessPoolExecutor(len(tritons.VERSIONS)) as pool:
        for part in pool.map(partial(rows, names=names), tritons.VERSIONS):
            found |= part
    table.write(dict(sorted(found.items())))
    print(f"wrote {table.PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
