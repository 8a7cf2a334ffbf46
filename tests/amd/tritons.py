# SPDX-License-Identifier: Apache-2.0
"""The Triton versions that AMD code is compiled with: the environment's own, and the oldest that we support."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

OLDEST = "3.6.0"
# `make venv` unpacks it here; OLDEST_TRITON_FOLDER names another one.
OLDEST_FOLDER = Path(os.environ.get("OLDEST_TRITON_FOLDER", Path(sys.prefix) / f"triton-{OLDEST}"))

try:
    NEWEST: str | None = version("triton")
except PackageNotFoundError:
    NEWEST = None

VERSIONS = [OLDEST] + [NEWEST] * (NEWEST not in (None, OLDEST))


def refusal(triton: str) -> str | None:
    """Why nothing can be compiled with this version here."""
    if triton == NEWEST or (OLDEST_FOLDER / "triton" / "__init__.py").is_file():
        return None
    return f"Triton {triton} is not at {OLDEST_FOLDER}; `make venv` puts it there where pip has one for this Python"


def search_path(triton: str) -> list[str]:
    """What must stand before sys.path for `import triton` to find this version."""
    reason = refusal(triton)
    if reason:
        pytest.skip(reason)
    return [] if triton == NEWEST else [str(OLDEST_FOLDER)]
