# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce between GPUs of a host against NCCL (RCCL) and torch symmetric memory: bf16, CUDA graphs,
one process a GPU. A figure is the median over replays of the slowest rank's time of one call."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from llm_quant_rocm.comm.crossovers import crossovers
from llm_quant_rocm.comm.policy import Algorithm
from llm_quant_rocm.comm.quick_reduce import QuickReduce
from llm_quant_rocm.formats.wire import codec_named
from llm_quant_rocm.hardware import Hardware, detect
from llm_quant_rocm.kernels import quick_reduce as kernels
from llm_quant_rocm.kernels.quick_reduce import Config
from llm_quant_rocm.measure.ranks import Report, compile_together, on_every_rank, time_together
from llm_quant_rocm.timing import relative_error

KIB, MIB = 1 << 10, 1 << 20
CODECS = ("FP4", "INT4", "INT8", "FP8", "FP")
# Those that targets speak of first: a run that is cut short has them.
FIRST = (1 << 30, 16 * MIB, 2 * MIB, 64 * KIB)
SIZES = (*FIRST, *(size for size in (4 * KIB << step for step in range(19)) if size not in FIRST))
MOST_ONE_SHOT = 4 * MIB  # bytes; between two ranks, where both shots send as much, everything
LEAST_TWO_SHOT = 32 * KIB
MOST_PEERS_ONE_SHOT = 16 * MIB
LOST_AFTER = 5.0  # seconds
# Up to a size in bytes: calls of a graph, replays of it.
REPLAYS = {MIB: (20, 15), 16 * MIB: (6, 9), 128 * MIB: (2, 7), 1 << 30: (1, 5)}


def cuts(default: Config) -> dict[str, Config]:
    """Other ways to cut a message than `default`'s 4 programs a multiprocessor, timed with FP4."""
    units = default.programs // 4
    ways = {f"{many} a multiprocessor": replace(default, programs=many * units) for many in (2, 3, 5, 6)}
    for blocks, warps, many in ((8, 2, 8), (32, 8, 2)):
        way = replace(default, blocks=blocks, num_warps=warps, programs=many * units)
        ways[f"{warps} warps, {many} a multiprocessor"] = way
    return ways


