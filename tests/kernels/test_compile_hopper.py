# SPDX-License-Identifier: Apache-2.0
"""Kernels for Hopper compile, keep sums in registers and products in flight, and ask early for what they read."""

import pytest

from tests.amd import isolated, tritons

pytest.importorskip("triton")

from tests.kernels.compile_hopper import CASES, compiled

# The weight, unlike x, may be asked for before the kernel before has ended: in the L2 cache, or so many of its tensors.
EARLY = {
    "PTPC, few rows of experts": ("False", "1", "False"),
    "PTPC, few rows, on Blackwell": ("False", "0", "False"),
    "PTPC, few rows": ("True", "0", "False"),
    "PTPC, experts": ("False", "1", "False"),
    "PTPC": ("False", "0", "False"),
    "norm": ("False", "0", "False"),
    "FP8, a weight expanded": ("False", "0", "False"),  # it comes by plain loads
    "": ("False", "2", "False"),  # NVFP4: codes and block scales
}


# Bytes of registers, at most, that a kernel saves before and restores after a tile's products. The two accumulators of
# 320 rows, and in FP8 of 288, leave no room for what is needed then, and those of 128 by 128 none for a few addresses
# of what a cluster exchanges.
SPILLS = {
    "tiles of two accumulators": 24,
    "FP8, tiles of 288 rows": 32,
    "K split, a cluster, tiles of 128 x 128": 16,
}
# Permutations of bytes for a product, at most: of each word of eight codes, one or in FP8 two in a lane, decoding has
# 1 or 5. LLVM adds more where it takes decoded words apart.
PERMUTATIONS = {False: 1, True: 10}
# How many consumers decode their first step before they wait for x: those of the stages whose weight is asked for
# early, of each 64 rows of the weight; none of programs that may have several tiles. Those who multiply one after the
# other have decoded every step before they wait for their turn, which is counted once more.
DECODED_BEFORE_X = {
    "K split in four": 2,
    "K split in two": 2,
    "K split, tiles of two accumulators": 2,
    "K split, two consumers": 2 + 2,
    "K split, two consumers sharing tiles": 0 + 2,
    "K split, a cluster, tiles of 128 x 128": 2,
    "K split, a cluster with two consumers": 2 + 2,
}


@pytest.mark.parametrize("case", CASES)
def test_products_stay_in_flight_and_the_weight_alone_is_asked_for_early(case: str) -> None:
    # No registers spill among products. With the oldest supported Triton, that of the engines that GPUs have today.
    found = isolated.call(tritons.OLDEST, compiled, case)
    spilled, in_loops, permutations, waits, decoded, shared, serialized, *early = found
    assert int(spilled) <= SPILLS.get(case, 0)
    # What a multiprocessor has for one program, or for two, each of which takes 1 KiB more.
    two = "two consumers" in case or (" 8 rows" in case and not case.endswith("one program"))
    assert int(shared) <= (113 if two else 227) * 1024
    assert (in_loops, serialized) == ("0", "False")
    if not case.startswith("PTPC"):
        assert float(permutations) <= PERMUTATIONS["FP8" in case]
    if case.endswith("tiles of few rows of the weight"):
        # Four products a step. Of the ring's stages, an odd number, each consumer waits for the other's, too.
        assert float(waits) == 2 / 4
    if " 8 rows" in case and case.startswith("K split"):
        # One for a step of 128 columns, or of 256.
        assert float(waits) == (1 / 16 if "long steps" in case else 1 / 8)
    if case.startswith("K split"):
        assert int(decoded) == DECODED_BEFORE_X.get(case, 0)
    assert tuple(early) == next(EARLY[kind] for kind in EARLY if case.startswith(kind))
