# SPDX-License-Identifier: Apache-2.0
"""Every kernel on every AMD architecture with every Triton that we support: machine code and results."""

from itertools import product

import pytest

from tests.amd import budget, isa, operators, tritons
from tests.amd.prove import Proof, prove

MATRIX = [
    pytest.param(triton, arch, name, id=f"{arch}-{name}-triton{triton}")
    for triton, arch, name in product(tritons.VERSIONS, budget.LDS, operators.NAMES)
]


def report(proof: Proof) -> str:
    return "\n\n".join(f"{case}:\n{error}" for case, error in proof.failures.items())


@pytest.mark.parametrize(("triton", "arch", "name"), MATRIX)
def test_machine_code(triton: str, arch: str, name: str) -> None:
    """Every shipped configuration compiles and keeps its budget."""
    proof = prove(triton, arch, name, execute=False)
    assert not proof.failures, report(proof)
    budgets = operators.operator(name).BUDGETS
    assert {launch.kernel for _, launch in proof.kernels} == set(budgets)
    failures = []
    for case, launch in proof.kernels:
        assembly = isa.read(launch.assembly)
        found = budget.violations(assembly, arch, launch.lds, budgets[launch.kernel])
        if found:
            failures.append(f"{launch.kernel}, {case}:\n{budget.explain(assembly, found)}")
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize(("triton", "arch", "name"), MATRIX)
def test_numbers(triton: str, arch: str, name: str) -> None:
    """Executed on small and nasty input it gives the reference's numbers, and no variant spills."""
    proof = prove(triton, arch, name, execute=True)
    assert not proof.failures, report(proof)
    assert {launch.kernel for _, launch in proof.kernels} == set(operators.operator(name).BUDGETS)
    for case, launch in proof.kernels:
        assembly = isa.read(launch.assembly)
        found = budget.resources(assembly, arch, launch.lds)
        assert not found, f"{launch.kernel}, {case}:\n{budget.explain(assembly, found)}"
