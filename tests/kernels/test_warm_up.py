# SPDX-License-Identifier: Apache-2.0
"""After `warm_up` no number of rows has a kernel compiled."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib import import_module

import pytest
import torch

from llm_quant_rocm import hardware
from llm_quant_rocm.ops.warm_up import warm_up
from tests.amd import isolated, tritons

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from llm_quant_rocm.kernels import compile_ahead
from tests.kernels.warm_kernels import compiled_in_the_background, not_compiled, said_of_all

warm_up_module = import_module("llm_quant_rocm.ops.warm_up")


NEWEST = tritons.NEWEST or tritons.OLDEST


# Hopper's kernels are chosen by an estimate, with ever other tiles up to some thousand rows.
@pytest.mark.parametrize(
    ("arch", "rows", "triton"),
    [
        ("sm_90", 1100, tritons.OLDEST), ("gfx90a", 200, NEWEST), ("gfx942", 1100, tritons.OLDEST),
        ("gfx942", 200, NEWEST), ("gfx950", 200, tritons.OLDEST),
    ],
)  # fmt: skip
def test_nothing_is_compiled_afterwards(arch: str, rows: int, triton: str) -> None:
    cases = isolated.call(triton, said_of_all, arch, rows)
    assert all(said["warm"] for said in cases[:2])  # later ones may share all kernels with them
    for said in cases:
        assert not said["launched"], said
        assert not said["missed"], said
        assert said["launched_then"] >= rows, said


def test_without_a_gpu_nothing_is_called() -> None:
    warm_up(pytest.fail, 8, torch.device("cpu"), "kind", "name")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that `call` had, on what is taken for a GPU."""
    monkeypatch.setattr(hardware, "CPU", hardware.nvidia(9, 0))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(warm_up_module, "_warm", set())
    return []


def test_the_reference_is_called_once(calls: list[int]) -> None:
    warm_up(calls.append, 100, torch.device("cpu"), "kind", "layer")
    assert calls == [1]


def test_what_does_not_fit_the_memory_is_passed_over(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def call(rows: int) -> None:
        if rows > 70:
            raise torch.OutOfMemoryError
        calls.append(rows)

    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda: nullcontext(compile_ahead.Ahead(launches=1, kernels=3)))
    with caplog.at_level("INFO", "llm_quant_rocm"):
        warm_up(call, 100, torch.device("cpu"), "kind", "layer")
    assert calls == [1, 65, *range(64, 1, -1)]
    assert caplog.messages[0].startswith("layer: compiling 3 kernels for up to 65 rows")


def test_no_more_memory_is_kept_than_the_most_rows_took(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch may not cut large pieces: every number of rows has pieces of its own."""
    kept, most = [0], []

    def call(rows: int) -> None:
        kept[0] += rows
        most.append(kept[0])

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: kept[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.__setitem__(0, 0))
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda: nullcontext(compile_ahead.Ahead(launches=1, kernels=3)))
    warm_up(call, 100, torch.device("cpu"), "kind", "layer")
    assert max(most) < 2 * 100
    assert kept[0] == 0  # what is loaded next finds it all


@pytest.mark.parametrize("triton", tritons.VERSIONS)
def test_a_launch_waits_for_all_that_is_compiled_and_nothing_else_does(triton: str) -> None:
    said = isolated.call(triton, compiled_in_the_background)
    assert said["asked"] == [2, 1]  # each kernel once
    assert said["launched ahead"] == said["compiled before"] == 0
    assert said["launched"] == 1
    assert said["compiled"] == [16, 32, 64]


@pytest.mark.parametrize("triton", tritons.VERSIONS)
def test_what_cannot_be_compiled_is_said_at_the_first_launch_and_at_its_own(triton: str) -> None:
    assert isolated.call(triton, not_compiled) == ["128 are too many", "128 are too many", ""]


def test_the_vendor_multiplies_in_other_threads_only() -> None:
    one = torch.ones(2, 2)

    def multiply() -> torch.Tensor:
        out = torch.zeros(2, 2)
        assert torch.addmm(out, one, one, beta=0, out=out) is out
        assert torch.addmm(one, one, one).shape == (2, 2)
        return out

    with ThreadPoolExecutor(1) as other, compile_ahead.compile_ahead():
        assert not multiply().any()
        assert other.submit(multiply).result().eq(2).all()
        codes = one.to(torch.float8_e4m3fn)
        product = torch._scaled_mm(codes, codes.t(), one[:, :1], one[:1], out_dtype=torch.bfloat16)
        assert (product.shape, product.dtype) == ((2, 2), torch.bfloat16)
    assert multiply().eq(2).all()


def test_threads_that_take_turns_leave_all_as_it_was() -> None:
    before = torch.addmm, torch._scaled_mm, JITFunction.run
    one, entered, left = torch.ones(2, 2), threading.Event(), threading.Event()

    def in_the_other_thread() -> None:
        with compile_ahead.compile_ahead():
            entered.set()
            assert left.wait(60)

    with ThreadPoolExecutor(1) as other:
        with compile_ahead.compile_ahead():
            inside = other.submit(in_the_other_thread)
            assert not entered.wait(0.2)
        assert entered.wait(60)
        assert torch.addmm(one, one, one).eq(3).all()
        left.set()
        inside.result()
    assert before == (torch.addmm, torch._scaled_mm, JITFunction.run)


def test_a_thread_that_enters_twice_is_told() -> None:
    before = torch.addmm, torch._scaled_mm, JITFunction.run
    with compile_ahead.compile_ahead(), pytest.raises(RuntimeError, match="already active"):
        compile_ahead.compile_ahead().__enter__()
    assert before == (torch.addmm, torch._scaled_mm, JITFunction.run)


def test_ranks_compile_in_orders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random.SystemRandom, "shuffle", lambda self, work: work.reverse())
    pool, done = ThreadPoolExecutor(1), list[int]()
    monkeypatch.setattr(compile_ahead, "_threads", lambda: pool)
    work = [compile_ahead._Work(str(number), partial(done.append, number)) for number in range(5)]
    compile_ahead._background.begin([], list(work))
    pool.shutdown()
    assert done == [4, 3, 2, 1, 0]
    assert all(one.kernel.result() is None for one in work)
