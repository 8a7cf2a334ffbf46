# SPDX-License-Identifier: Apache-2.0
"""The magnitudes of rows whose columns ranks share, where each rank loads in an order of its own."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llm_quant_rocm.checkpoint import whole_rows
from llm_quant_rocm.checkpoint.online import quantize_weight
from llm_quant_rocm.checkpoint.whole_rows import WholeRows
from llm_quant_rocm.formats import fp8
from tests.comm.processes import run_ranks
from tests.inputs import temporaries

ROWS, COLUMNS, RANKS = 6, 8, 2


def checkpoint_tensor(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))


def share(tensor: torch.Tensor, rank: int = 0) -> torch.Tensor:
    return tensor[..., rank * COLUMNS // RANKS :][..., : COLUMNS // RANKS].bfloat16()


@pytest.mark.parametrize("chunk", [1, 2 * COLUMNS, 4 * COLUMNS, 2**25], ids=str)
def test_magnitudes_are_those_of_the_engines_copy(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_rows, "_CHUNK_ELEMENTS", chunk)
    tensor, seen = checkpoint_tensor(1), WholeRows(COLUMNS)
    tensor[0], tensor[0, -1] = 0.0, -(1 + 2**-10)  # no bf16: the copy makes it -1
    tensor[4, 7] = torch.nan
    seen.look_at(share(tensor), tensor, slice(None))
    amax = seen.take()
    assert amax is not None and amax[0] == 1.0 and amax[4].isnan()
    assert torch.equal(amax.nan_to_num(9), fp8.row_amax(tensor.bfloat16()).nan_to_num(9))
    assert seen.take() is None


def test_few_rows_are_copied_to_as_much_memory_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_rows, "_CHUNK_ELEMENTS", 32 * COLUMNS)
    tensor, seen = checkpoint_tensor(1), WholeRows(COLUMNS)
    with temporaries() as sizes:
        seen.look_at(share(tensor), tensor, slice(None))
    assert max(sizes) == 32 * COLUMNS * 2


def test_rows_that_were_not_seen_whole() -> None:
    tensor, seen = checkpoint_tensor(1), WholeRows(COLUMNS)
    weight = share(tensor)
    assert not seen.is_complete
    seen.look_at(weight, tensor[:4], slice(0, 4))
    assert not seen.is_complete
    seen.look_at(weight, share(tensor[4:]), slice(4, 6))
    assert not seen.is_complete
    seen.look_at(weight, tensor[4:], slice(4, 6))
    assert seen.is_complete
    seen.look_at(weight, share(tensor), slice(None))
    assert seen.take() is None


def test_experts_one_by_one_and_all_in_one_tensor() -> None:
    experts = torch.stack([checkpoint_tensor(seed) for seed in range(3)])
    seen = WholeRows(COLUMNS)
    for expert in (2, 0, 1):
        seen.look_at(share(experts), experts[expert], expert)
    found = [seen.take()]
    seen.look_at(share(experts), experts, slice(None))
    found.append(seen.take())
    for amax in found:
        assert amax is not None and torch.equal(amax, fp8.row_amax(experts.bfloat16()))


def test_a_weight_that_is_not_there_is_only_counted() -> None:
    seen, tensor = WholeRows(COLUMNS), checkpoint_tensor(1)
    load = seen.watching(lambda param, loaded_weight: "loaded", lambda tensor: slice(None))
    parameter = torch.nn.Parameter(torch.empty(ROWS, COLUMNS // RANKS, device="meta"))
    assert load(parameter, tensor) == "loaded" and not seen.is_complete
    assert load(torch.nn.Parameter(share(tensor)), tensor) == "loaded" and seen.is_complete


def quantize(seed: int, rank: int, knows: bool) -> torch.Tensor:
    """The scales of a weight, of which this rank has a share."""
    tensor, seen = checkpoint_tensor(seed), WholeRows(COLUMNS)
    if knows:
        seen.look_at(share(tensor, rank), tensor, slice(None))
    name = f"layers.{seed}.weight"
    _, scale = quantize_weight(share(tensor, rank), name, str, dist.group.WORLD, "cpu", seen.take())
    return scale


def in_opposite_orders(rank: int, folder: Path) -> None:
    seeds = (1, 2) if rank == 0 else (2, 1)
    torch.save({seed: quantize(seed, rank, knows=True) for seed in seeds}, folder / f"{rank}.pt")
    with pytest.raises(ValueError, match=rf"^layers\.{rank + 1}\.weight is quantized here while another rank is at "):
        quantize(seeds[0], rank, knows=False)
    torch.save(quantize(3, rank, knows=False), folder / f"{rank}-asked.pt")


def test_ranks_in_different_orders(tmp_path: Path) -> None:
    """Need not ask each other; where they must, they end instead of taking another weight's magnitudes."""
    run_ranks(RANKS, partial(in_opposite_orders, folder=tmp_path))
    for rank in range(RANKS):
        scales = torch.load(tmp_path / f"{rank}.pt") | {3: torch.load(tmp_path / f"{rank}-asked.pt")}
        for seed, scale in scales.items():
            expected = fp8.quantize_rows(checkpoint_tensor(seed).bfloat16(), fp8.OCP)[1]
            assert torch.equal(scale, expected)
