# SPDX-License-Identifier: Apache-2.0
"""What all tests have in common."""

import sys

import pytest


@pytest.fixture(autouse=True)
def seed() -> None:
    """Random numbers are those of the test, not of the tests before it on the same worker."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
