# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce, norm and quantization between GPUs: every bit of the reference on every rank, in graphs too."""

import itertools
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from llm_quant_rocm import ops, reference
from llm_quant_rocm.comm import norm_ranks
from llm_quant_rocm.comm import reduce_norm_quant as ranks_of
from llm_quant_rocm.comm.group import Members as EngineMembers
from llm_quant_rocm.comm.policy import Algorithm, Choice, Settings
from llm_quant_rocm.comm.quick_reduce import QuickReduce
from llm_quant_rocm.comm.reduce_norm_quant import Plan, Ranks
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Result, ScaleLayout, Target
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.kernels import keys
from llm_quant_rocm.kernels.reduce_norm_quant import Config
from llm_quant_rocm.measure.reduce_norm_quant import compile_only
from tests.comm import processes
from tests.inputs import assert_same, nasty_rows, random_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WORLDS = [
    pytest.param(n, marks=pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"needs {n} GPUs"))
    for n in (2, 4, 8)
]
TARGETS = (
    ("none", "linear", True),
    ("fp8_per_token", "linear", False),
    ("fp8_static", "linear", True),
    ("nvfp4", "linear", False),
    ("nvfp4", "128x4", False),
    ("nvfp4", "8x4", True),
)
WIDTHS = (16, 2880, 3072, 4096, 5120, 7168, 8208, 12800, 16384)
ONE_SHOT, TWO_SHOT = Plan.always(Algorithm.ONE_SHOT), Plan.always(Algorithm.TWO_SHOT)


def options(quantization: str, layout: str, normed: bool) -> dict[str, object]:
    given = {"fp8_static": 0.0137, "nvfp4": 321.7}.get(quantization)
    scale = None if given is None else torch.full((1,), given, device="cuda")
    return {"quantization": quantization, "layout": layout, "normed": normed, "scale": scale, "eps": 1e-5}


