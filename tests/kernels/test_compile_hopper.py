# SPDX-License-Identifier: Apache-2.0
"""Kernels for Hopper compile, keep sums in registers and products in flight, and ask early for what they read."""

import pytest

from tests.amd import isolated, tritons

pytest.importorskip("triton")

from tests.kernels.compile_hopper import CASES, compiled

# Where reading a weight takes the time, its beginning is asked for before the kernel before has ended.
ORDERS = {
    "PTPC, few rows": ["prefetch", "wait", "launch", "load"],
    "PTPC, few rows, tiles of two accumulators": ["prefetch", "wait", "launch", "load"],
    "PTPC, few rows, on Blackwell": ["wait", "launch", "load"],
    **dict.fromkeys((case for case in CASES if case.startswith("few rows")), ["load", "wait", "launch"]),
    "K split in four": ["load", "wait", "launch"],
}


# Bytes of registers, at most, that a kernel saves before and restores after a tile's products. The two accumulators of
# 320 rows leave no room for what is needed then.
SPILLS = {"tiles of two accumulators": 56}


@pytest.mark.parametrize("case", CASES)
def test_no_registers_spill_among_products_and_these_stay_in_flight(case: str) -> None:
    # With the oldest supported Triton, that of the engines that GPUs have today.
    spilled, in_loops, serialized, *order = isolated.call(tritons.OLDEST, compiled, case)
    assert int(spilled) <= SPILLS.get(case, 0)
    assert (in_loops, serialized) == ("0", "False")
    assert order == ORDERS.get(case, order)
