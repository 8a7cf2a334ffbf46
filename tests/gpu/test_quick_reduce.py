# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce between the GPUs of this host: the reference's bits, also in graphs and with late ranks."""

import itertools
import os
import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from llm_quant_rocm.comm import proof
from llm_quant_rocm.comm.policy import Algorithm
from llm_quant_rocm.comm.quick_reduce import QuickReduce
from llm_quant_rocm.comm.watch import Watch
from llm_quant_rocm.formats.wire import CODECS, DTYPES
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels import keys
from llm_quant_rocm.kernels import quick_reduce as kernels
from llm_quant_rocm.kernels.quick_reduce import Config
from llm_quant_rocm.measure.ranks import compile_together
from llm_quant_rocm.reference import quick_reduce as reference
from tests.comm.processes import run_ranks
from tests.inputs import assert_same, nasty_rows, random_rows

WORLD = min(torch.cuda.device_count(), 8)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WORLD < 2, reason="needs two GPUs")]
SHOTS = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
TIMEOUT_SECONDS = 1.0
# Calls by flags before the first one of ours.
PROVEN = proof.CALLS if torch.version.hip else 0
# Of fp16 one codec of each kind: to compile a kernel takes seconds.
OF_FP16 = ("FP", "INT8", "FP4")
TYPES = [(codec, dtype) for codec in CODECS for dtype in DTYPES if dtype == torch.bfloat16 or codec in OF_FP16]


def config() -> Config:
    return kernels.default_config(detect(torch.device("cuda", 0)), WORLD, 2)


