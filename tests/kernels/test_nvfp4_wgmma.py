# SPDX-License-Identifier: Apache-2.0
"""The order in which Hopper's NVFP4 kernels take tiles, in plain Python: Gluon has no interpreter."""

import inspect
import textwrap
from collections.abc import Callable
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

GROUP = 4


def place() -> Callable[[int, int, int], tuple[int, int]]:
    from llm_quant_rocm.kernels import nvfp4_wgmma

    assert nvfp4_wgmma.GROUP.value == GROUP
    source = textwrap.dedent(inspect.getsource(nvfp4_wgmma.place.fn)).replace("@gluon.jit\n", "")
    names = {"gl": SimpleNamespace(minimum=min), "GROUP": GROUP}
    exec(source, names)
    return names["place"]


@pytest.mark.parametrize("tiles_n", [1, 2, 17, 33])
@pytest.mark.parametrize("tiles_m", [1, 3, 4, 5, 8, 11])
def test_every_tile_once_and_a_few_tiles_of_m_at_a_time(tiles_m: int, tiles_n: int) -> None:
    placed = [place()(tile, tiles_m, tiles_n) for tile in range(tiles_m * tiles_n)]
    assert sorted(placed) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    groups = [m // GROUP for m, _ in placed]
    assert groups == sorted(groups)
    for group in set(groups):
        columns = [n for m, n in placed if m // GROUP == group]
        assert columns == sorted(columns), "programs that run together share a tile of the weight"
