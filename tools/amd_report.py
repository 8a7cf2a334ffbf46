# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/amd.md: every kernel compiled, inspected and executed for AMD. Takes some minutes.

`python tools/amd_report.py`, in the environment that `make venv` makes.
"""

import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.amd import budget, operators, table, tritons  # noqa: E402
from tests.amd.prove import prove  # noqa: E402


def main() -> None:
    missing = [reason for triton in tritons.VERSIONS if (reason := tritons.refusal(triton))]
    if missing:
        sys.exit("\n".join(missing))
    rows: dict[table.Key, table.Row] = {}
    for name, arch, triton in product(operators.NAMES, budget.LDS, tritons.VERSIONS):
        print(f"{name} on {arch} with Triton {triton}", flush=True)
        shipped, executed = (prove(triton, arch, name, execute) for execute in (False, True))
        if shipped.failures or executed.failures:
            sys.exit(f"{shipped.report()}\n\n{executed.report()}")
        for kernel in operators.operator(name).BUDGETS:
            rows[kernel, arch, triton] = table.machine_code(shipped, kernel) | table.executed(executed, kernel)
    table.write(dict(sorted(rows.items())))
    print(f"wrote {table.PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
