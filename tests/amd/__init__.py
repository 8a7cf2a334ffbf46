# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for AMD, inspected and executed, without an AMD GPU: docs/amd.md."""

import pytest

pytest.importorskip("triton", reason="needs Triton")
