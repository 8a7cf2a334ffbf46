# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce on several GPUs of one host, against NCCL (RCCL) and torch symmetric memory.

    python benchmarks/quick_reduce.py WORLD [--cuts] [--crossovers] [--seconds 85]

One process a GPU, bf16, 4 KiB to 1 GiB, CUDA graphs. A figure is the median over replays of the slowest rank's time of
one call. Figures are written as they come: after so many seconds the ranks are ended, and what was measured stays.
With --cuts other ways to cut messages are timed too; --crossovers writes what serves which size best for
`comm.policy`, to $OUT or to the user's cache.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm.comm.crossovers import crossovers, merged
from llm_quant_rocm.comm.policy import Algorithm, cached_crossovers
from llm_quant_rocm.comm.quick_reduce import QuickReduce
from llm_quant_rocm.formats.wire import codec_named
from llm_quant_rocm.hardware import Hardware, detect
from llm_quant_rocm.kernels import quick_reduce as kernels
from llm_quant_rocm.kernels.quick_reduce import Config

KIB, MIB = 1 << 10, 1 << 20
CODECS = ("FP4", "INT4", "INT8", "FP8", "FP")
# Those that targets speak of first: a run that is cut short has them.
FIRST = (1 << 30, 16 * MIB, 2 * MIB, 64 * KIB)
SIZES = (*FIRST, *(size for size in (4 * KIB << step for step in range(19)) if size not in FIRST))
MOST_ONE_SHOT = 4 * MIB  # bytes; between two ranks, where both shots send as much, everything
LEAST_TWO_SHOT = 32 * KIB
MOST_PEERS_ONE_SHOT = 16 * MIB
INBOX_BYTES = 128 * MIB  # 1 GiB of FP4 in pieces of full size
LOST_AFTER = 5.0  # seconds
# Up to a size in bytes: calls of a graph, replays of it.
REPLAYS = {MIB: (20, 15), 16 * MIB: (6, 9), 128 * MIB: (2, 7), 1 << 30: (1, 5)}


def cuts(default: Config) -> dict[str, tuple[Config, tuple[int, ...]]]:
    """Other ways to cut a message, timed with FP4, and with which shots."""
    units, both = default.programs // 4, (1, 2)
    at_once = replace(default, flags_at_once=True)
    ways = {f"{many} a multiprocessor": (replace(default, programs=many * units), both) for many in (2, 3, 5, 6)}
    ways["at once"] = at_once, both
    ways["at once, 6 a multiprocessor"] = replace(at_once, programs=6 * units), both
    ways["together"] = replace(default, flags_together=True), (2,)
    ways["at once, together"] = replace(at_once, flags_together=True), (2,)
    ways["at once, own first"] = replace(at_once, own_first=True), (2,)
    ways["at once, together, own first"] = replace(at_once, flags_together=True, own_first=True), (2,)
    ways |= {f"at once, {rounds} rounds": (replace(at_once, rounds=rounds), both) for rounds in (1, 2, 4)}
    for blocks, warps, many in ((4, 1, 16), (8, 2, 8), (32, 8, 2)):
        way = replace(at_once, blocks=blocks, num_warps=warps, programs=many * units)
        ways[f"at once, {warps} warps, {many} a multiprocessor"] = way, both
    return ways


def compile_kernel(shots: int, codec: str, config: Config, world: int) -> None:
    kernels.warm_up(shots, torch.bfloat16, codec_named(codec), config, world)


def compile_all(world: int, hardware: Hardware, with_cuts: bool) -> None:
    """Every kernel into Triton's cache on disk, several at a time."""
    config = kernels.default_config(hardware, 1, world, 2)
    jobs = [(shots, codec, config) for shots in (1, 2) for codec in CODECS]
    if with_cuts:
        # How many programs and rounds there are, no kernel knows.
        ways = ((replace(cut, programs=1, rounds=1), shots) for cut, shots in cuts(config).values())
        jobs += dict.fromkeys((shot, "FP4", cut) for cut, shots in ways for shot in shots)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), context) as pool:
        for job in [pool.submit(compile_kernel, *job, world) for job in jobs]:
            job.result()