def measure(
    world: int,
    heard: Report,
    sizes: Sequence[int] = SIZES,
    codecs: Sequence[str] = CODECS,
    with_cuts: bool = False,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """Everything by bytes: {"unit": ..., "world": ..., "errors": ..., "rows": [{"bytes": ..., "us": {...}}, ...]}.

    Args:
        world: GPUs, 2 to 8.
        heard: is told ("compiled", number of kernels), ("errors", relative errors of 1 MiB by codec) and ("row", a row)
            as they come.
        sizes: bytes of messages, in the order in which they are measured.
        with_cuts: whether `cuts` are timed too.
        seconds: after which the ranks are ended, with the rows that there are; compilation counts.
    """
    result: dict[str, Any] = {"unit": "microseconds a call", "world": world, "errors": {}, "rows": []}

    def keep(word: str, what: Any) -> None:
        if word == "row":
            result["rows"] = sorted([*result["rows"], what], key=lambda row: row["bytes"])
        else:
            result[word] = what
        heard(word, what)

    end = time.monotonic() + seconds
    hardware = detect(torch.device("cuda", 0))
    heard("compiled", compile_together(_compile, _kernels(world, hardware, codecs, with_cuts)))
    on_every_rank(_rank, world, (world, tuple(sizes), tuple(codecs), with_cuts), keep, end - time.monotonic())
    return result


def entries(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What serves which size best, as `comm.crossovers.merged` takes it, for every codec in the result."""
    timed = {name for row in result["rows"] for name in row["us"]}
    codecs = [codec for codec in CODECS if timed & {codec, f"{codec} one-shot"}]
    return [crossovers(result["rows"], result["world"], codec) for codec in codecs]


def _kernels(world: int, hardware: Hardware, codecs: Sequence[str], with_cuts: bool) -> list[tuple[Any, ...]]:
    jobs = [(shots, by, kernels.default_config(hardware, world, shots), world) for shots in (1, 2) for by in codecs]
    if with_cuts:
        # How many programs there are, no kernel knows.
        config = kernels.default_config(hardware, world, 1)
        ways = dict.fromkeys(replace(cut, programs=1) for cut in cuts(config).values())
        jobs += [(shots, "FP4", cut, world) for cut in ways for shots in (1, 2)]
    return jobs


def _compile(shots: int, codec: str, config: Config, world: int) -> None:
    kernels.warm_up(shots, torch.bfloat16, codec_named(codec), config, world)


def peers_of(nbytes: int, inplace: torch.Tensor, shared: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What we are compared with, in place as each wants it; `shared` is symmetric memory."""
    group, part, message = dist.group.WORLD, inplace[: nbytes // 2], shared[: nbytes // 2]
    assert group is not None
    symmetric, name = torch.ops.symm_mem, group.group_name
    calls: dict[str, Callable[[], object]] = {
        "NCCL": lambda: dist.all_reduce(part),
        "symm two-shot": lambda: symmetric.two_shot_all_reduce_(message, "sum", name),
    }
    if nbytes <= MOST_PEERS_ONE_SHOT:
        calls["symm one-shot"] = lambda: symmetric.one_shot_all_reduce(message, "sum", name)
    return calls


def ours_of(
    nbytes: int, x: torch.Tensor, reduces: Mapping[str, QuickReduce], codecs: Sequence[str]
) -> dict[str, Callable[[], object]]:
    """Our all-reduces, by the name of the codec, of the one-shot and of another way to cut messages."""
    calls: dict[str, Callable[[], object]] = {}
    for cut, reduce in reduces.items():
        for codec in codecs if not cut else ("FP4",):
            call = partial(reduce.all_reduce, x[: nbytes // 2], codec_named(codec))
            if nbytes >= LEAST_TWO_SHOT:
                calls[codec + cut] = call
            if nbytes <= MOST_ONE_SHOT or reduce.mailbox.world == 2:
                calls[f"{codec} one-shot{cut}"] = partial(call, Algorithm.ONE_SHOT)
    return calls


def _rank(rank: int, report: Report, world: int, sizes: Sequence[int], codecs: Sequence[str], with_cuts: bool) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    device, group = torch.device("cuda", rank), dist.group.WORLD
    assert group is not None
    first = QuickReduce.over(group, device, timeout=LOST_AFTER)
    reduces = {"": first}
    if with_cuts:
        reduces |= {
            f", {cut}": QuickReduce(first.mailbox, first.region, first.max_spins, config)
            for cut, config in cuts(kernels.default_config(detect(device), world, 1)).items()
        }
    torch.manual_seed(rank)
    most = max(*sizes, MIB) // 2
    x = torch.randn(most, dtype=torch.bfloat16, device=device)
    inplace = x * 1e-30
    shared = symmetric_memory.empty(most, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(shared, group)
    shared.copy_(inplace)

    part = x[: MIB // 2]
    expected = part.float()
    dist.all_reduce(expected)
    errors = {
        f"{codec}{' one-shot' * (shot is Algorithm.ONE_SHOT)}": float(
            f"{relative_error(first.all_reduce(part, codec_named(codec), shot), expected):.3g}"
        )
        for codec in codecs
        for shot in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
    }
    report("errors", errors)
    for nbytes in sizes:
        calls = peers_of(nbytes, inplace, shared) | ours_of(nbytes, x, reduces, codecs)
        replays = next(times for limit, times in REPLAYS.items() if nbytes <= limit)
        us = {name: time_together(call, *replays, device) for name, call in calls.items()}
        first.check()
        report("row", {"bytes": nbytes, "us": us})