def compile_kernel(shots: int, codec: str, dtype: torch.dtype) -> None:
    kernels.warm_up(shots, dtype, CODECS[codec], config(), WORLD)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiles side by side what the ranks would compile one after another."""
    compile_together(compile_kernel, [(shots, codec, dtype) for codec, dtype in TYPES for shots in (1, 2)])


def connect(rank: int, timeout: float) -> tuple[torch.device, QuickReduce]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    keys.settle()
    group = dist.group.WORLD
    assert group is not None
    with device:  # the default one while an engine builds a model
        return device, QuickReduce.over(group, device, inbox_bytes=8 << 20, timeout=timeout)


def draw(count: int, dtype: torch.dtype, seed: int, nasty: bool = True) -> list[torch.Tensor]:
    """Every rank's values, known to all: nasty groups beside other ones on every rank, and random ones."""
    rows = [random_rows(count // 64 + 1, 64, dtype, seed * 10 + rank).flatten()[:count] for rank in range(WORLD)]
    if nasty:
        for rank, row in enumerate(rows):
            part = nasty_rows(64, dtype).roll(3 * rank, 0).flatten()[:count]
            row[: part.numel()] = part
    return rows


def sleep(delays: random.Random, most: int = 100_000) -> None:
    """Keeps this rank's stream busy for up to so many cycles, most often not."""
    if delays.random() < 0.3:
        torch.cuda._sleep(delays.randrange(most))


def every_codec(rank: int) -> None:
    """Ragged sizes, both shots, late ranks: the reference's bits."""
    device, reduce = connect(rank, timeout=20)
    # Many tiles, of several buffers, for each program
    few = QuickReduce(reduce.mailbox, reduce.region, reduce.max_spins, replace(config(), programs=3, buffers=2))
    delays = random.Random(rank)
    cases = [
        (codec, dtype, shot, count, reduce)
        for (codec, dtype), shot, count in itertools.product(TYPES, SHOTS, (1, 31, 33, 4097, 20_003))
    ]
    cases += [
        ("FP4", torch.bfloat16, shot, count, few)
        for shot, count in itertools.product(SHOTS, (1, 20_003, 100_000 * WORLD))
    ]
    for seed, (codec, dtype, shot, count, using) in enumerate(cases):
        inputs = draw(count, dtype, seed)
        sleep(delays, 1_000_000)
        out = using.all_reduce(inputs[rank].to(device), CODECS[codec], shot).cpu()
        reduce.check()
        try:
            assert_same(out, getattr(reference, shot)(inputs, CODECS[codec]))
        except AssertionError as error:
            raise AssertionError(f"rank {rank}: {shot} of {count} values of {dtype} by {codec}: {error}") from error


def graphs(rank: int) -> None:
    """A thousand replays of two graphs in turn, with other inputs each, between calls of other sizes that now and then
    come from another stream, and with late ranks."""
    device, reduce = connect(rank, timeout=20)
    delays = random.Random(rank)
    calls = (("FP4", Algorithm.TWO_SHOT, 8003), ("FP", Algorithm.ONE_SHOT, 513), ("INT4", Algorithm.TWO_SHOT, 30_011))
    inputs, expected = [], []
    for turn in range(4):
        every = [draw(count, torch.bfloat16, turn, nasty=False) for _, _, count in calls]
        inputs.append([values[rank].to(device) for values in every])
        sums = [
            getattr(reference, shot)(values, CODECS[codec])
            for values, (codec, shot, _) in zip(every, calls, strict=True)
        ]
        expected.append([total.to(device).view(torch.int16) for total in sums])
    x = [torch.zeros_like(values) for values in inputs[0]]

    def in_order(order: tuple[int, ...]) -> dict[int, torch.Tensor]:
        return {call: reduce.all_reduce(x[call], CODECS[calls[call][0]], calls[call][1]) for call in order}

    in_order((0, 1, 2))
    torch.cuda.synchronize()
    dist.barrier()
    graphs_of: list[tuple[torch.cuda.CUDAGraph, dict[int, torch.Tensor]]] = []
    for order in ((0, 1, 2), (2, 0)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = in_order(order)
        graphs_of.append((graph, outs))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    aside, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    for replay in range(1000):
        turn = replay % 4
        for values, new in zip(x, inputs[turn], strict=True):
            values.copy_(new)
        sleep(delays)
        graph, outs = graphs_of[replay // 3 % 2]
        graph.replay()
        for call, out in outs.items():
            wrong += (out.view(torch.int16) != expected[turn][call]).sum()
        if replay % 10 == 0:
            aside.wait_stream(main)
            with torch.cuda.stream(aside if replay % 20 else main):
                other = reduce.all_reduce(inputs[turn][0][: 1 + replay], CODECS["FP"])
                wrong += other.isnan().sum()
            main.wait_stream(aside)
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} wrong values in 1000 replays"
    reduce.check()


def random_sizes(rank: int) -> None:
    """Ten thousand calls, of zeros and one number each, which every codec carries exactly, as it does the sums."""
    device, reduce = connect(rank, timeout=20)
    calls, delays = random.Random(0), random.Random(rank)
    places = torch.arange(200_000, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(10_000):
        count, shot, codec = int(2 ** calls.uniform(0, 17.6)), calls.choice(SHOTS), calls.choice(list(CODECS))
        # Six times a whole number of few bits, negative where FP4 and INT codecs have the largest code that is.
        ones = (places[:count] * calls.randrange(1, 1000) + call) % 7 < 3
        number = -6 * calls.randrange(1, 5)
        sleep(delays)
        out = reduce.all_reduce((ones * (number * (rank + 1))).to(torch.bfloat16), CODECS[codec], shot)
        wrong += (out != ones * (number * (WORLD * (WORLD + 1) // 2))).sum()
        if call % 1000 == 999:
            reduce.check()
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} wrong values in 10000 calls"
    reduce.check()


def known_values(rank: int) -> None:
    """What AMD's GPUs have to add up before they serve."""
    proof.prove(connect(rank, timeout=20)[1])


def results(rank: int) -> None:
    for section in (known_values, every_codec, graphs, random_sizes):
        section(rank)
        dist.barrier()  # memory of a rank that is done may still be written to


def lose_a_rank(rank: int, dies: bool) -> None:
    """The last one leaves out the second call, or dies before it. The others say so, within the time, without a
    synchronization."""
    device, reduce = connect(rank, TIMEOUT_SECONDS)
    x = torch.ones(5000, dtype=torch.bfloat16, device=device)
    reduce.all_reduce(x, CODECS["FP4"])
    torch.cuda.synchronize()
    reduce.check()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == WORLD - 1 and dies:
        os._exit(0)
    if rank < WORLD - 1:
        watch = Watch(reduce.check, interval=0.01, grace=60)
        begin = time.monotonic()
        reduce.all_reduce(x, CODECS["FP4"])
        lost = f"rank {WORLD - 1} of the group did not arrive in call {PROVEN + 2}, phase 1"
        with pytest.raises(RuntimeError, match=lost):
            while time.monotonic() - begin < 20 * TIMEOUT_SECONDS:
                watch.raise_if_lost()
                time.sleep(0.01)
        seconds = time.monotonic() - begin
        watch.stop()
        assert 0.5 * TIMEOUT_SECONDS < seconds < 5 * TIMEOUT_SECONDS, f"noticed after {seconds:.2f} s"
        begin = time.monotonic()
        reduce.all_reduce(x, CODECS["FP4"])
        torch.cuda.synchronize()  # later calls end at once
        assert time.monotonic() - begin < TIMEOUT_SECONDS
    if dies:
        time.sleep(TIMEOUT_SECONDS)  # nobody leaves before all have noticed
        os._exit(0)  # NCCL would wait for the dead one
    dist.barrier()
    torch.cuda.synchronize()


def test_results() -> None:
    run_ranks(WORLD, results, backend="nccl", preload=["llm_quant_rocm.comm.quick_reduce"])


@pytest.mark.parametrize("dies", [False, True], ids=["is_late", "dies"])
def test_a_lost_rank(dies: bool) -> None:
    run_ranks(WORLD, lose_a_rank, dies, backend="nccl", preload=["llm_quant_rocm.comm.quick_reduce"])
