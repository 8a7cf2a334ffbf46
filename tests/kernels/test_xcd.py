# SPDX-License-Identifier: Apache-2.0
"""Which work the programs of a die have. `tests/amd` executes the kernels that ask."""

import pytest

pytest.importorskip("triton")

from llm_quant_rocm.kernels.xcd import neighbours

work_of = neighbours.fn


@pytest.mark.parametrize("xcds", [1, 2, 6, 8])
@pytest.mark.parametrize("programs", [1, 7, 8, 9, 38, 304, 2560, 2563])
def test_all_work_is_done_once_and_that_of_a_die_is_of_neighbours(programs: int, xcds: int) -> None:
    dies = [[work_of(program, programs, xcds) for program in range(xcd, programs, xcds)] for xcd in range(xcds)]
    assert [work for die in dies for work in die] == list(range(programs))


def test_tiles_that_run_together_share_weights_on_their_die() -> None:
    """16 tiles of x and 80 of the weight, x first, on 304 units of eight dies: of the weight each die reads three or
    four tiles, for 38 of the result, where it would read all nineteen."""
    tiles_m, tiles_n, units, xcds = 16, 80, 304, 8
    for xcd in range(xcds):
        programs = range(xcd, units, xcds)
        assert len({work_of(program, tiles_m * tiles_n, xcds) // tiles_m for program in programs}) <= 4
        assert len({program // tiles_m for program in programs}) == 19
