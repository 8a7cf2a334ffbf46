# SPDX-License-Identifier: Apache-2.0
"""Weights that are quantized as soon as all of their checkpoint tensors have arrived."""

import threading
from typing import Any

import pytest
import torch

from llm_quant_rocm.checkpoint.arriving import ArrivingWeight
from llm_quant_rocm.formats import fp8

ROWS, COLUMNS = 6, 8


class Quantized:
    """Keeps what an ArrivingWeight quantizes, and how often a weight was made for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.made = 0

    def __call__(self, weight: torch.Tensor, amax: torch.Tensor | None) -> None:
        self.calls.append((weight.clone(), None if amax is None else amax.clone()))

    def make(self) -> torch.nn.Parameter:
        self.made += 1
        return torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), requires_grad=False)


def copy(rows: slice, columns: slice = slice(None)) -> Any:
    """An engine's loader, which copies this rank's columns to some rows."""
    return lambda weight, tensor: weight.data[rows].copy_(tensor[..., columns])


def tensor(rows: int, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_the_last_piece_quantizes() -> None:
    done = Quantized()
    weight = ArrivingWeight(done.make, range(2), done)
    assert weight.finish() == [0, 1]
    first, second = tensor(2, seed=1), tensor(4, seed=2)
    weight.load(copy(slice(2, 6)), second, [1], slice(None), "k_proj")
    assert not done.calls
    assert weight.finish() == [0]
    weight.load(copy(slice(0, 2)), first, [0], slice(None), "q_proj")
    ((found, amax),) = done.calls
    assert torch.equal(found, torch.cat([first, second]).bfloat16())
    assert amax is None
    assert weight.is_quantized
    assert done.made == 1
    assert weight.finish() == []
    assert len(done.calls) == 1


def test_one_tensor_may_be_several_pieces() -> None:
    done = Quantized()
    ArrivingWeight(done.make, range(3), done).load(copy(slice(None)), tensor(ROWS), [0, 1, 2], slice(None), "qkv")
    assert len(done.calls) == 1


def test_a_piece_that_comes_again_is_refused() -> None:
    done = Quantized()
    weight = ArrivingWeight(done.make, range(1), done)
    weight.load(copy(slice(None)), tensor(ROWS), [0], slice(None), "o_proj.weight")
    with pytest.raises(ValueError, match=r"^o_proj\.weight is in the checkpoint twice: fetch or export it again$"):
        weight.load(copy(slice(None)), tensor(ROWS), [0], slice(None), "o_proj.weight")


def test_magnitudes_are_those_of_whole_rows_in_the_models_dtype() -> None:
    """1 + 2**-10 is no bf16: the engine's copy makes it 1, and the scale is that of what is served."""
    done = Quantized()
    weight = ArrivingWeight(done.make, range(1), done, whole_columns=2 * COLUMNS)
    whole = tensor(ROWS, 2 * COLUMNS)
    whole[0], whole[0, -1] = 0.0, -(1 + 2**-10)
    whole[1, 0] = torch.nan
    weight.load(copy(slice(None), slice(0, COLUMNS)), whole, [0], slice(None), "o_proj")
    ((found, amax),) = done.calls
    assert torch.equal(found.nan_to_num(9), whole.bfloat16()[:, :COLUMNS].nan_to_num(9))
    assert amax is not None
    assert torch.equal(amax.nan_to_num(9), fp8.row_amax(whole.bfloat16()).nan_to_num(9))
    assert amax[0] == 1.0


def test_experts_magnitudes_go_to_their_rows() -> None:
    done = Quantized()

    def make() -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.zeros(2, ROWS, COLUMNS, dtype=torch.bfloat16), requires_grad=False)

    weight = ArrivingWeight(make, [(0, "w2"), (1, "w2")], done, whole_columns=2 * COLUMNS)
    wholes = [tensor(ROWS, 2 * COLUMNS, seed) for seed in range(2)]
    for expert in (1, 0):

        def load(parameter: torch.nn.Parameter, tensor: torch.Tensor, expert: int = expert) -> None:
            parameter.data[expert].copy_(tensor[:, COLUMNS:])

        weight.load(load, wholes[expert], [(expert, "w2")], expert, "down_proj")
    ((found, amax),) = done.calls
    whole = torch.stack(wholes).bfloat16()
    assert torch.equal(found, whole[..., COLUMNS:])
    assert amax is not None
    assert torch.equal(amax, fp8.row_amax(whole))


def test_what_was_sharded_before_waits_for_the_other_ranks() -> None:
    """Whose maxima are asked for in `finish`, which all ranks call in the same order."""
    done = Quantized()
    weight = ArrivingWeight(done.make, range(1), done, whole_columns=2 * COLUMNS)
    weight.load(copy(slice(None)), tensor(ROWS), [0], slice(None), "o_proj")
    assert not done.calls
    assert weight.finish() == []
    assert done.calls[0][1] is None


def test_pieces_that_nobody_knows_wait_for_the_end() -> None:
    for pieces, piece in ((None, [0]), (range(2), None)):
        done = Quantized()
        weight = ArrivingWeight(done.make, pieces, done)
        assert weight.finish() == ([] if pieces is None else [0, 1])
        weight.load(copy(slice(None)), tensor(ROWS), piece, slice(None), "experts")
        assert not done.calls
        assert weight.finish() == []
        assert len(done.calls) == 1


def test_threads_may_load_at_once() -> None:
    done = Quantized()
    weight = ArrivingWeight(done.make, range(ROWS), done)
    whole, start = tensor(ROWS), threading.Barrier(ROWS)

    def load(row: int) -> None:
        start.wait()
        weight.load(copy(slice(row, row + 1)), whole[row : row + 1], [row], slice(None), str(row))

    threads = [threading.Thread(target=load, args=(row,)) for row in range(ROWS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.made == 1
    assert torch.equal(done.calls[0][0], whole.bfloat16())
