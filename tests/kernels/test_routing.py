# SPDX-License-Identifier: Apache-2.0
"""The bound on tiles against every routing there is, and what the routing's own oracle says."""

from itertools import product

import pytest
import torch

from llm_quant_rocm.hardware import CPU
from llm_quant_rocm.kernels import routing
from llm_quant_rocm.kernels.routing import max_tiles, schedule, sum_rows
from tests.routing_inputs import Routing, expected, routings


@pytest.mark.parametrize("block_m", [1, 2, 3, 4])
@pytest.mark.parametrize("experts", [1, 2, 3, 5])
def test_the_bound_on_tiles_is_exact(experts: int, block_m: int) -> None:
    most = [0] * 13
    for counts in product(range(13), repeat=experts):
        slots = sum(counts)
        if slots < 13:
            most[slots] = max(most[slots], sum(-(-count // block_m) for count in counts))
    assert [max_tiles(slots, experts, block_m) for slots in range(13)] == most


def test_the_oracle() -> None:
    """Two experts of five here, tiles of two rows, by hand; and a routing that needs every tile of the bound."""
    given = Routing(torch.tensor([[4, 1], [1, 0], [-1, 1]]), torch.tensor([-1, 0, -1, -1, 1]), 2, 2)
    assert expected(given, 4) == ([1, 2, 5, -1, 0, -1, -1, -1], [0, 0, 1, -1])
    fullest = routings()["the most tiles there can be"]
    tiles = max_tiles(fullest.topk_ids.numel(), fullest.experts, fullest.block_m)
    assert -1 not in expected(fullest, tiles)[1]


def test_no_token() -> None:
    ids = torch.empty(0, 8, dtype=torch.int32)
    found = schedule(ids, None, 4, 16, CPU, torch.empty(0, 8))
    assert found.row_map.shape == found.tile_expert.shape == (0,)
    assert found.slot_row.shape == (0,)
    assert found.row_weight is not None and found.row_weight.shape == (0,)
    assert sum_rows(torch.empty(0, 64), found.slot_row, 8, CPU, in_tiles=False).shape == (0, 64)


def test_what_the_first_of_two_launches_counted_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantization of x may run beside the second launch, which reads it: memory of its own, for as long as the
    schedule is there."""
    read = []
    launches = {"count": lambda *given: read.append(given[-2]), "place": lambda *given: read.append(given[4])}
    plan = routing._Plan(tiles=2, counts=8, counts_dtype=torch.int32, **launches)
    monkeypatch.setattr(routing, "_plan", lambda *args: plan)
    found = schedule(torch.zeros(4, 2, dtype=torch.int32), None, 4, 16, CPU, torch.zeros(4, 2))
    assert found.counts is not None and [counts is found.counts for counts in read] == [True, True]
