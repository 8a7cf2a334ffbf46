# SPDX-License-Identifier: Apache-2.0
"""What the ranks of tests/measure/test_ranks.py do; other processes import it."""

import signal
import time

import torch
import torch.distributed as dist

from llm_quant_rocm.measure.ranks import Report, slowest


def add_up(rank: int, report: Report, first: int, many: int) -> None:
    for number in range(first, first + many):
        total = torch.tensor([number + rank])
        dist.all_reduce(total)
        report("sum", int(total))
    report("slowest", slowest(float(rank), torch.device("cpu")))


def fail(rank: int, report: Report) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has reported"])
        raise RuntimeError("no peer access")
    report("before", rank)
    store.set("rank 0 has reported", "")
    time.sleep(600)
    report("after", rank)


def hang(rank: int, report: Report) -> None:
    report("before", rank)
    time.sleep(600)
    report("after", rank)


def say_what_is_blocked(rank: int, report: Report) -> None:
    report("blocked", signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def wants_no_ctrl_c() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def write(folder: str, name: str) -> None:
    with open(f"{folder}/{name}", "x"):
        pass
