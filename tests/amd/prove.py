# SPDX-License-Identifier: Apache-2.0
"""All cases of one operator on one architecture with one Triton: what they launched, and what went wrong."""

import os
import traceback
from dataclasses import dataclass
from functools import cache

from llm_quant_rocm import hardware
from tests.amd import isolated, operators
from tests.amd.virtual_gpu import Launch, activate


@dataclass(frozen=True)
class Proof:
    """What became of the cases.

    Attributes:
        kernels: every distinct compiled kernel with the name of the first case that launched it, in order.
        cases: by case, the names of the kernels that it launched.
        failures: by case, the traceback of one that failed.
    """

    kernels: list[tuple[str, Launch]]
    cases: dict[str, set[str]]
    failures: dict[str, str]

    def report(self) -> str:
        """The failures, to be read."""
        return "\n\n".join(f"{case}:\n{error}" for case, error in self.failures.items())


@cache
def prove(triton: str, arch: str, operator: str, execute: bool) -> Proof:
    """The operator's `executed` cases, or without `execute` its `shipped` ones.

    Raises:
        isolated.Crashed: the compiler aborted; its last line names the case.
    """
    return isolated.call(triton, _prove, arch, operator, execute)


def _prove(arch: str, name: str, execute: bool) -> Proof:
    os.environ[f"LLM_QUANT_ROCM_{name.upper()}"] = "triton"
    module = operators.operator(name)
    gpu = activate(arch, execute)
    facts = hardware.amd(arch)
    proof = Proof([], {}, {})
    known: set[str] = set()
    for case, run in (module.executed if execute else module.shipped)(facts).items():
        print(f"case: {case}", flush=True)
        before = len(gpu.launches)
        try:
            run()
        except Exception:
            proof.failures[case] = traceback.format_exc()
        proof.cases[case] = {launch.kernel for launch in gpu.launches[before:]}
        for launch in gpu.launches[before:]:
            if launch.digest not in known:
                known.add(launch.digest)
                proof.kernels.append((case, launch))
    return proof
