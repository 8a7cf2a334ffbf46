# SPDX-License-Identifier: Apache-2.0
"""Which rows of a matrix come to a tile on Hopper, and which the kernels take them for."""

import pytest
import torch

pytest.importorskip("triton")

from llm_quant_rocm.kernels.hopper import row_descriptor

K = 512


def loaded(x: torch.Tensor, block: int, first: int) -> list[int | None]:
    """Which rows the accelerator reads for a tile that begins at row `first`; None where it fills in zeros."""
    descriptor = row_descriptor(x, block)
    halves, half, _ = descriptor.block_shape
    inside = [[g < descriptor.shape[0] and first + r < descriptor.shape[1] for r in range(half)] for g in range(halves)]
    offsets = [
        [g * descriptor.strides[0] + (first + r) * descriptor.strides[1] for r in range(half)] for g in range(halves)
    ]
    return [
        offset // K if there else None
        for theirs, there_row in zip(offsets, inside, strict=True)
        for offset, there in zip(theirs, there_row, strict=True)
    ]


@pytest.mark.parametrize("block", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("m", [1, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33, 64, 65, 100, 127, 128, 129, 200, 256, 300, 1000])
def test_a_tile_holds_the_rows_that_it_is_taken_for(m: int, block: int) -> None:
    """As `first_row` and `row_in_tile` compute them."""
    x = torch.empty(m, K, dtype=torch.bfloat16)
    seen = set()
    for tile in range(-(-m // block)):
        first = max(min(tile * block, m - block), 0)
        folded = block >= 16 and m > block // 2
        for number, row in enumerate(loaded(x, block, first)):
            taken_for = first + number + (min(m - block, 0) if folded and number >= block // 2 else 0)
            assert row == taken_for or (row is None and taken_for >= m)
            # Where a tile is more than half full, or there are several, nothing is beyond the matrix.
            assert row is not None or not folded
            seen.add(row)
    assert seen >= set(range(m))
