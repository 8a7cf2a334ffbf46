# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual, RMSNorm and per-token FP8 as one kernel against the separate operators, on the GPUs of a host.

    python benchmarks/reduce_norm_quant.py --world 2 [--vllm-ops FOLDER] [--codec FP4]
    python benchmarks/reduce_norm_quant.py --world 2 --sweep [--codec FP4]
    python benchmarks/reduce_norm_quant.py --plot        # draws every result there is; needs matplotlib and no GPU

`separate` is the fastest all-reduce of this run (NCCL's, torch's symmetric memory by one shot and two, QuickReduce's by
FP), then add and RMSNorm, then per-token quantization: vLLM's kernels where its operator library is given, else ours;
`two_kernels` is the same all-reduce and our add, norm and quantization in one kernel. Inputs of torch's symmetric
memory are there already, which spares it the copy that engines make. `fused` is the fastest that
`comm.reduce_norm_quant` can choose, which is `two_kernels`, `one_shot` or `two_shot`, and `planned` what it does choose
now. With a codec, `separate_CODEC`, `one_shot_CODEC` and `two_shot_CODEC` send by it.

--sweep times what can be chosen at more sizes, and launch configurations, and writes crossovers that
`comm.reduce_norm_quant` reads from then on: into the user's cache, or with $OUT there, for configs/reduce_norm_quant.

Microseconds a call: the slowest rank's median of replays of a graph of several calls, begun together.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm import hardware, ops
from llm_quant_rocm.comm import reduce_norm_quant as groups
from llm_quant_rocm.comm.crossovers import crossovers, merged
from llm_quant_rocm.comm.policy import Algorithm, cached_crossovers
from llm_quant_rocm.formats.wire import CODECS

COLUMNS = (4096, 7168, 8192)
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
# Beyond this much for each rank but one, everything to everybody is out of the question.
ONE_SHOT_BYTES = 16 << 20
SWEEP_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
CONFIGS_ROWS = (1, 64, 1024, 4096)
CONFIGS = [(256, 132), (256, 264), (256, 396), (512, 132), (512, 264), (1024, 132)]
FP = CODECS["FP"]


class CompileOnly:
    """Stands in for a Triton kernel: a launch compiles it and puts it into Triton's cache."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


def compile_one(world: int, columns: int, shot: str, codec: str, threads: int) -> None:
    """Compiles the fused kernel of one kind, in a process of its own."""
    from llm_quant_rocm.formats.fp8 import for_device
    from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Target
    from llm_quant_rocm.kernels import quick_reduce
    from llm_quant_rocm.kernels import reduce_norm_quant as kernels

    name = f"reduce_norm_{shot}_kernel"
    setattr(kernels, name, CompileOnly(getattr(kernels, name)))
    device = torch.device("cuda", 0)
    peers = torch.zeros(world, dtype=torch.int64, device=device)
    state = torch.zeros(quick_reduce.STATE_WORDS, dtype=torch.int32, device=device)
    box = quick_reduce.Mailbox(peers, state, torch.zeros(1, dtype=torch.int64, device=device), 0, 1 << 24, 64)
    x = torch.zeros(2, columns, dtype=torch.bfloat16, device=device)
    target = Target(Quantization.FP8_PER_TOKEN, for_device(device), normed=False)
    config = kernels.Config(threads, programs=132)
    getattr(kernels, shot)(x, x, Norm(x[0]), target, target.empty(x), box, CODECS[codec], config, 1000)


def kernels_of(world: int, codec: str | None, sweep: bool) -> list[tuple[int, int, str, str, int]]:
    """The arguments of `compile_one` for all that a run times."""
    from llm_quant_rocm.kernels.reduce_norm_quant import default_config

    fact = hardware.detect(torch.device("cuda", 0))
    found = set()
    for columns in COLUMNS[-1:] if sweep else COLUMNS:
        for rows in SWEEP_ROWS if sweep else ROWS:
            for algorithm, by in choices(2 * rows * columns, world, codec):
                threads = {default_config(rows, columns, CODECS[by], fact).threads}
                if sweep and rows in CONFIGS_ROWS:
                    threads |= {n for n, _ in CONFIGS if fits(n, columns, by)}
                found |= {(world, columns, str(algorithm), by, n) for n in threads}
    return sorted(found)


def choices(nbytes: int, world: int, codec: str | None) -> list[tuple[Algorithm, str]]:
    """What of the fused kernels is timed for an x of `nbytes`."""
    codecs = ["FP", *([codec] if codec and nbytes >= 1 << 20 else [])]
    shots = [Algorithm.ONE_SHOT] * (world == 2 or nbytes * (world - 1) <= ONE_SHOT_BYTES) + [Algorithm.TWO_SHOT]
    return [(shot, by) for by in codecs for shot in shots]


def fits(threads: int, columns: int, codec: str) -> bool:
    """Whether each of so many lanes has something to encode."""
    return codec == "FP" or threads * (16 if CODECS[codec].planes[0] == 8 else 32) <= columns


def compile_all(jobs: Sequence[tuple[int, int, str, str, int]]) -> None:
    """Fills Triton's cache from several processes, so that ranks do not wait for the compiler one kernel at a time."""
    start = time.time()
    with ProcessPoolExecutor(min(len(jobs), 12, os.cpu_count() or 1), get_context("spawn")) as pool:
        for job in [pool.submit(compile_one, *job) for job in jobs]:
            job.result()
    print(f"{len(jobs)} kernels compiled in {time.time() - start:.0f} s", flush=True)


