# SPDX-License-Identifier: Apache-2.0
"""Every kernel on every AMD architecture with every Triton that we support: machine code, results, and the table."""

import importlib
import pkgutil
from itertools import product

import pytest
from triton.runtime.jit import JITFunction

from llm_quant_rocm import kernels
from tests.amd import budget, hazards, isa, operators, table, tritons
from tests.amd.prove import prove

# What takes longest comes first: at the end of a run nobody waits for one worker's last test.
SLOWEST = ("reduce_norm_quant", "quick_reduce", "nvfp4_mfma")
NAMES = sorted(operators.NAMES, key=lambda name: (*SLOWEST, name).index(name))
MATRIX = [
    pytest.param(triton, arch, name, id=f"{arch}-{name}-triton{triton}")
    for name, triton, arch in product(NAMES, reversed(tritons.VERSIONS), budget.LDS)
]
KERNELS = [
    pytest.param(triton, arch, name, kernel, id=f"{arch}-{name}-{kernel}-triton{triton}")
    for name, triton, arch in product(NAMES, reversed(tritons.VERSIONS), budget.LDS)
    for kernel in operators.operator(name).BUDGETS
]
DOCUMENTED = table.read()


def check_table(triton: str, arch: str, kernel: str, found: table.Row) -> None:
    """docs/amd.md says what was found. A Triton that was not out when it was written has no rows there."""
    if triton not in {row[2] for row in DOCUMENTED}:
        return
    row = DOCUMENTED.get((kernel, arch, triton))
    assert row, f"docs/amd.md has no row for {kernel}, {arch}, Triton {triton}: run tools/amd_report.py"
    stale = {column: (row[column], value) for column, value in found.items() if row[column] != value}
    assert not stale, f"docs/amd.md is stale, run tools/amd_report.py: {stale} (documented, found)"


@pytest.mark.parametrize(("triton", "arch", "name"), MATRIX)
def test_numbers(triton: str, arch: str, name: str) -> None:
    """Executed on small and nasty input it gives the reference's numbers, and no variant spills."""
    proof = prove(triton, arch, name, execute=True)
    if proof.failures:
        pytest.fail(proof.report())
    budgets = operators.operator(name).BUDGETS
    launched = [(case, launch) for case, launch in proof.kernels if launch.kernel in budgets]
    assert {launch.kernel for _, launch in launched} == set(budgets)
    for case, launch in launched:
        assembly = isa.read(launch.assembly)
        if found := hazards.around_inline(assembly.instructions, arch):
            pytest.fail(f"{launch.kernel}, {case}:\n{budget.explain(assembly, found)}")
        found = budget.resources(assembly, arch, launch.lds)
        if found and case not in budgets[launch.kernel].may_spill:
            pytest.fail(f"{launch.kernel}, {case}:\n{budget.explain(assembly, found)}")
    for kernel in budgets:
        check_table(triton, arch, kernel, table.executed(proof, kernel))


@pytest.mark.parametrize(("triton", "arch", "name", "kernel"), KERNELS)
def test_machine_code(triton: str, arch: str, name: str, kernel: str) -> None:
    """Every shipped configuration compiles and keeps its budget."""
    proof = prove(triton, arch, name, execute=False)
    if proof.failures:
        pytest.fail(proof.report())
    limits = operators.operator(name).BUDGETS[kernel]
    launches = [(case, launch) for case, launch in proof.kernels if launch.kernel == kernel]
    assert launches, f"no shipped case launches {kernel}"
    failures = []
    for case, launch in launches:
        assembly = isa.read(launch.assembly)
        constants = launch.constants | {"num_warps": launch.warps, "lds": launch.lds}
        found = budget.violations(assembly, arch, launch.lds, limits, constants)
        if found:
            failures.append(f"{kernel}, {case}:\n{budget.explain(assembly, found)}")
    if failures:
        pytest.fail("\n\n".join(failures))
    check_table(triton, arch, kernel, table.machine_code(proof, kernel))


def test_no_kernel_is_left_out() -> None:
    """Each kernel of the library is in the matrix, or among those that are not built for AMD."""
    there = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        names = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        there |= {
            (module.name, name)
            for name, value in names.items()
            if isinstance(value, JITFunction) and name.endswith("_kernel") and value.module.endswith(f".{module.name}")
        }
    elsewhere = {(module, name) for module, name in there if module in operators.NOT_FOR_AMD}
    assert {module for module, _ in elsewhere} == set(operators.NOT_FOR_AMD)
    proven = [kernel for name in operators.NAMES for kernel in operators.operator(name).BUDGETS]
    assert sorted(name for _, name in there - elsewhere) == sorted(proven)


def test_the_table_has_no_other_rows() -> None:
    kernels_, archs = {param.values[3] for param in KERNELS}, set(budget.LDS)
    versions = {triton for _, _, triton in DOCUMENTED}
    assert set(DOCUMENTED) == set(product(kernels_, archs, versions))
