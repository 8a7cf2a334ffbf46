# SPDX-License-Identifier: Apache-2.0
"""The routing kernels on a GPU: every nasty routing, as many tokens as there may be, and in a graph."""

import pytest
import torch

from llm_quant_rocm import hardware
from tests.routing_inputs import Routing, check_scatter, check_schedule, check_sum, random_ids, routings
from tests.routing_inputs import kernels as routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def device() -> hardware.Hardware:
    return hardware.detect(torch.device("cuda"))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("many_reads", [routing.MANY_READS, 0], ids=["one launch", "two launches"])
@pytest.mark.parametrize("name", routings())
def test_nasty_routings(name: str, many_reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MANY_READS", many_reads)
    check_schedule(routings()[name], device(), "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", routings())
def test_sums(name: str, dtype: torch.dtype) -> None:
    check_sum(routings()[name], device(), "cuda", dtype)


def test_rows_at_their_slots() -> None:
    check_scatter(device(), "cuda")


def sorted_by_torch(given: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_map, tile_expert) without the spare tiles, for as many slots as plain Python has no patience for."""
    ids = given.topk_ids.flatten().cuda()
    order, row_map, tile_expert = ids.argsort(stable=True), [], []
    for expert, slots in enumerate(order.split(ids.bincount(minlength=given.experts).tolist())):
        tiles = -(-len(slots) // given.block_m)
        row_map.append(torch.nn.functional.pad(slots, (0, tiles * given.block_m - len(slots)), value=-1))
        tile_expert += [expert] * tiles
    return torch.cat(row_map).int(), torch.tensor(tile_expert, dtype=torch.int32, device="cuda")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "one expert has most"])
@pytest.mark.parametrize("experts", [8, 128, 256])
@pytest.mark.parametrize("tokens", [127, 128, 511, 512, 2049, 4096, 65536])
def test_many_tokens(tokens: int, experts: int, skewed: bool) -> None:
    ids = random_ids(tokens, 8, experts)
    if skewed:
        ids[: tokens * 7 // 8] = 5
    check_many(Routing(ids, None, experts, 128))


@pytest.mark.usefixtures("poisoned")
def test_counts_beyond_16_bits() -> None:
    """More slots than parts of 2^15 can hold, nearly all of one expert."""
    ids = torch.full((2**22 + 100, 1), 2, dtype=torch.int32)
    ids[::1000] = 1
    check_many(Routing(ids, None, 4, 128))


def check_many(given: Routing) -> None:
    found = routing.schedule(given.topk_ids.cuda(), None, given.experts, given.block_m, device())
    row_map, tile_expert = sorted_by_torch(given)
    assert torch.equal(found.row_map[: len(row_map)], row_map)
    assert torch.equal(found.tile_expert[: len(tile_expert)], tile_expert)
    assert (found.row_map[len(row_map) :] == -1).all()
    assert (found.tile_expert[len(tile_expert) :] == -1).all()
    assert found.tile_count.tolist() == [len(tile_expert)]
    rows = (row_map >= 0).nonzero().flatten()
    assert torch.equal(found.slot_row[row_map[rows].long()].long(), rows)


@pytest.mark.parametrize("tokens", [16, 1024])
def test_in_a_graph_with_new_ids(tokens: int) -> None:
    ids = random_ids(tokens, 8, 64).cuda()
    routing.schedule(ids, None, 64, 16, device())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = routing.schedule(ids, None, 64, 16, device())
    for seed in (1, 2):
        ids.copy_(random_ids(tokens, 8, 64, seed))
        graph.replay()
        expected = routing.schedule(ids, None, 64, 16, device())
        assert torch.equal(found.row_map, expected.row_map)
        assert torch.equal(found.tile_expert, expected.tile_expert)
        assert torch.equal(found.slot_row, expected.slot_row)
