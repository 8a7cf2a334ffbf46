# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce on AMD: planted defects are found, and its order of memory is in the machine code."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import gcnsim
import pytest
import torch
import triton
import triton.language as tl
from gcnsim.scheduler import Execution

from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.kernels import quick_reduce
from tests.amd import isa, tritons
from tests.amd.budget import LDS
from tests.amd.isolated import call
from tests.amd.operators.quick_reduce import BUFFER, SMALL, Ranks, check, draw, stores_awaited
from tests.amd.virtual_gpu import activate
from tests.inputs import random_rows


@triton.jit
def set_no_flags(
    to, peers_ptr, PHASE: tl.constexpr, tile, rank, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr
):  # fmt: skip
    pass


@triton.jit
def set_flags_at_once(
    to, peers_ptr, PHASE: tl.constexpr, tile, rank, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr
):  # fmt: skip
    """Awaits none of the stores of other waves."""
    place = quick_reduce.flags(PHASE, tile, phase_bytes, max_tiles, WORLD) + rank * quick_reduce.FLAG_BYTES
    peer = tl.arange(0, quick_reduce._power_of_2(WORLD))
    flag = tl.load(peers_ptr + peer, mask=peer < WORLD, other=0) + place
    told = (peer < WORLD) & (patience >= 0)
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), call, mask=told, sem="release", scope="sys")


@triton.jit
def await_no_flags(
    mine, state_ptr, report_ptr, PHASE: tl.constexpr, tile, call, patience, phase_bytes, max_tiles,
    WORLD: tl.constexpr, AT_ONCE: tl.constexpr = False
):  # fmt: skip
    return patience


@contextmanager
def stalls(seed: int) -> Iterator[None]:
    """Programs run by turns of very different length, so that each is held up anywhere in the middle of its work."""
    draw, turn = random.Random(seed), Execution.turn
    with patch.object(Execution, "turn", lambda execution, limit: turn(execution, draw.choice((1, 40, 3000)))):
        yield


def two_ranks(arch: str, planted: dict[str, str], execute: bool) -> str:
    """One call of two ranks with functions of the kernel replaced; returns its assembly."""
    gpu = activate(arch, execute)
    ranks = Ranks(2)
    patience = partial(gcnsim.run, max_idle_runs=20_000)
    with ExitStack() as replaced:
        replaced.enter_context(patch.object(gcnsim, "run", patience))
        for name, function in planted.items():
            replaced.enter_context(patch.object(quick_reduce, name, globals()[function]))
        if execute:
            replaced.enter_context(stalls(0))
            ranks.call(quick_reduce.two_shot, draw(2, 4 * BUFFER - 384, torch.bfloat16), CODECS["FP"])
        else:
            ranks.launch(quick_reduce.two_shot, draw(1, 4 * BUFFER - 384, torch.bfloat16), CODECS["FP"])
    return gpu.launches[-1].assembly


def test_a_flag_that_is_not_set_is_a_deadlock() -> None:
    with pytest.raises(gcnsim.Deadlock, match="quick_reduce.py:"):
        call(tritons.VERSIONS[-1], two_ranks, "gfx942", {"set_flags": "set_no_flags"}, True)


def test_a_flag_that_is_not_awaited_gives_wrong_results() -> None:
    with pytest.raises(AssertionError):
        call(tritons.VERSIONS[-1], two_ranks, "gfx942", {"await_flags": "await_no_flags"}, True)


ONE_PROGRAM = replace(SMALL, programs=1)


def ranks_that_stall(shot: str, slots: int, seed: int) -> None:
    """One call of two ranks that stall; one program of each takes nine tiles, and so every slot twice."""
    activate("gfx942")
    ranks = Ranks(2)
    count = 9 * BUFFER * (2 if shot == "two_shot" else 1)
    inputs = [random_rows(count // 64, 64, torch.bfloat16, seed * 10 + rank).flatten() for rank in range(2)]
    with patch.object(quick_reduce, "SLOTS", tl.constexpr(slots)), stalls(seed):
        ranks.call(getattr(quick_reduce, shot), inputs, CODECS["FP4"], config=ONE_PROGRAM)


@pytest.mark.parametrize("shot", ["two_shot", "one_shot"])
def test_ranks_that_stall_in_the_middle_of_a_call(shot: str) -> None:
    call(tritons.VERSIONS[-1], ranks_that_stall, shot, quick_reduce.SLOTS.value, 0)


@pytest.mark.parametrize(("shot", "slots"), [("two_shot", 2), ("one_shot", 3)])
def test_too_few_slots_are_found_when_ranks_stall(shot: str, slots: int) -> None:
    """One fewer than the protocol needs: the two-shot 3, the one-shot 4."""
    with pytest.raises(AssertionError):
        for seed in range(3):
            call(tritons.VERSIONS[-1], ranks_that_stall, shot, slots, seed)


@triton.jit
def inbox_of_one_half(call, PHASE: tl.constexpr, tile, source, phase_bytes, PIECE_BYTES, WORLD: tl.constexpr):
    """That of every other call, in every call."""
    return (call * 0 + PHASE).to(tl.int64) * phase_bytes + (tile * WORLD + source).to(tl.int64) * PIECE_BYTES


def calls_that_stall(planted: bool, seed: int) -> None:
    """Four calls of two ranks that stall: one sends the next call's pieces while the other has not read this one's."""
    activate("gfx942")
    ranks = Ranks(2)
    calls = [[random_rows(BUFFER // 64, 64, torch.bfloat16, 2 * number + rank).flatten() for rank in range(2)]
             for number in range(4)]  # fmt: skip
    with ExitStack() as replaced:
        if planted:
            replaced.enter_context(patch.object(quick_reduce, "inbox", inbox_of_one_half))
        replaced.enter_context(stalls(seed))
        with ranks.gpu.together():
            found = [ranks.launch(quick_reduce.one_shot, inputs, CODECS["FP4"], ONE_PROGRAM) for inputs in calls]
    for inputs, outs in zip(calls, found, strict=True):
        check(quick_reduce.one_shot, inputs, outs, CODECS["FP4"])


@pytest.mark.parametrize("seed", range(3))
def test_calls_of_ranks_that_stall(seed: int) -> None:
    call(tritons.VERSIONS[-1], calls_that_stall, False, seed)


def test_calls_that_share_an_inbox_are_found_when_ranks_stall() -> None:
    with pytest.raises(AssertionError):
        for seed in range(3):
            call(tritons.VERSIONS[-1], calls_that_stall, True, seed)


@pytest.mark.parametrize("triton", tritons.VERSIONS)
@pytest.mark.parametrize("arch", list(LDS))
def test_a_flag_that_outruns_the_stores_of_other_waves_is_found(arch: str, triton: str) -> None:
    """gcnsim would not see it: to it every store is there at once."""
    right = isa.read(call(triton, two_ranks, arch, {}, False))
    assert stores_awaited(right, arch, {}) == []
    wrong = isa.read(call(triton, two_ranks, arch, {"set_flags": "set_flags_at_once"}, False))
    assert len(stores_awaited(wrong, arch, {})) == 2
