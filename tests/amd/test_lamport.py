# SPDX-License-Identifier: Apache-2.0
"""Rows that travel without flags, on AMD: defects planted in the protocol and in the machine code are found."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import gcnsim
import pytest
import torch
import triton
import triton.language as tl

from llm_quant_rocm.formats.norm_quant import Quantization, Target
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.kernels import lamport
from tests.amd import isa, tritons
from tests.amd.budget import LDS
from tests.amd.isolated import call
from tests.amd.operators.reduce_norm_quant import FEW, PATIENCE, Ranks, check, norm_of, words_in_order
from tests.amd.test_budget import assembly
from tests.amd.test_quick_reduce import stalls
from tests.amd.virtual_gpu import activate
from tests.inputs import random_rows

WIDTH = 528


@triton.jit
def zeros_too(words):
    return words


@triton.jit
def clear_nothing(
    first, clearing, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LAMPORT_BYTES: tl.constexpr, SOURCES: tl.constexpr
):  # fmt: skip
    pass


@triton.jit
def one_place(call, source, row, lamport_at, LAMPORT_BYTES: tl.constexpr, WORLD: tl.constexpr, COLUMNS: tl.constexpr):
    """The same in every call."""
    return tl.cast(lamport_at, tl.int64) + source * LAMPORT_BYTES + row * (COLUMNS * 2)


@triton.jit
def store_and_leave(
    row, OFFSET: tl.constexpr, words, i: tl.constexpr, storing, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A plain store, which an L2 may keep."""
    tl.store(lamport.fours(row, OFFSET, i, BLOCK), words, mask=lamport.there(i, COLUMNS, BLOCK) & storing)


