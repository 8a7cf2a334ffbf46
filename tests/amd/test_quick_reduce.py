# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce on AMD: planted defects are found, and its order of memory is in the machine code."""

from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import gcnsim
import pytest
import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.kernels import quick_reduce
from tests.amd import isa, tritons
from tests.amd.budget import LDS
from tests.amd.isolated import call
from tests.amd.operators.quick_reduce import Ranks, draw, stores_awaited
from tests.amd.virtual_gpu import activate


@triton.jit
def set_no_flags(
    peers_ptr, PHASE: tl.constexpr, tile, rank, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr
):  # fmt: skip
    pass


@triton.jit
def set_flags_at_once(
    peers_ptr, PHASE: tl.constexpr, tile, rank, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr
):  # fmt: skip
    """Awaits none of the stores of other waves."""
    place = quick_reduce.flags(PHASE, tile, phase_bytes, max_tiles, WORLD) + rank * quick_reduce.FLAG_BYTES
    peer = tl.arange(0, triton.next_power_of_2(WORLD))
    flag = tl.load(peers_ptr + peer, mask=peer < WORLD, other=0) + place
    told = (peer < WORLD) & (patience >= 0)
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), call, mask=told, sem="release", scope="sys")


@triton.jit
def await_no_flags(
    mine, state_ptr, report_ptr, PHASE: tl.constexpr, tile, call, patience, phase_bytes, max_tiles,
    WORLD: tl.constexpr, AT_ONCE: tl.constexpr = False
):  # fmt: skip
    return patience


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
            ranks.call(quick_reduce.two_shot, draw(2, 2000, torch.bfloat16), CODECS["INT4"])
        else:
            ranks.launch(quick_reduce.two_shot, draw(1, 2000, torch.bfloat16), CODECS["INT4"])
    return gpu.launches[-1].assembly


def test_a_flag_that_is_not_set_is_a_deadlock() -> None:
    with pytest.raises(gcnsim.Deadlock, match="quick_reduce.py:"):
        call(tritons.VERSIONS[-1], two_ranks, "gfx942", {"set_flags": "set_no_flags"}, True)


def test_a_flag_that_is_not_awaited_gives_wrong_results() -> None:
    with pytest.raises(AssertionError):
        call(tritons.VERSIONS[-1], two_ranks, "gfx942", {"await_flags": "await_no_flags"}, True)


@pytest.mark.parametrize("triton", tritons.VERSIONS)
@pytest.mark.parametrize("arch", list(LDS))
def test_a_flag_that_outruns_the_stores_of_other_waves_is_found(arch: str, triton: str) -> None:
    """gcnsim would not see it: to it every store is there at once."""
    right = isa.read(call(triton, two_ranks, arch, {}, False))
    assert stores_awaited(right, arch, {}) == []
    wrong = isa.read(call(triton, two_ranks, arch, {"set_flags": "set_flags_at_once"}, False))
    assert len(stores_awaited(wrong, arch, {})) == 2
