# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for AMD, inspected and executed, without an AMD GPU: docs/amd.md."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # where gcnsim lives, a package of its own
pytest.importorskip("triton", reason="needs Triton")
