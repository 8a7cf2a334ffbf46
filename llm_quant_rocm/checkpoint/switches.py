# SPDX-License-Identifier: Apache-2.0
"""Environment variables that switch a part of a plugin off."""

import os


def switched_on(variable: str) -> bool:
    """Whether `variable` is 1, which it is where it is not set.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    switch = os.environ.get(variable, "1")
    if switch not in ("0", "1"):
        raise ValueError(f"{variable} is 0 or 1, not {switch!r}")
    return switch == "1"
