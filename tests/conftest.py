# SPDX-License-Identifier: Apache-2.0
"""What all tests have in common."""

import os
import sys

import pytest

# What commands print is for 80 columns without colours, wherever the tests run. Typer asks when it is imported.
os.environ["COLUMNS"] = "80"
for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TERMINAL_WIDTH", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)

try:
    import hypothesis
except ModuleNotFoundError:  # a GPU machine, which runs tests/gpu alone
    pass
else:
    # Everybody's run tries the same examples, however slow the machine. `--hypothesis-profile default` tries new ones.
    hypothesis.settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Random numbers are those of the test, not of the tests before it on the same worker."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
