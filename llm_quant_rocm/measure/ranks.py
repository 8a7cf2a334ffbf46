# SPDX-License-Identifier: Apache-2.0
"""Ranks of a measurement: a process a GPU (or, without GPUs, on the CPU), whose first one reports what it finds."""

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from llm_quant_rocm.kernels import keys
from llm_quant_rocm.measure.pool import compile_pool

# A rank says (a word, what it is about).
Report = Callable[[str, Any], None]
# A rank's part: (rank, report, *arguments), a function of a module; the process group is there.
Part = Callable[..., None]


def on_every_rank(
    part: Part, world: int, arguments: Sequence[Any], heard: Report, seconds: float = float("inf")
) -> bool:
    """Runs `part` on `world` ranks, and hands what rank 0 reports to `heard`. Returns whether the ranks came to their
    end: after so many seconds they are ended, and what was heard stands.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the message has its traceback.
    """
    began = time.monotonic()
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        given = (part, world, f"file://{folder}/rendezvous", sender, tuple(arguments))
        # Ctrl-C reaches the ranks too, and is for this process, which ends them: they would say where it met them.
        resource_tracker.ensure_running()  # or it unblocks the signal when it is started with the first rank
        heeded = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            ranks = multiprocessing.start_processes(_rank, given, world, join=False, start_method="spawn")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heeded)
        sender.close()

        def listen() -> None:
            with suppress(EOFError):  # the last rank has left
                while receiver.poll():
                    heard(*receiver.recv())

        try:
            ended = False
            while not ended:
                try:
                    ended = ranks.join(timeout=0.2)
                finally:
                    listen()
                if not ended and time.monotonic() - began > seconds:
                    return False
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return True


def _rank(rank: int, part: Part, world: int, rendezvous: str, sender: Connection, arguments: tuple[Any, ...]) -> None:
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        keys.settle()
        dist.init_process_group("nccl", rendezvous, timedelta(seconds=60), world, rank, device_id=device)
    else:
        dist.init_process_group("gloo", rendezvous, timedelta(minutes=10), world, rank)  # a CPU may have much to do

    def report(word: str, what: Any) -> None:
        if rank == 0:
            sender.send((word, what))

    part(rank, report, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def compile_together(job: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> int:
    """Calls `job`, a function of a module, with each of `arguments`, several at a time: Triton's cache on disk then has
    the kernels that the ranks will load. Returns how many there were."""
    jobs = list(arguments)
    pool = compile_pool(max(1, min(len(jobs), os.cpu_count() or 1, 16)))
    try:
        for submitted in [pool.submit(_settled, job, *each) for each in jobs]:
            submitted.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return len(jobs)


def _settled(job: Callable[..., None], *arguments: Any) -> None:
    keys.settle()  # so that ranks find what is compiled here
    job(*arguments)


def time_together(call: Callable[[], object], calls: int, repeats: int, device: torch.device) -> float:
    """Microseconds of a call: the slowest rank's median over `repeats` replays of a graph of `calls` calls. Every rank
    replays as often: how long one took decides nothing."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread asks the driver meanwhile
        for _ in range(calls):
            call()
    graph.replay()
    times = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in times:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    mine = statistics.median(start.elapsed_time(end) for start, end in times) / calls * 1e3
    return round(slowest(mine, device), 2)


def slowest(value: float, device: torch.device) -> float:
    """The largest value of all ranks."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