def time_of(call: Callable[[], object], nbytes: int, device: torch.device) -> float:
    """Microseconds of a call. Every rank replays as often: how long one took decides nothing."""
    calls, repeats = (
        (20, 15) if nbytes <= MIB else (6, 9) if nbytes <= 16 * MIB else (2, 7) if nbytes <= 128 * MIB else (1, 5)
    )
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
    slowest = torch.tensor([mine], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 2)


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
    nbytes: int, x: torch.Tensor, reduces: dict[str, tuple[QuickReduce, tuple[int, ...]]]
) -> dict[str, Callable[[], object]]:
    """Our all-reduces, by the name of the codec, of the one-shot and of another way to cut messages."""
    calls: dict[str, Callable[[], object]] = {}
    for cut, (reduce, shots) in reduces.items():
        for codec in CODECS if not cut else ("FP4",):
            call = partial(reduce.all_reduce, x[: nbytes // 2], codec_named(codec))
            if 2 in shots and nbytes >= LEAST_TWO_SHOT:
                calls[codec + cut] = call
            if 1 in shots and (nbytes <= MOST_ONE_SHOT or reduce.mailbox.world == 2):
                calls[f"{codec} one-shot{cut}"] = partial(call, Algorithm.ONE_SHOT)
    return calls


def rank_main(rank: int, world: int, rendezvous: str, with_cuts: bool, name: str, began: float) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", f"file://{rendezvous}", timedelta(seconds=60), world, rank, device_id=device)
    group = dist.group.WORLD
    assert group is not None
    hardware = detect(device)
    first = QuickReduce.over(group, device, INBOX_BYTES, LOST_AFTER)
    reduces = {"": (first, (1, 2))}
    if with_cuts:
        reduces |= {
            f", {cut}": (QuickReduce(first.mailbox, first.region, first.max_spins, config), shots)
            for cut, (config, shots) in cuts(kernels.default_config(hardware, 1, world, 2)).items()
        }
    torch.manual_seed(rank)
    most = max(SIZES) // 2
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
            f"{harness.relative_error(first.all_reduce(part, codec_named(codec), shot), expected):.3g}"
        )
        for codec in CODECS
        for shot in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
    }
    result: dict[str, Any] = {"unit": "microseconds a call", "world": world, "errors": errors, "rows": []}
    for nbytes in SIZES:
        calls = peers_of(nbytes, inplace, shared) | ours_of(nbytes, x, reduces)
        us = {name: time_of(call, nbytes, device) for name, call in calls.items()}
        first.check()
        result["rows"] = sorted([*result["rows"], {"bytes": nbytes, "us": us}], key=lambda row: row["bytes"])
        if rank == 0:
            harness.write(name, result)
            cells = "  ".join(f"{key} {t:.1f} ({us['NCCL'] / t:.2f})" for key, t in us.items())
            print(f"{time.time() - began:5.1f} s  {nbytes} bytes: {cells}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def write_crossovers(path: Path, arch: str) -> Path:
    """The crossovers of a file of figures, beside those of other numbers of ranks that are known already."""
    result = json.loads(path.read_text())
    folder = os.environ.get("OUT")
    file = Path(folder) / f"quick_reduce_crossovers_{arch}.json" if folder else cached_crossovers(arch)
    known = json.loads(file.read_text()) if file.is_file() else None
    entries = [crossovers(result["rows"], result["world"], codec) for codec in CODECS if codec != "FP"]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(merged(known, entries, result["environment"]), indent=1) + "\n")
    return file


def main() -> None:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=int, help="GPUs: 2 to 8")
    parser.add_argument("--cuts", action="store_true", help="time other ways to cut messages too")
    parser.add_argument("--crossovers", action="store_true", help="write what serves which size")
    parser.add_argument("--seconds", type=float, default=85.0, help="end the ranks after so many")
    args = parser.parse_args()
    if not 2 <= args.world <= torch.cuda.device_count():
        parser.error(
            f"{args.world} ranks on {torch.cuda.device_count()} GPUs: each rank needs a GPU, and there are two or more"
        )
    hardware = detect(torch.device("cuda", 0))
    name = f"quick_reduce_{hardware.arch}_tp{args.world}"
    compile_all(args.world, hardware, args.cuts)
    print(f"{time.time() - began:5.1f} s  compiled", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.world, f"{folder}/rendezvous", args.cuts, name, began)
        ranks = multiprocessing.start_processes(rank_main, arguments, args.world, join=False, start_method="spawn")
        while not ranks.join(timeout=0.5):
            if time.time() - began > args.seconds:
                for process in ranks.processes:
                    process.kill()
                print(f"ended after {args.seconds:.0f} s: sizes that are not above were not measured", flush=True)
                break
    path = Path(os.environ.get("OUT", harness.RESULTS)) / f"{name}.json"
    if args.crossovers and path.is_file():
        print("crossovers written to", write_crossovers(path, hardware.arch))


if __name__ == "__main__":
    main()
