# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the GPU tests."""

import os
from collections.abc import Iterator

import pytest
import torch

# Before CUDA begins: streams that share a queue would wait for each other where they must run at once.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch.empty returns is filled with NaN (float) or the largest integer."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