def inputs(world: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """x of every rank: nasty rows first, other ones on every rank."""
    nasty = nasty_rows(width, dtype)
    return [
        torch.cat([nasty.roll(5 * rank + seed, 0), random_rows(rows, width, dtype, 100 * seed + rank)])[:rows]
        for rank in range(world)
    ]


def expect(
    xs: list[torch.Tensor], residual: torch.Tensor | None, weight: torch.Tensor, bias: float, plan: Plan, kind: dict
) -> Result:  # fmt: skip
    target = Target(
        Quantization(kind["quantization"]),
        fp8.for_device(torch.device("cuda")),
        ScaleLayout(kind["layout"]),
        kind["normed"],
    )
    scale = None if kind["scale"] is None else kind["scale"].to(xs[0].device)
    choice = plan.choose(xs[0].numel() * 2)
    assert choice.codec is not None
    shots = 2 if choice.algorithm is Algorithm.TWO_SHOT else 1
    return reference.reduce_norm_quant(
        xs, residual, Norm(weight, kind["eps"], bias, scale), target, choice.codec, shots
    )


def assert_results(found: Result, expected: Result, what: str) -> None:
    for name, part, whole in zip(Result._fields, found, expected, strict=True):
        assert (part is None) == (whole is None), f"{what}: {name}"
        if part is not None and whole is not None:
            try:
                assert_same(part, whole)
            except AssertionError as error:
                raise AssertionError(f"{what}: {name}: {error}") from None


class Members:
    """This rank's peer memory, under one name with one plan after the other."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None = None) -> None:
        torch.cuda.set_device(rank)
        keys.settle()
        self.cases, self.compiling = 0, False
        self.group = group or dist.group.WORLD
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.memory = QuickReduce.over(self.group, torch.device("cuda", rank), inbox_bytes=8 << 20)

    def use(self, plan: Plan, config: Config | None = None) -> None:
        ranks_of.disconnect("tp")
        ranks = Ranks(self.world, plan, self.group, self.memory, config=config)
        ranks_of._NAMED["tp"] = ranks

    def compiled_together(self, cases: Callable[["Members"], None]) -> None:
        """Runs `cases`, whose kernels the ranks compile first, each its share for all: seconds each, of which there are
        dozens."""
        with compile_only():
            self.compiling = True
            cases(self)
        self.compiling = False
        dist.barrier(self.group)
        cases(self)
        self.memory.check()

    def check(
        self, rows: int, width: int, plan: Plan, kind: tuple[str, str, bool], seed: int = 0, **more: object
    ) -> None:
        self.cases += 1
        # Another rank's share; those of a round begin with another rank each time.
        if self.compiling and (self.cases + self.cases // self.world) % self.world != self.rank:
            return
        dtype, bias = (torch.bfloat16, torch.float16)[seed % 2], float(seed % 2)
        xs = inputs(self.world, rows, width, dtype, seed)
        weight = 1 - bias + random_rows(1, width, torch.float32, 7)[0].clamp(-4, 4) / 8
        weight = weight.to((dtype, torch.float32)[seed % 2])
        residual = None if seed % 3 == 2 else random_rows(rows, width, dtype, seed + 50)
        self.use(plan, **more)  # type: ignore[arg-type]
        chosen = options(*kind)
        found = ops.reduce_norm_quant(
            xs[self.rank].cuda(), weight.cuda(), None if residual is None else residual.cuda(), group="tp",
            weight_bias=bias, **chosen,
        )  # fmt: skip
        if self.compiling:
            return
        what = f"{rows} rows of {width}, {plan}, {kind}, {more}, seed {seed}, rank {self.rank}"
        assert_results(found, expect(xs, residual, weight, bias, plan, chosen), what)


def every_width(rank: int) -> None:
    Members(rank).compiled_together(every_width_cases)


def every_width_cases(members: Members) -> None:
    for index, width in enumerate(WIDTHS):
        for shot, plan in enumerate((ONE_SHOT, TWO_SHOT)):
            members.check(30 + index, width, plan, TARGETS[(index + 3 * shot) % len(TARGETS)], seed=index)
        members.check(1, width, TWO_SHOT, TARGETS[index % len(TARGETS)], seed=index)


def every_target_and_codec(rank: int) -> None:
    Members(rank).compiled_together(every_target_and_codec_cases)


def every_target_and_codec_cases(members: Members) -> None:
    for index, kind in enumerate(TARGETS):
        members.check(7, 4096, ONE_SHOT, kind, seed=index)
        members.check(40, 4096, TWO_SHOT, kind, seed=index)
    for index, codec in enumerate(CODECS.values()):
        for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT):
            members.check(40, 2880, Plan.always(algorithm, codec), TARGETS[1], seed=index)


def every_launch(rank: int) -> None:
    """Other launch configurations, and messages of several kernels, have the same bits."""
    Members(rank).compiled_together(every_launch_cases)


def every_launch_cases(members: Members) -> None:
    for threads, programs in ((64, 3), (128, 200), (256, 1), (512, 7), (1024, 132)):
        members.check(300, 5120, TWO_SHOT, TARGETS[1], config=Config(threads, programs))
        members.check(40, 2880, ONE_SHOT, TARGETS[4], config=Config(threads, programs))
    members.check(600, 8192, ONE_SHOT, TARGETS[5])
    members.check(1101, 8192, TWO_SHOT, TARGETS[4])


def many_rows(rank: int) -> None:
    """flashinfer's token counts, to the bit: rows that programs take several of, and a single one. The reference runs
    on the GPU, whose bits are the CPU's."""
    members = Members(rank)
    for width, dtype, kind, bias in (
        (1024, torch.float16, TARGETS[2], 1.0), (7168, torch.bfloat16, TARGETS[4], 0.0),
    ):  # fmt: skip
        weight, chosen = torch.randn(width, generator=torch.Generator().manual_seed(1)).to(dtype).cuda(), options(*kind)
        chosen["eps"] = 1e-3
        for rows, plan in itertools.product((1, 15, 128, 256, 998, 2048), (ONE_SHOT, TWO_SHOT)):
            generator = torch.Generator("cuda").manual_seed(rows)
            *xs, residual = torch.randn(
                members.world + 1, rows, width, device="cuda", generator=generator
            ).to(dtype).unbind()  # fmt: skip
            members.use(plan)
            found = ops.reduce_norm_quant(xs[rank], weight, residual, group="tp", weight_bias=bias, **chosen)
            whole = expect(xs, residual, weight, bias, plan, chosen)
            assert_results(found, whole, f"{rows} rows of {width}, {plan}, rank {rank}")
    members.memory.check()


def two_groups(rank: int) -> None:
    """Two tensor-parallel groups side by side, each with memory of its own."""
    groups = [dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3))]
    members = Members(rank, groups[rank // 2])
    for index, (rows, width) in enumerate(((1, 1024), (40, 7168), (200, 1024))):
        for plan in (ONE_SHOT, TWO_SHOT):
            members.check(rows, width, plan, TARGETS[1], seed=index + 6 * (rank // 2))
    members.memory.check()


def graphs(rank: int) -> None:
    """Graphs of several calls, replayed with changing inputs, between eager calls of other sizes."""
    members, width = Members(rank), 4096
    steps = ((0, Algorithm.ONE_SHOT, "FP"), (65537, Algorithm.TWO_SHOT, "FP"), (1 << 20, Algorithm.TWO_SHOT, "FP4"))
    plan = Plan(tuple((start, Choice(algorithm, CODECS[codec])) for start, algorithm, codec in steps))
    members.use(plan)
    kind, weight = options(*TARGETS[1]), 1 + random_rows(1, width, torch.bfloat16, 7)[0].clamp(-4, 4) / 8
    on_gpu = weight.cuda()

    def layers(x: torch.Tensor, residual: torch.Tensor) -> list[Result]:
        first = ops.reduce_norm_quant(x, on_gpu, residual, group="tp", **kind)
        return [first, ops.reduce_norm_quant(x, on_gpu, first.residual, group="tp", **kind)]

    def expected(xs: list[torch.Tensor], residual: torch.Tensor) -> list[Result]:
        first = expect(xs, residual, weight, 0.0, plan, kind)
        return [first, expect(xs, first.residual, weight, 0.0, plan, kind)]

    captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, list[Result]]] = {}
    for rows in (1, 24, 150):
        x, residual = torch.zeros(2, rows, width, dtype=torch.bfloat16, device="cuda").unbind()
        layers(x, residual)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread asks the driver meanwhile
            outs = layers(x, residual)
        captured[rows] = graph, x, residual, outs
    for turn in range(4):
        for rows, (graph, x, residual, outs) in captured.items():
            seed = 10 * turn + rows
            xs = inputs(members.world, rows, width, torch.bfloat16, seed)
            added = random_rows(rows, width, torch.bfloat16, seed + 1)
            x.copy_(xs[rank])
            residual.copy_(added)
            for _ in range(1 + turn):  # replays without a pause, while other ranks may be late
                graph.replay()
            torch.cuda.synchronize()
            for index, (found, whole) in enumerate(zip(outs, expected(xs, added), strict=True)):
                assert_results(found, whole, f"turn {turn}, {rows} rows, layer {index}, rank {rank}")
        members.check(5 + turn, 512, TWO_SHOT, TARGETS[0], seed=turn)
        members.use(plan)
    members.memory.check()


class Pool:
    """Inputs of so many rows with their results, which calls take in turn; counts wrong bytes, all on the GPU."""

    def __init__(self, members: Members, rows: int, width: int, plan: Plan) -> None:
        generator = torch.Generator("cuda").manual_seed(rows * width)
        shape = (4, members.world + 1, rows, width)
        *xs, self.residuals = torch.randn(shape, device="cuda", generator=generator).bfloat16().unbind(1)
        for x in xs:
            x[..., 32:64], x[..., 64:96] = 0.0, -0.0
        self.weight = torch.randn(width, device="cuda", generator=generator).bfloat16()
        self.kind, self.plan = options(*TARGETS[1]), plan
        self.xs, self.wrong = xs[members.rank], torch.zeros((), dtype=torch.int64, device="cuda")
        self.expected = [
            expect([x[turn] for x in xs], self.residuals[turn], self.weight, 0.0, plan, self.kind) for turn in range(4)
        ]

    def reduce(self, x: torch.Tensor, residual: torch.Tensor) -> Result:
        return ops.reduce_norm_quant(x, self.weight, residual, group="tp", **self.kind)

    def compare(self, turn: int, found: Result) -> None:
        """Waits for nothing."""
        expected = self.expected[turn % 4]
        for part, whole in ((found.residual, expected.residual), (found.codes, expected.codes)):
            assert part is not None and whole is not None
            self.wrong += (part.view(torch.uint8) != whole.view(torch.uint8)).sum()


def replays_without_flags(rank: int) -> None:
    """A thousand times one of some graphs of few rows, whose inputs change, or a call by flags, while ranks are late at
    random: nobody waits for the others between, so that they run ahead as far as they may."""
    members, width = Members(rank), 4096
    plan = Plan(((0, ONE_SHOT.choose(0)), (1 << 20, TWO_SHOT.choose(0))))
    members.use(plan)
    by_flags = Pool(members, 200, width, plan)
    by_flags.reduce(by_flags.xs[0], by_flags.residuals[0])
    message = by_flags.xs[0].clone()
    members.memory.all_reduce(message, CODECS["FP4"])
    captured: list[tuple[Pool, torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, list[Result]]] = []
    for rows in (1, 5, 64):
        pool = Pool(members, rows, width, plan)
        x, residual = torch.zeros(2, rows, width, dtype=torch.bfloat16, device="cuda").unbind()
        pool.reduce(x, residual)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = [pool.reduce(x, residual) for _ in range(3)]
        captured.append((pool, graph, x, residual, outs))
    together, alone = random.Random(0), random.Random(1 + rank)
    for turn in range(1000):
        if alone.random() < 0.2:
            torch.cuda._sleep(alone.randrange(200_000))
        kind = together.choice((0, 0, 1, 1, 2, 2, 3, 4))
        if kind < 3:
            pool, graph, x, residual, outs = captured[kind]
            x.copy_(pool.xs[turn % 4])
            residual.copy_(pool.residuals[turn % 4])
            graph.replay()
            for found in outs:
                pool.compare(turn, found)
        elif kind == 3:
            by_flags.compare(turn, by_flags.reduce(by_flags.xs[turn % 4], by_flags.residuals[turn % 4]))
        else:
            members.memory.all_reduce(message, CODECS["FP4"])
    torch.cuda.synchronize()
    members.memory.check()
    assert not any(int(pool.wrong) for pool in (by_flags, *(pool for pool, *_ in captured)))


def sizes_without_flags(rank: int) -> None:
    """Random numbers of rows of several widths one after another by either shot, while ranks are late at random."""
    members = Members(rank)
    members.use(ONE_SHOT)
    together, alone = random.Random(2), random.Random(3 + rank)
    pools = {
        (rows, width, plan): Pool(members, rows, width, plan)
        for width in (2880, 4096, 7168, 8192)
        for rows in (1, together.randint(2, 63), 64)
        for plan in (ONE_SHOT, TWO_SHOT)
    }
    for turn in range(3000):
        pool = pools[together.choice(list(pools))]
        members.use(pool.plan)
        if alone.random() < 0.1:
            torch.cuda._sleep(alone.randrange(100_000))
        pool.compare(turn, pool.reduce(pool.xs[turn % 4], pool.residuals[turn % 4]))
    torch.cuda.synchronize()
    members.memory.check()
    wrong = {size: int(pool.wrong) for size, pool in pools.items() if int(pool.wrong)}
    assert not wrong, wrong


def a_rank_that_does_not_come(rank: int, plan: Plan) -> None:
    """The others name it, not before the time that they were given, and nothing hangs."""
    members = Members(rank)
    members.memory = QuickReduce.over(members.group, torch.device("cuda", rank), 8 << 20, timeout=3.0)
    for rows in (1, 64):
        members.use(plan)
        pool = Pool(members, rows, 4096, plan)
        if rows == 1:
            pool.compare(0, pool.reduce(pool.xs[0], pool.residuals[0]))
        torch.cuda.synchronize()
        assert not int(pool.wrong)
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.monotonic()
        if rank != 1:
            pool.reduce(pool.xs[0], pool.residuals[0])
            torch.cuda.synchronize()
            seconds = time.monotonic() - begin
            print(f"rank {rank} waited {seconds:.1f} s of 3 for {rows} rows")
            assert rows == 64 or 3.0 <= seconds < 60  # the second time nobody waits
            with pytest.raises(RuntimeError, match="rank 1 of the group did not arrive in call 2, phase 1"):
                members.memory.check()
        dist.barrier()


def a_rank_that_does_not_come_one_shot(rank: int) -> None:
    a_rank_that_does_not_come(rank, ONE_SHOT)


def a_rank_that_does_not_come_two_shot(rank: int) -> None:
    a_rank_that_does_not_come(rank, TWO_SHOT)


def connected_by_an_engine(rank: int) -> None:
    """As vLLM and SGLang connect: over a gloo group, while the GPU and 16 bits are the defaults."""
    device, cpu_group = torch.device("cuda", rank), dist.new_group(backend="gloo")
    torch.cuda.set_device(device)
    keys.settle()
    engine = {"engine": "an engine", "name": "tp:0", "cpu_group": cpu_group, "device_group": dist.group.WORLD}
    members = EngineMembers(
        **engine, device=device, same_host=lambda group, source_rank: [True] * dist.get_world_size(group),
        visible_devices="CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
    kind = options(*TARGETS[1])
    xs, weight = inputs(dist.get_world_size(), 20, 2880, torch.bfloat16, 1), torch.ones(2880, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        assert norm_ranks.connect(members, Settings(), None, None, None) == "tp:0"
        ranks = ranks_of.ranks_named("tp:0")
        assert ranks.memory is not None and ranks.memory.mailbox.report.is_pinned()
        found = ops.reduce_norm_quant(xs[rank].cuda(), weight.cuda(), group="tp:0", **kind)
    torch.set_default_dtype(torch.float32)
    assert_results(found, expect(xs, None, weight, 0.0, ranks.plan, kind), f"rank {rank}")
    ranks.memory.check()
    dist.barrier()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "function",
    [
        every_width, every_target_and_codec, every_launch, many_rows, two_groups, graphs, replays_without_flags,
        sizes_without_flags, a_rank_that_does_not_come_one_shot, a_rank_that_does_not_come_two_shot,
        connected_by_an_engine,
    ],
)  # fmt: skip
def test_ranks(world: int, function: Callable[[int], None]) -> None:
    if function is two_groups and world != 4:
        pytest.skip("two groups of two")
    # Spawned: the driver does not survive a fork of a process that asked for GPUs, as this module does.
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, Path(folder) / "rendezvous", "nccl", function, ())
        multiprocessing.start_processes(processes._rank, arguments, nprocs=world, start_method="spawn")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", TARGETS, ids=["-".join(map(str, kind)) for kind in TARGETS])
def test_one_rank(width: int, kind: tuple[str, str, bool]) -> None:
    chosen = options(*kind)
    weight = 1 + random_rows(1, width, torch.float32, 7)[0].clamp(-4, 4) / 8
    for dtype in (torch.bfloat16, torch.float16):
        xs = inputs(1, 40, width, dtype, 3)
        for residual in (None, random_rows(40, width, dtype, 4)):
            added = None if residual is None else residual.cuda()
            found = ops.reduce_norm_quant(xs[0].cuda(), weight.cuda(), added, weight_bias=1.0, **chosen)
            assert_results(found, expect(xs, residual, weight, 1.0, ONE_SHOT, chosen), f"{width}, {dtype}")


@pytest.mark.parametrize("scale", [-0.4, -321.7, -5000.0])
def test_a_negative_scale(scale: float) -> None:
    """NVFP4's block scales are negative then, and no further from zero than 448."""
    chosen = options("nvfp4", "linear", True) | {"scale": torch.full((1,), scale, device="cuda")}
    xs, weight = inputs(1, 40, 2880, torch.bfloat16, 3), torch.ones(2880)
    found = ops.reduce_norm_quant(xs[0].cuda(), weight.cuda(), **chosen)
    assert_results(found, expect(xs, None, weight, 0.0, ONE_SHOT, chosen), f"{scale}")


@pytest.mark.parametrize("width", [2880, 4096, 8192])
def test_one_rank_is_the_separate_operators(width: int) -> None:
    """Bit for bit what rms_norm_quant_fp8 gives."""
    x, residual = random_rows(2 * 500, width, torch.bfloat16).cuda().chunk(2)
    weight = 1 + random_rows(1, width, torch.bfloat16, 7)[0].cuda() / 8
    codes, scales, total = ops.rms_norm_quant_fp8(x, weight, 1e-6, residual)
    found = ops.reduce_norm_quant(x, weight, residual)
    for part, whole in zip((found.codes, found.scales, found.residual), (codes, scales, total), strict=True):
        assert part is not None
        assert_same(part, whole)
