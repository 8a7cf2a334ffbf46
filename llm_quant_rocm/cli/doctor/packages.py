# SPDX-License-Identifier: Apache-2.0
"""The packages that this one works with: their versions, and whether those are supported and tested."""

import platform
from dataclasses import dataclass

from llm_quant_rocm import __version__
from llm_quant_rocm.cli.doctor.table import Part, Problem
from llm_quant_rocm.versions import DISTRIBUTIONS, SUPPORTED, installed


@dataclass(frozen=True)
class Package:
    """One package; `verdict` says in words whether its version will do."""

    package: str
    version: str | None
    verdict: str
    supported: str
    tested: list[str]


def examine(gpu: bool) -> Part:
    """The packages, where `gpu` says whether kernels are to run."""
    found = {"python": platform.python_version()} | {name: installed(name) for name in DISTRIBUTIONS}
    rows = [_row(package, number) for package, number in found.items()]
    problems = [
        Problem(
            f"{row.package} {row.version} is not supported: llm-quant-rocm {__version__} supports {row.supported}",
            _cure(row.package),
        )
        for row in rows
        if row.verdict == _NOT_SUPPORTED and row.package in DISTRIBUTIONS
    ]
    if gpu and found["triton"] is None:
        problems.append(
            Problem(
                "triton is not installed, and the kernels for this GPU need it", "install torch's build for the GPU"
            )
        )
    notes = [f"llm-quant-rocm {__version__}"]
    if found["vllm"] is None and found["sglang"] is None:
        notes.append("no engine is installed: the operators work, and nothing serves models")
    return Part("packages", "Packages", rows, notes, problems)


_NOT_SUPPORTED = "not supported"


def _row(package: str, number: str | None) -> Package:
    known = SUPPORTED.get(package)
    if number is None:
        verdict = "not installed"
    elif known is None:
        verdict = "any version"
    elif not known.holds(number):
        verdict = _NOT_SUPPORTED
    else:
        verdict = "tested" if known.was_tested(number) else "supported, not tested"
    return Package(package, number, verdict, str(known) if known else "", list(known.tested) if known else [])


def _cure(package: str) -> str:
    known = SUPPORTED[package]
    if package in ("torch", "triton"):  # pip's choice of a build may be for another GPU
        return f"install torch's build for this machine with {package} {known}"
    return f"pip install '{DISTRIBUTIONS[package][0]}>={known.first},<{known.end}'"
