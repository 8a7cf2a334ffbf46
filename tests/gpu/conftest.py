# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the GPU tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch.empty returns is filled with NaN (float) or the largest integer."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
