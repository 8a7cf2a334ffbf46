# SPDX-License-Identifier: Apache-2.0
"""Which rows of a matrix come to a tile on Hopper, and which the kernels take them for."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from llm_quant_rocm.kernels import hopper
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


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own functions of the rows of a tile, of numbers of the host."""
    operations = {"minimum": min, "maximum": max, "where": lambda condition, a, b: a if condition else b}
    monkeypatch.setattr(hopper, "gl", SimpleNamespace(**vars(hopper.gl) | operations))
    for name in ("first_row", "row_in_tile"):
        monkeypatch.setattr(hopper, name, getattr(hopper, name).fn)
    monkeypatch.setattr(hopper, "main_rows", hopper.main_part)


@pytest.mark.parametrize("block", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("m", [1, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33, 64, 65, 100, 127, 128, 129, 200, 256, 300, 1000])
def test_a_tile_holds_the_rows_that_it_is_taken_for(on_the_host: None, m: int, block: int) -> None:
    x = torch.empty(m, K, dtype=torch.bfloat16)
    seen = set()
    for tile in range(-(-m // block)):
        for number, row in enumerate(loaded(x, block, hopper.first_row(tile, m, block))):
            taken_for = hopper.row_in_tile(tile, number, m, block)
            assert row == taken_for or (row is None and taken_for >= m)
            # Where a tile is more than half full, or there are several, nothing is beyond the matrix.
            assert row is not None or block < 16 or m <= block // 2
            seen.add(row)
    assert seen >= set(range(m))


@pytest.mark.parametrize(
    ("block", "m"),
    [(192, m) for m in (129, 150, 191, 192, 193, 300, 1000)] + [(320, m) for m in (257, 300, 319, 320, 321, 500, 1000)],
)
def test_a_tile_of_two_accumulators_holds_the_rows_that_it_is_taken_for(on_the_host: None, m: int, block: int) -> None:
    x, box = torch.empty(m, K, dtype=torch.bfloat16), block - hopper.main_part(block)
    seen = set()
    for tile in range(-(-m // block)):
        first, rest = (hopper.row_in_tile(tile, number, m, block) for number in (0, hopper.main_part(block)))
        assert first == hopper.first_row(tile, m, block)
        boxes = [*range(first, first + hopper.main_part(block), box), rest]
        rows = [row for begin in boxes for row in loaded(x, box, begin)]
        assert rows == [hopper.row_in_tile(tile, number, m, block) for number in range(block)]
        seen.update(rows)
    assert seen == set(range(m))
