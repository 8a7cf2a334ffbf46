# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operator may run, in which order, and why one was passed over.

An operator's backends stand in one tuple, best first. Each says of a call why it cannot serve it, or nothing. The
first that can serves it; where the shape was measured on this architecture (`tuning`), the measured winner comes
first. A choice is made once for every kind of call and logged once. `LLM_QUANT_ROCM_<OPERATOR>` (for example
`LLM_QUANT_ROCM_PTPC_GEMM=triton`) forces a backend; a call it cannot serve is then an error.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from llm_quant_rocm import environment

logger = logging.getLogger("llm_quant_rocm")


@dataclass(frozen=True)
class Backend:
    """One implementation: its name, why it cannot serve a call (None if it can), and the implementation."""

    name: str
    refusal: Callable[[Any], str | None]
    run: Callable[..., Any]


@dataclass(frozen=True)
class Choice:
    """The backend that serves a kind of call, and the reasons of those passed over before it."""

    backend: Backend
    passed_over: tuple[tuple[str, str], ...]


def forced(operator: str) -> str | None:
    """The backend that the user's environment forces on `operator`, or None."""
    return environment.read(environment.backend_of(operator)) or None


def choose(operator: str, backends: Sequence[Backend], call: Any, first: str | None = None) -> Choice:
    """The backend that serves `call`, `first` (a measured winner) before the others.

    Raises:
        ValueError: LLM_QUANT_ROCM_<OPERATOR> names an unknown backend, or one that cannot serve the call.
        NotImplementedError: no backend can.
    """
    variable, wanted = environment.backend_of(operator), forced(operator)
    names = [backend.name for backend in backends]
    if wanted and wanted not in names:
        raise ValueError(f"{variable}={wanted}: {operator} has the backends {', '.join(names)}")
    candidates = (
        [b for b in backends if b.name == wanted] if wanted else sorted(backends, key=lambda b: b.name != first)
    )
    passed_over: list[tuple[str, str]] = []
    for backend in candidates:
        reason = backend.refusal(call)
        if reason is None:
            _log_once(operator, backend.name, tuple(passed_over))
            return Choice(backend, tuple(passed_over))
        passed_over.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    if wanted:
        raise ValueError(f"{variable}={wanted} cannot serve this call of {operator}: {reasons}")
    raise NotImplementedError(f"no backend can serve this call of {operator}: {reasons}")


@cache
def _log_once(operator: str, name: str, passed_over: tuple[tuple[str, str], ...]) -> None:
    reasons = "".join(f"; passed over {other}: {reason}" for other, reason in passed_over)
    logger.info("%s runs on %s%s", operator, name, reasons)


@cache
def missing(module: str) -> str | None:
    """The reason "MODULE is not installed", or None where it is."""
    return None if find_spec(module) else f"{module} is not installed"
