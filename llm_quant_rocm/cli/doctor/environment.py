# SPDX-License-Identifier: Apache-2.0
"""The environment variables that the package obeys, and what they are set to."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from llm_quant_rocm.cli.doctor.table import Part, Problem, heading
from llm_quant_rocm.environment import OURS, QUICK_REDUCE, SGLANG_QUICK_REDUCE, VARIABLES


@dataclass(frozen=True)
class Setting:
    """A variable and its value, None where it is unset."""

    variable: str
    value: str | None = field(metadata=heading("set to"))
    default: str
    meaning: str


def examine(environment: Mapping[str, str] = os.environ, said: Sequence[str] = ()) -> Part:
    """Every variable of `llm_quant_rocm.environment`, and those set by a name that nothing reads.

    Args:
        said: what other parts found that would not work; a value that one of them refuses is not refused again.
    """
    rows = [
        Setting(variable.name, environment.get(variable.name), variable.default, variable.meaning)
        for variable in VARIABLES.values()
    ]
    problems = [
        Problem(reason, "set it to one of them, or unset it")
        for row in rows
        if row.value and (reason := VARIABLES[row.variable].refusal(row.value))
        if not any(what.startswith(f"{row.variable}={row.value}") for what in said)
    ]
    for name in sorted(set(environment) - set(VARIABLES)):
        theirs = name.startswith((QUICK_REDUCE, SGLANG_QUICK_REDUCE))  # engines may have more of these
        near = get_close_matches(name, VARIABLES, 1, 0.95 if theirs else 0.6)
        if name.startswith(OURS) or (theirs and near):
            cure = f"write {near[0]}" if near else "unset it"
            problems.append(Problem(f"{name} is set, and nothing reads it", cure))
    return Part("environment", "Environment", rows, (), problems)