@triton.jit
def two_offsets(row, OFFSET: tl.constexpr, i: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers of which Triton makes no buffer instructions."""
    first = lamport.wire_units.pointer(row, tl.int32, OFFSET + i * BLOCK * 2)
    return first + tl.arange(0, BLOCK // 8)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def look_at_what_is_known(
    first, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LAMPORT_BYTES: tl.constexpr, SOURCES: tl.constexpr,
    BEYOND: tl.constexpr = lamport.ZEROS
):  # fmt: skip
    """Loads whatever the caches have."""
    words = ()
    absent = tl.full((BLOCK // 8, 4), SOURCES, tl.int32)
    for source in tl.static_range(SOURCES):
        found = lamport.load_fours(first, source * LAMPORT_BYTES, 0, COLUMNS, BLOCK, BEYOND)
        absent = tl.minimum(absent, tl.where(found == 0, source, SOURCES))
        words = words + (found,)
    return words, tl.min(tl.reshape(absent, (BLOCK // 2,)), axis=0)


def planted(**functions: Callable[..., None]) -> ExitStack:
    """With these in place of functions of `kernels.lamport`; who waits for ever is found soon."""
    replaced = ExitStack()
    replaced.enter_context(patch.object(gcnsim, "run", partial(gcnsim.run, max_idle_runs=20_000)))
    for name, function in functions.items():
        replaced.enter_context(patch.object(lamport, name, function))
    return replaced


def calls_in_a_row(defect: str | None, by: str | None, zeros: bool, seed: int, shot: str = "one_shot") -> None:
    """Two ranks that stall anywhere make six calls of some rows, without waiting for each other between."""
    activate("gfx942")
    ranks, norm, target = Ranks(2), norm_of(WIDTH, torch.bfloat16, Quantization.NONE), Target()
    inputs = [
        [random_rows(rows, WIDTH, torch.bfloat16, 10 * turn + rank) * (not zeros) for rank in range(2)]
        for turn, rows in enumerate((2, 3, 1, 3, 2, 2))
    ]
    with planted(**({defect: globals()[by]} if defect and by else {})), stalls(seed):
        with ranks.gpu.together():
            outs = [ranks.launch(shot, xs, None, norm, target, CODECS["FP"], FEW, PATIENCE) for xs in inputs]
        for xs, out in zip(inputs, outs, strict=True):
            check(shot, xs, None, norm, target, CODECS["FP"], out)
    ranks.check_words()


@pytest.mark.parametrize("shot", ["one_shot", "two_shot"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_stall_in_the_middle_of_a_call(seed: int, shot: str) -> None:
    call(tritons.VERSIONS[-1], calls_in_a_row, None, None, False, seed, shot)


def test_zeros_that_travel_as_zeros_are_a_deadlock() -> None:
    with pytest.raises(gcnsim.Deadlock, match="lamport.py:"):
        call(tritons.VERSIONS[-1], calls_in_a_row, "not_zero", "zeros_too", True, 0)


@pytest.mark.parametrize(
    ("shot", "defect", "by"),
    [
        ("one_shot", "clear", "clear_nothing"),
        ("two_shot", "clear", "clear_nothing"),
        ("one_shot", "place", "one_place"),
    ],
)
def test_words_of_another_call_are_found(shot: str, defect: str, by: str) -> None:
    """Words that nobody clears, and those of a rank that is a call ahead. Two shots alone would do with one place: who
    sends a row has the sum of the one before, whose owner had read what was there."""
    with pytest.raises((AssertionError, gcnsim.Deadlock)):
        for seed in range(4):
            call(tritons.VERSIONS[-1], calls_in_a_row, defect, by, False, seed, shot)


def compiled(arch: str, defect: str | None, by: str | None) -> str:
    gpu = activate(arch, False)
    norm, x = norm_of(1024, torch.bfloat16, Quantization.NONE), torch.zeros(2, 1024, dtype=torch.bfloat16)
    with planted(**({defect: globals()[by]} if defect and by else {})):
        Ranks(2).launch("one_shot", [x], None, norm, Target(), CODECS["FP"], FEW)
    return gpu.launches[-1].assembly


# Of three ranks and one block: the row and the state, what is sent, the look, and the zeros.
ROW = "\tbuffer_load_dwordx4 v[2:5], v1, s[16:19], 0 offen\n"
STATE = "\ts_load_dwordx2 s[20:21], s[2:3], 0\n\ts_load_dwordx2 s[22:23], s[2:3], 8\n\ts_waitcnt lgkmcnt(0)\n"
STORES = """
	buffer_store_dwordx4 v[2:5], v1, s[4:7], 0 offen sc0 sc1
	buffer_store_dwordx4 v[2:5], v1, s[8:11], 0 offen sc0 sc1
	buffer_store_dwordx4 v[2:5], v1, s[12:15], 0 offen sc0 sc1
"""
SENDS = ROW + STATE + STORES + "\ts_barrier\n\tglobal_atomic_add v0, v0, v6, s[2:3] sc0\n"
LOOK = """
	buffer_inv sc0 sc1
	buffer_load_dwordx4 v[2:5], v1, s[4:7], 0 offen
	buffer_load_dwordx4 v[6:9], v1, s[8:11], 0 offen
	buffer_load_dwordx4 v[10:13], v1, s[12:15], 0 offen
	s_waitcnt vmcnt(0)
"""
# As it was when zeros were stored before a lost rank was reported: lanes of one address at a time (v_readfirstlane).
BY_LANES = """
	buffer_inv sc0 sc1
.LBB0_8:
	v_readfirstlane_b32 s4, v20
	buffer_load_dwordx4 v[2:5], v1, s[4:7], 0 offen
	s_cbranch_execnz .LBB0_8
	s_waitcnt vmcnt(0)
.LBB0_9:
	v_readfirstlane_b32 s8, v21
	buffer_load_dwordx4 v[6:9], v1, s[8:11], 0 offen
	s_cbranch_execnz .LBB0_9
	s_waitcnt vmcnt(0)
	buffer_load_dwordx4 v[10:13], v1, s[12:15], 0 offen
	s_waitcnt vmcnt(0)
"""
INVALIDATE, *LOADS, WAIT = LOOK.strip("\n").splitlines(keepends=True)


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        ({}, None),
        # Registers of an earlier load are used again.
        ({"look": INVALIDATE + "".join(LOADS[:2]) + "\ts_waitcnt vmcnt(1)\n" + LOADS[2] + WAIT}, None),
        ({"look": BY_LANES}, "a look waits for all it asked for between its loads"),
        ({"look": "".join(LOADS) + INVALIDATE + WAIT}, "a look loads before it invalidates"),
        ({"look": INVALIDATE + "".join(LOADS[:2]) + WAIT}, "looks for words (buffer_inv sc0 sc1) load [2] times"),
        ({"look": LOOK.replace("inv sc0 sc1", "inv sc1")}, "looks for words (buffer_inv sc0 sc1) load [] times"),
        ({"look": LOOK + "\tglobal_store_dword v0, v1, s[2:3]\n"}, "a look stores"),
        ({"look": LOOK.replace("x4 v[6:9]", "x2 v[6:7]")}, "a look loads "),
        ({"before": SENDS.replace("s[8:11], 0 offen sc0 sc1", "s[8:11], 0 offen")},
         "2 stores before the looks and 5 in all are written through"),
        ({"after": STORES.replace(" sc0 sc1", "")}, "3 stores before the looks and 3 in all are written through"),
        ({"before": SENDS.replace("sc1\n", "sc1\n\ts_waitcnt vmcnt(0)\n")}, "it waits between the stores to ranks"),
        ({"before": SENDS.replace("\ts_barrier\n", "")}, "a call is counted before all waves have read its number"),
        ({"before": SENDS.replace(ROW + STATE, STATE + ROW)}, "a row is asked for when the state has come, not before"),
    ],
)  # fmt: skip
def test_planted_machine_code(planted: dict[str, str], wrong: str | None) -> None:
    code = assembly(planted.get("look", LOOK), before=planted.get("before", SENDS), after=planted.get("after", STORES))
    found = words_in_order(code, "gfx942", {"COLUMNS": 1024, "BLOCK": 1024, "WORLD": 3, "SHOTS": 1})
    assert found == [] if wrong is None else found[0].startswith(wrong)


@pytest.mark.parametrize("triton", tritons.VERSIONS)
@pytest.mark.parametrize("arch", list(LDS))
def test_words_that_caches_would_keep_and_waits_are_found(arch: str, triton: str) -> None:
    """gcnsim would not see it: to it every store is there at once."""
    constants = {"COLUMNS": 1024, "BLOCK": 1024, "WORLD": 2, "SHOTS": 1}
    assert words_in_order(isa.read(call(triton, compiled, arch, None, None)), arch, constants) == []
    stale = isa.read(call(triton, compiled, arch, "look", "look_at_what_is_known"))
    assert words_in_order(stale, arch, constants) != []
    if arch != "gfx90a":  # which knows no such stores
        kept = isa.read(call(triton, compiled, arch, "store_fours", "store_and_leave"))
        assert words_in_order(kept, arch, constants) == ["0 stores before the looks and 0 in all are written through"]
        slow = isa.read(call(triton, compiled, arch, "fours", "two_offsets"))
        assert words_in_order(slow, arch, constants) == ["it waits between the stores to ranks"]
