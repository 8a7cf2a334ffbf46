# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce between the GPUs of this host: the reference's bits, also in graphs and with late ranks."""

import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from llm_quant_rocm.comm.policy import Algorithm
from llm_quant_rocm.comm.quick_reduce import QuickReduce
from llm_quant_rocm.comm.watch import Watch
from llm_quant_rocm.formats.wire import CODECS, DTYPES
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels import quick_reduce as kernels
from llm_quant_rocm.kernels.quick_reduce import Config
from llm_quant_rocm.reference import quick_reduce as reference
from tests.comm.processes import run_ranks
from tests.inputs import assert_same, nasty_rows, random_rows

WORLD = min(torch.cuda.device_count(), 8)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WORLD < 2, reason="needs two GPUs")]
SHOTS = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
TIMEOUT_SECONDS = 1.0


def config(at_once: bool = False) -> Config:
    return replace(kernels.default_config(detect(torch.device("cuda", 0)), 1, WORLD, 2), flags_at_once=at_once)


def compile_kernel(shots: int, codec: str, dtype: torch.dtype, at_once: bool) -> None:
    kernels.warm_up(shots, dtype, CODECS[codec], config(at_once), WORLD)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiles side by side what the ranks would compile one after another."""
    jobs = [(shots, codec, dtype, False) for codec in CODECS for dtype in DTYPES for shots in (1, 2)]
    jobs += [(shots, "FP4", torch.bfloat16, True) for shots in (1, 2)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), context) as pool:
        for job in [pool.submit(compile_kernel, *job) for job in jobs]:
            job.result()


def connect(rank: int, timeout: float) -> tuple[torch.device, QuickReduce]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = dist.group.WORLD
    assert group is not None
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
    at_once = QuickReduce(reduce.mailbox, reduce.region, reduce.max_spins, config(at_once=True))
    delays = random.Random(rank)
    cases = [(codec, dtype, shot, count, reduce) for codec in CODECS for dtype in DTYPES for shot in SHOTS
             for count in (1, 3001, 20_003)]  # fmt: skip
    cases += [("FP4", torch.bfloat16, shot, count, at_once) for shot in SHOTS for count in (1, 20_003)]
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
    """A thousand replays with other inputs each, between calls of other sizes, and with late ranks."""
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

    def all_calls() -> list[torch.Tensor]:
        return [
            reduce.all_reduce(values, CODECS[codec], shot) for values, (codec, shot, _) in zip(x, calls, strict=True)
        ]

    all_calls()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = all_calls()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for replay in range(1000):
        turn = replay % 4
        for values, new in zip(x, inputs[turn], strict=True):
            values.copy_(new)
        sleep(delays)
        graph.replay()
        for out, right in zip(outs, expected[turn], strict=True):
            wrong += (out.view(torch.int16) != right).sum()
        if replay % 10 == 0:
            other = reduce.all_reduce(inputs[turn][0][: 1 + replay], CODECS["FP"])
            wrong += other.isnan().sum()
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} wrong values in 1000 replays"
    reduce.check()


def random_sizes(rank: int) -> None:
    """Small whole numbers, whose sums are exact."""
    device, reduce = connect(rank, timeout=20)
    sizes, delays = random.Random(0), random.Random(rank)
    places = torch.arange(200_000, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(2000):
        count, shot = int(2 ** sizes.uniform(0, 17.6)), sizes.choice(SHOTS)
        every = [((places[:count] * (source + 1) + call) % 17 - 8) for source in range(WORLD)]
        sleep(delays)
        out = reduce.all_reduce(every[rank].to(torch.bfloat16), CODECS["FP"], shot)
        wrong += (out != sum(every)).sum()
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} wrong values in 2000 calls"
    reduce.check()


def results(rank: int) -> None:
    for section in (every_codec, graphs, random_sizes):
        section(rank)
        dist.barrier()  # memory of a rank that is done may still be written to


def a_rank_does_not_come(rank: int) -> None:
    """The last one leaves out the second call. The others say so, within the time, without a synchronization."""
    device, reduce = connect(rank, TIMEOUT_SECONDS)
    x = torch.ones(5000, dtype=torch.bfloat16, device=device)
    reduce.all_reduce(x, CODECS["FP4"])
    torch.cuda.synchronize()
    reduce.check()
    dist.barrier()
    torch.cuda.synchronize()
    if rank < WORLD - 1:
        watch = Watch(reduce.check, interval=0.01, grace=60)
        begin = time.monotonic()
        reduce.all_reduce(x, CODECS["FP4"])
        with pytest.raises(RuntimeError, match=f"rank {WORLD - 1} of the group did not arrive in call 2, phase 1"):
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
    dist.barrier()
    torch.cuda.synchronize()


def test_results() -> None:
    run_ranks(WORLD, results, backend="nccl", preload=["llm_quant_rocm.comm.quick_reduce"])


def test_a_lost_rank() -> None:
    run_ranks(WORLD, a_rank_does_not_come, backend="nccl", preload=["llm_quant_rocm.comm.quick_reduce"])
