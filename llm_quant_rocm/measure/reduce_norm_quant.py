# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual, RMSNorm and per-token FP8 as one kernel against the separate operators, on the GPUs of a host.

`separate` is the fastest all-reduce of this run (NCCL's, torch's symmetric memory by one shot and two, QuickReduce's by
FP), then add and RMSNorm, then per-token quantization: vLLM's kernels where they are loaded, else ours; `two_kernels`
is the same all-reduce and our add, norm and quantization in one kernel. Inputs of torch's symmetric memory are there
already, which spares it the copy that engines make. `fused` is the fastest that `comm.reduce_norm_quant` can choose,
which is `two_kernels`, `one_shot` or `two_shot`, and `planned` what it does choose now. With a codec, `separate_CODEC`,
`one_shot_CODEC` and `two_shot_CODEC` send by it.

Microseconds a call: the slowest rank's median of replays of a graph of several calls, begun together.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.comm import reduce_norm_quant as groups
from llm_quant_rocm.comm.crossovers import crossovers
from llm_quant_rocm.comm.policy import Algorithm
from llm_quant_rocm.comm.quick_reduce import LAMPORT_BYTES, QuickReduce
from llm_quant_rocm.formats.fp8 import for_device
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Target
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.kernels import quick_reduce
from llm_quant_rocm.kernels import reduce_norm_quant as kernels
from llm_quant_rocm.measure.ranks import Report, compile_together, on_every_rank, slowest

COLUMNS = (4096, 7168, 8192)
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
# Beyond this much for each rank but one, everything to everybody is out of the question.
ONE_SHOT_BYTES = 16 << 20
LEAST_CODEC_BYTES = 1 << 20
SWEEP_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
CONFIGS_ROWS = (1, 64, 1024, 4096)
CONFIGS = [(256, 132), (256, 264), (256, 396), (512, 132), (512, 264), (1024, 132)]
_MOST_CALLS, _REPLAY_MS = 100, 5.0  # of a graph
FP = CODECS["FP"]
LOST_AFTER = 30.0  # seconds; ranks compile what the pool did not in their first calls


