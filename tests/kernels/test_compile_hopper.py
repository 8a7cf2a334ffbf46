# SPDX-License-Identifier: Apache-2.0
"""The kernels in Gluon compile for Hopper, and keep sums in registers and products in flight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.amd import tritons

pytest.importorskip("triton")

from tests.kernels.compile_hopper import CASES


@pytest.mark.parametrize("case", CASES)
def test_no_registers_spill_and_products_stay_in_flight(case: str) -> None:
    """With the Triton of the engines that GPUs have today, which is the oldest supported one."""
    root = Path(__file__).parent.parent.parent
    path = [*tritons.search_path(tritons.OLDEST), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_hopper", case],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.split() == ["0", "False"], found.stdout + found.stderr