class Measurement:
    """Times calls of all ranks together."""

    def __init__(self, device: torch.device, budget_ms: float = 40.0) -> None:
        self.device, self.budget_ms = device, budget_ms

    def time(self, call: Callable[[], object]) -> float:
        """Microseconds a call, the same number on all ranks."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        for _ in range(3):
            call()
        end.record()
        end.synchronize()
        guess = self._slowest(start.elapsed_time(end) / 3)  # milliseconds, launches included
        calls = max(2, min(20, int(self.budget_ms / 8 / guess)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        times = []
        for turn in range(11):
            torch.cuda.synchronize()
            dist.barrier()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                times.append(start.elapsed_time(end) * 1e3 / calls)
        return round(self._slowest(statistics.median(times)), 2)

    def _slowest(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)


class Cell:
    """One number of rows and columns: the operators to be timed."""

    def __init__(self, rows: int, columns: int, ranks: groups.Ranks, shared: torch.Tensor, vllm: bool) -> None:
        device = shared.device
        self.rows, self.columns, self.ranks, self.vllm = rows, columns, ranks, vllm
        self.shared = shared[: rows * columns].view(rows, columns)
        self.x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        self.shared.copy_(self.x)
        self.residual = torch.randn_like(self.x)
        self.weight = torch.randn(columns, device=device, dtype=torch.bfloat16)
        self.codes = torch.empty(rows, columns, device=device, dtype=hardware.detect(device).fp8_dtype)
        self.scales = torch.empty(rows, 1, device=device)

    @property
    def nbytes(self) -> int:
        return 2 * self.rows * self.columns

    def all_reduces(self) -> dict[str, Callable[[], torch.Tensor]]:
        group, memory = dist.group.WORLD, self.ranks.memory
        assert group is not None and memory is not None

        def nccl() -> torch.Tensor:
            dist.all_reduce(self.x)
            return self.x

        found: dict[str, Callable[[], torch.Tensor]] = {"nccl": nccl}
        if self.nbytes <= 8 << 20:
            found["symm_one_shot"] = lambda: torch.ops.symm_mem.one_shot_all_reduce(
                self.shared, "sum", group.group_name
            )
            found["quick_one_shot"] = lambda: memory.all_reduce(self.x, FP, Algorithm.ONE_SHOT)
        found["symm_two_shot"] = lambda: torch.ops.symm_mem.two_shot_all_reduce_(self.shared, "sum", group.group_name)
        found["quick_two_shot"] = lambda: memory.all_reduce(self.x, FP, Algorithm.TWO_SHOT)
        return found

    def norm_and_quant(self, s: torch.Tensor) -> None:
        """Two kernels: add and norm, quantization."""
        if self.vllm:
            torch.ops._C.fused_add_rms_norm(s, self.residual, self.weight, 1e-6)
            torch.ops._C.dynamic_per_token_scaled_fp8_quant(self.codes, s, self.scales, None)
        else:
            normed = ops.reduce_norm_quant(s, self.weight, self.residual, quantization="none", normed=True).normed
            assert normed is not None
            ops.per_token_quant_fp8(normed)

    def fused(self, algorithm: Algorithm, codec: str = "FP", config: Any = None) -> Callable[[], object]:
        """The operator as it is served by one of the fused kernels."""
        plan = groups.Plan.always(algorithm, CODECS[codec])

        def call() -> object:
            groups._NAMED["tp"] = replace(self.ranks, plan=plan, config=config)
            return ops.reduce_norm_quant(self.x, self.weight, self.residual, group="tp")

        return call

    def measure(self, measurement: Measurement, codec: str | None) -> dict[str, float]:
        us = {name: measurement.time(call) for name, call in self.all_reduces().items()}
        best = min(us, key=us.__getitem__)
        reduce = self.all_reduces()[best]
        us["separate"] = measurement.time(lambda: self.norm_and_quant(reduce()))
        us["two_kernels"] = measurement.time(lambda: ops.rms_norm_quant_fp8(reduce(), self.weight, 1e-6, self.residual))
        for algorithm, by in choices(self.nbytes, self.ranks.world, codec):
            us[name_of(algorithm, by)] = measurement.time(self.fused(algorithm, by))
        us["fused"] = min(us[name] for name in ("two_kernels", "one_shot", "two_shot") if name in us)
        chosen = self.ranks.plan.choose(self.nbytes)
        us["planned"] = us[name_of(chosen.algorithm, chosen.codec.name) if chosen.codec else "two_kernels"]
        if codec and self.nbytes >= 1 << 20:
            memory = self.ranks.memory
            assert memory is not None
            us[f"separate_{codec}"] = measurement.time(
                lambda: self.norm_and_quant(memory.all_reduce(self.x, CODECS[codec]))
            )
        return us

    def sweep(self, measurement: Measurement, codec: str | None) -> dict[str, float]:
        """What can be chosen, and other launch configurations of it."""
        from llm_quant_rocm.kernels.reduce_norm_quant import Config

        reduces = {name: measurement.time(call) for name, call in self.all_reduces().items()}
        reduce = self.all_reduces()[min(reduces, key=reduces.__getitem__)]
        us = {
            "two_kernels": measurement.time(lambda: ops.rms_norm_quant_fp8(reduce(), self.weight, 1e-6, self.residual))
        }
        for algorithm, by in choices(self.nbytes, self.ranks.world, codec):
            us[name_of(algorithm, by)] = measurement.time(self.fused(algorithm, by))
            for threads, programs in CONFIGS if self.rows in CONFIGS_ROWS else ():
                if fits(threads, self.columns, by):
                    call = self.fused(algorithm, by, Config(threads, programs))
                    us[f"{name_of(algorithm, by)} {threads}x{programs}"] = measurement.time(call)
        return us


def name_of(algorithm: Algorithm, codec: str) -> str:
    return f"{algorithm}{'' if codec == 'FP' else f'_{codec}'}"


def write_crossovers(table: Sequence[dict[str, Any]], world: int, codec: str | None) -> Path:
    """The crossovers of a sweep, beside those of other numbers of ranks and codecs that are known already."""
    names = {"two_kernels": "NCCL"}  # stands for what is not ours
    for by in ("FP", codec or "FP"):
        names |= {name_of(Algorithm.ONE_SHOT, by): f"{by} one-shot", name_of(Algorithm.TWO_SHOT, by): by}
    rows = [
        {"bytes": 2 * row["rows"] * row["columns"], "us": {names[n]: t for n, t in row["us"].items() if n in names}}
        for row in table
    ]
    folder, arch = os.environ.get("OUT"), hardware.detect(torch.device("cuda", 0)).arch
    file = (
        Path(folder) / f"{groups.OPERATOR}_crossovers_tp{world}_{arch}.json"
        if folder
        else cached_crossovers(arch, operator=groups.OPERATOR)
    )
    known = json.loads(file.read_text()) if file.is_file() else None
    entries = [crossovers(rows, world, by) for by in dict.fromkeys(("FP", codec or "FP"))]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(merged(known, entries, harness.environment()), indent=1) + "\n")
    return file


def rank_main(rank: int, world: int, rendezvous: str, args: argparse.Namespace) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    from llm_quant_rocm.comm.quick_reduce import QuickReduce

    began = time.time()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rendezvous, world_size=world, rank=rank, device_id=device)
    group = dist.group.WORLD
    assert group is not None
    if args.vllm_ops:
        torch.ops.load_library(str(next(args.vllm_ops.glob("**/_C_stable_libtorch.abi3.so"))))
    shared = symmetric_memory.empty(max(ROWS) * max(COLUMNS), dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(shared, group)
    memory = QuickReduce.over(group, device, inbox_bytes=args.inbox_mib << 20)
    ranks = groups.connect("tp", group, device, memory=memory)
    measurement = Measurement(device)

    def say(line: str) -> None:
        if rank == 0:
            print(f"{time.time() - began:4.0f} s  {line}", flush=True)

    say(f"{world} ranks are there")
    table: list[dict[str, Any]] = []
    for columns in (COLUMNS[-1],) if args.sweep else COLUMNS:
        for rows in SWEEP_ROWS if args.sweep else ROWS:
            cell = Cell(rows, columns, ranks, shared, bool(args.vllm_ops))
            if args.sweep:
                us = cell.sweep(measurement, args.codec)
            else:
                us = cell.measure(measurement, args.codec)
                us["speed_up"] = round(us["separate"] / us["fused"], 2)
            table.append({"rows": rows, "columns": columns, "us": us})
            say(f"{rows:5} x {columns}  " + "  ".join(f"{name} {value:.1f}" for name, value in us.items()))
            memory.check()
    if rank == 0:
        name = f"reduce_norm_quant_{'sweep_' * args.sweep}tp{world}_{hardware.detect(device).arch}"
        result = {"world": world, "norm_and_quant": "vLLM's" if args.vllm_ops else "ours", "rows": table}
        print("written to", harness.write(name, result))
        if args.sweep:
            print("crossovers written to", write_crossovers(table, world, args.codec))
    dist.barrier()
    dist.destroy_process_group()


def plot() -> None:
    """Draws the speed-up over the separate operators, a panel a number of ranks."""
    import matplotlib.pyplot as plt

    from benchmarks._markdown import load, measured_on

    files = sorted(harness.RESULTS.glob("reduce_norm_quant_tp*.json"))
    figure, axes = plt.subplots(1, len(files), figsize=(5.5 * len(files), 4.2), sharey=True, squeeze=False)
    for axis, file in zip(axes[0], files, strict=True):
        result = load(file.name)
        for columns in dict.fromkeys(row["columns"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["columns"] == columns]
            for base, style in (("separate", "-"), ("two_kernels", ":")):
                ratios = [row["us"][base] / row["us"]["fused"] for row in rows]
                axis.plot([row["rows"] for row in rows], ratios, style, marker=".", label=f"{columns}: {base} / fused")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{result['world']} GPUs\n{measured_on(result)}", fontsize=7)
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("times as fast as separate operators")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle("All-reduce, residual, RMSNorm and per-token FP8 in one kernel", fontsize=10)
    figure.tight_layout()
    figure.savefig(harness.RESULTS / "reduce_norm_quant_sm_90.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count(), help="ranks, one GPU each")
    parser.add_argument("--vllm-ops", type=Path, help="folder that holds vLLM's _C_stable_libtorch.abi3.so")
    parser.add_argument("--codec", choices=[name for name in CODECS if name != "FP"], help="a codec to be timed too")
    parser.add_argument("--inbox-mib", type=int, default=64, help="MiB that one kernel carries")
    parser.add_argument("--sweep", action="store_true", help="time launch configurations, and find crossovers")
    parser.add_argument("--plot", action="store_true", help="draw the results")
    args = parser.parse_args()
    if args.plot:
        return plot()
    compile_all(kernels_of(args.world, args.codec, args.sweep))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            rank_main, (args.world, f"file://{folder}/rendezvous", args), nprocs=args.world, join=True
        )


if __name__ == "__main__":
    main()