def measure(
    world: int,
    heard: Report,
    columns: Sequence[int] = COLUMNS,
    rows: Sequence[int] = ROWS,
    codec: str | None = None,
    vllm_library: Path | None = None,
    inbox_bytes: int = 64 << 20,
    sweep: bool = False,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """Every number of rows of every width: {"world": ..., "norm_and_quant": who, "rows": [...]}, times in microseconds.

    Args:
        world: GPUs, 2 to 8.
        heard: is told ("compiled", number of kernels) and ("row", {"rows": ..., "columns": ..., "us": {...}}).
        codec: one to be timed too.
        vllm_library: vLLM's operators, for their norm and quantization.
        inbox_bytes: that one kernel carries.
        sweep: what can be chosen and other launch configurations of it, and nothing else, at `SWEEP_ROWS` of the last
            width: what `entries` needs.
        seconds: after which the ranks are ended, with the rows that there are; compilation counts.
    """
    result: dict[str, Any] = {"world": world, "norm_and_quant": "vLLM's" if vllm_library else "ours", "rows": []}

    def keep(word: str, what: Any) -> None:
        if word == "row":
            result["rows"].append(what)
        heard(word, what)

    end = time.monotonic() + seconds
    columns, rows = (columns[-1:], SWEEP_ROWS) if sweep else (tuple(columns), tuple(rows))
    heard("compiled", compile_together(_compile, _kernels(world, columns, rows, codec, sweep)))
    arguments = (columns, rows, codec, vllm_library, inbox_bytes, sweep)
    on_every_rank(_rank, world, arguments, keep, end - time.monotonic())
    return result


def entries(result: Mapping[str, Any], codec: str | None = None) -> list[dict[str, Any]]:
    """What serves which size best, as `comm.crossovers.merged` takes it, of a sweep with that codec."""
    codecs = tuple(dict.fromkeys(("FP", codec or "FP")))
    names = {"two_kernels": "NCCL"}  # stands for what is not ours
    for by in codecs:
        names |= {name_of(Algorithm.ONE_SHOT, by): f"{by} one-shot", name_of(Algorithm.TWO_SHOT, by): by}
    rows = [
        {"bytes": 2 * row["rows"] * row["columns"], "us": {names[n]: t for n, t in row["us"].items() if n in names}}
        for row in result["rows"]
    ]
    return [crossovers(rows, result["world"], by) for by in codecs]


def choices(nbytes: int, world: int, codec: str | None) -> list[tuple[Algorithm, str]]:
    """What of the fused kernels is timed for an x of `nbytes`."""
    codecs = ["FP", *([codec] if codec and nbytes >= LEAST_CODEC_BYTES else [])]
    shots = [Algorithm.ONE_SHOT] * (world == 2 or nbytes * (world - 1) <= ONE_SHOT_BYTES) + [Algorithm.TWO_SHOT]
    return [(shot, by) for by in codecs for shot in shots]


def name_of(algorithm: Algorithm, codec: str) -> str:
    """What the time of a fused kernel is called."""
    return f"{algorithm}{'' if codec == 'FP' else f'_{codec}'}"


def _fits(threads: int, columns: int, codec: str) -> bool:
    """Whether each of so many lanes has something to encode."""
    return codec == "FP" or threads * (16 if CODECS[codec].planes[0] == 8 else 32) <= columns


def _kernels(
    world: int, columns: Sequence[int], rows: Sequence[int], codec: str | None, sweep: bool
) -> list[tuple[int, int, str, str, int, int]]:
    """The arguments of `_compile` for all that a run times."""
    fact = hardware.detect(torch.device("cuda", 0))
    found = set()
    for width in columns:
        for count in rows:
            for algorithm, by in choices(2 * count * width, world, codec):
                configs = [kernels.default_config(count, width, CODECS[by], fact)]
                if sweep and count in CONFIGS_ROWS:
                    configs += [kernels.Config(*config) for config in CONFIGS if _fits(config[0], width, by)]
                for config in configs:
                    few = kernels.without_flags(count, width, CODECS[by], world, LAMPORT_BYTES, config)
                    lamport_bytes = LAMPORT_BYTES if few else 0
                    found.add((world, width, str(algorithm), by, config.threads, lamport_bytes))
    return sorted(found)


class _CompileOnly:
    """Stands in for a Triton kernel: a launch compiles it and puts it into Triton's cache."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


@contextmanager
def compile_only() -> Iterator[None]:
    """Launches of the fused kernels compile them for the current GPU into Triton's cache, and launch nothing."""
    names = ("reduce_norm_one_shot_kernel", "reduce_norm_two_shot_kernel", "reduce_norm_lamport_kernel")
    stand_ins: dict[str, Any] = {name: _CompileOnly(getattr(kernels, name)) for name in names}
    with patch.multiple(kernels, **stand_ins):
        yield


def _compile(world: int, columns: int, shot: str, codec: str, threads: int, lamport_bytes: int) -> None:
    """Compiles the fused kernel of one kind, in a process of its own."""
    device = torch.device("cuda", 0)
    peers = torch.zeros(world, dtype=torch.int64, device=device)
    state = torch.zeros(quick_reduce.STATE_WORDS, dtype=torch.int32, device=device)
    report = torch.zeros(1, dtype=torch.int64, device=device)
    box = quick_reduce.Mailbox(peers, state, report, 0, 1 << 24, 64, lamport_bytes)
    x = torch.zeros(2, columns, dtype=torch.bfloat16, device=device)
    target = Target(Quantization.FP8_PER_TOKEN, for_device(device), normed=False)
    config = kernels.Config(threads, programs=132)
    with compile_only():
        getattr(kernels, shot)(x, x, Norm(x[0]), target, target.empty(x), box, CODECS[codec], config, 1000)


def calls_of_a_graph(call_ms: float) -> int:
    """How many calls of about `call_ms` a graph holds, of which a replay takes _REPLAY_MS, but for the least of two
    calls.

    The ranks' hosts begin a replay some microseconds apart, and who is first waits for the last in its first call: of
    20 calls of some microseconds each that is a good part, and another one in every run. So a graph holds many of them.
    """
    return max(2, min(_MOST_CALLS, int(_REPLAY_MS / call_ms)))


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
        guess = slowest(start.elapsed_time(end) / 3, self.shared.device)  # milliseconds, launches included
        calls = calls_of_a_graph(guess)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread asks the driver meanwhile
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
        return round(slowest(statistics.median(times), self.shared.device), 2)

    def measure(self, codec: str | None) -> dict[str, float]:
        us = {name: self.time(call) for name, call in self.all_reduces().items()}
        best = min(us, key=us.__getitem__)
        reduce = self.all_reduces()[best]
        us["separate"] = self.time(lambda: self.norm_and_quant(reduce()))
        us["two_kernels"] = self.time(lambda: ops.rms_norm_quant_fp8(reduce(), self.weight, 1e-6, self.residual))
        for algorithm, by in choices(self.nbytes, self.ranks.world, codec):
            us[name_of(algorithm, by)] = self.time(self.fused(algorithm, by))
        us["fused"] = min(us[name] for name in ("two_kernels", "one_shot", "two_shot") if name in us)
        chosen = self.ranks.plan.choose(self.nbytes)
        planned = name_of(chosen.algorithm, chosen.codec.name) if chosen.codec else "two_kernels"
        if planned in us:  # a codec of the user's crossovers may be another than the one that is timed
            us["planned"] = us[planned]
        if codec and self.nbytes >= LEAST_CODEC_BYTES:
            memory = self.ranks.memory
            assert memory is not None
            us[f"separate_{codec}"] = self.time(lambda: self.norm_and_quant(memory.all_reduce(self.x, CODECS[codec])))
        return us

    def sweep(self, codec: str | None) -> dict[str, float]:
        """What can be chosen, and other launch configurations of it."""
        reduces = {name: self.time(call) for name, call in self.all_reduces().items()}
        reduce = self.all_reduces()[min(reduces, key=reduces.__getitem__)]
        us = {"two_kernels": self.time(lambda: ops.rms_norm_quant_fp8(reduce(), self.weight, 1e-6, self.residual))}
        for algorithm, by in choices(self.nbytes, self.ranks.world, codec):
            us[name_of(algorithm, by)] = self.time(self.fused(algorithm, by))
            for threads, programs in CONFIGS if self.rows in CONFIGS_ROWS else ():
                if _fits(threads, self.columns, by):
                    call = self.fused(algorithm, by, kernels.Config(threads, programs))
                    us[f"{name_of(algorithm, by)} {threads}x{programs}"] = self.time(call)
        return us


def _rank(
    rank: int,
    report: Report,
    columns: Sequence[int],
    rows: Sequence[int],
    codec: str | None,
    vllm_library: Path | None,
    inbox_bytes: int,
    sweep: bool,
) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    device, group = torch.device("cuda", rank), dist.group.WORLD
    assert group is not None
    if vllm_library:
        torch.ops.load_library(str(vllm_library))
    shared = symmetric_memory.empty(max(rows) * max(columns), dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(shared, group)
    memory = QuickReduce.over(group, device, inbox_bytes, LOST_AFTER)
    ranks = groups.connect("tp", group, device, memory=memory)
    for width in columns:
        for count in rows:
            cell = Cell(count, width, ranks, shared, vllm_library is not None)
            if sweep:
                us = cell.sweep(codec)
            else:
                us = cell.measure(codec)
                us["speed_up"] = round(us["separate"] / us["fused"], 2)
            memory.check()
            report("row", {"rows": count, "columns": width, "us": us})
