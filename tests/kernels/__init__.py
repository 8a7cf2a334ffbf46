# SPDX-License-Identifier: Apache-2.0
"""Kernels without a GPU, in Triton's interpreter."""

import pytest

pytest.importorskip("triton", reason="needs Triton")
