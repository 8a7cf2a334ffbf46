# SPDX-License-Identifier: Apache-2.0
"""reduce_norm_quant between gloo processes, the names of ranks, and the kernels behind them on a virtual GPU."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from llm_quant_rocm import ops, reference
from llm_quant_rocm.comm import quick_reduce
from llm_quant_rocm.comm import reduce_norm_quant as ranks_of
from llm_quant_rocm.comm.policy import ENGINE, Algorithm, Choice
from llm_quant_rocm.comm.reduce_norm_quant import FP, Plan, Ranks, connect, disconnect, predicted, ranks_named
from llm_quant_rocm.comm.setup_errors import NoPeerMemory
from llm_quant_rocm.formats.fp8 import OCP
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, ScaleLayout, Target
from llm_quant_rocm.formats.wire import CODECS, Codec
from llm_quant_rocm.hardware import nvidia
from tests.amd import tritons
from tests.amd.isolated import call
from tests.comm.processes import run_ranks
from tests.inputs import assert_same, nasty_rows, random_rows

CPU = torch.device("cpu")
INT4 = CODECS["INT4"]
ONE_SHOT, TWO_SHOT = Plan.always(Algorithm.ONE_SHOT), Plan.always(Algorithm.TWO_SHOT)
TARGETS = (
    Target(Quantization.FP8_PER_TOKEN, normed=False),
    Target(Quantization.NVFP4, layout=ScaleLayout.SWIZZLED_128X4),
    Target(),
)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """No name is left behind."""
    before = dict(ranks_of._NAMED)
    yield
    ranks_of._NAMED.clear()
    ranks_of._NAMED.update(before)


def x_of(rank: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([nasty_rows(width, dtype).roll(5 * rank, 0), random_rows(rows, width, dtype, rank)])[:rows]


def shots_and_codec(plan: Plan, x: torch.Tensor) -> tuple[Codec, int]:
    """The last arguments of the reference."""
    choice = plan.choose(x.numel() * x.element_size())
    assert choice.codec is not None
    return choice.codec, 2 if choice.algorithm is Algorithm.TWO_SHOT else 1


def every_call(rank: int, world: int) -> None:
    from tests.amd.operators.reduce_norm_quant import assert_results

    group = dist.group.WORLD
    assert group is not None
    ranks = connect("tp:0", group, CPU, INT4)
    assert ranks.memory is None and ranks.obstacle == "cpu has no peer memory"
    plans = (ranks.plan, *(Plan.always(shots, INT4) for shots in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)), TWO_SHOT)
    for (index, (rows, width)), plan in itertools.product(enumerate(((1, 32), (40, 272), (7, 2880))), plans):
        ranks_of._NAMED["tp:0"] = Ranks(world, plan, group, None, "this is a test")
        target, dtype = TARGETS[index], (torch.bfloat16, torch.float16)[index % 2]
        xs = [x_of(peer, rows, width, dtype) for peer in range(world)]
        weight, residual = torch.linspace(-2, 2, width), random_rows(rows, width, dtype, 9)
        scale = torch.tensor([321.7]) if target.quantization is Quantization.NVFP4 else None
        found = ops.reduce_norm_quant(
            xs[rank], weight, residual, group="tp:0", eps=1e-5, weight_bias=1.0, quantization=target.quantization,
            scale=scale, layout=target.layout, normed=target.normed,
        )  # fmt: skip
        norm = Norm(weight, 1e-5, 1.0, scale)
        assert_results(found, reference.reduce_norm_quant(xs, residual, norm, target, *shots_and_codec(plan, xs[0])))
    disconnect("tp:0")


def as_of_all(everyone: list[Any], answer: Any, group: Any) -> None:
    everyone[:] = [answer] * len(everyone)


@pytest.mark.parametrize(
    ("error", "obstacle"),
    [
        (NoPeerMemory("GPUs of two kinds"), "GPUs of two kinds"),
        (RuntimeError("cannot be pinned\nand a trace"), "setting it up failed with RuntimeError: cannot be pinned"),
        (AssertionError(), "setting it up failed with AssertionError: no reason given"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_why_there_is_no_peer_memory(error: Exception, obstacle: str, forgotten: None) -> None:
    """Whatever was raised: other ranks wait for this one's answer."""
    with (
        patch.object(ranks_of, "detect", lambda device: nvidia(9, 0)),
        patch.object(quick_reduce.QuickReduce, "over", side_effect=error),
        patch.object(dist, "get_world_size", lambda group: 2),
        patch.object(dist, "all_gather_object", as_of_all),
        patch.object(ranks_of, "RollCall"),
    ):
        ranks = connect("tp:0", MagicMock(), torch.device("cuda", 0))
    assert (ranks.memory, ranks.obstacle) == (None, obstacle)


def one_rank_without_memory(rank: int) -> None:
    given = (None, "its GPU is full") if rank == 1 else (MagicMock(), None)
    with patch.object(ranks_of, "_peer_memory", lambda *arguments: given):
        ranks = connect("tp:0", dist.group.WORLD, CPU)
    assert (ranks.memory, ranks.obstacle) == (None, "its GPU is full")


def test_all_ranks_have_peer_memory_or_none() -> None:
    """Kernels would wait for a rank that sends by the process group."""
    run_ranks(2, one_rank_without_memory)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_have_every_bit_of_the_reference(world: int) -> None:
    run_ranks(world, every_call, world)


def in_the_way_of(case: str) -> None:
    from tests.amd.virtual_gpu import activate

    activate("gfx942")
    globals()[case]()


def messages_of_several_kernels() -> None:
    """Few flags: rows go by several kernels, of which the last pads the scales."""
    from llm_quant_rocm.kernels import reduce_norm_quant as kernels
    from tests.amd.operators.reduce_norm_quant import SMALL, assert_results, norm_of
    from tests.amd.operators.reduce_norm_quant import Ranks as VirtualRanks

    virtual = VirtualRanks(2, 1 << 16, max_tiles=8)
    target = Target(Quantization.NVFP4, layout=ScaleLayout.SWIZZLED_8X4, normed=False)
    norm = norm_of(64, torch.bfloat16, target.quantization)
    xs = [x_of(rank, 21, 64, torch.bfloat16) for rank in range(2)]
    residual = random_rows(21, 64, torch.bfloat16, 9)
    for plan in (ONE_SHOT, TWO_SHOT):
        before = len(virtual.gpu.launches)
        outs = []
        with virtual.gpu.together():
            for rank, box in enumerate(virtual.boxes):
                virtual.gpu.stream = rank
                memory = SimpleNamespace(mailbox=box, device=CPU, max_spins=1_000_000)
                ranks = Ranks(2, plan, None, memory, config=SMALL)  # type: ignore[arg-type]
                outs.append(ranks.reduce_norm_quant(xs[rank], residual, norm, target))
        assert len(virtual.gpu.launches) - before == 2 * 3
        for out in outs:
            assert_results(out, reference.reduce_norm_quant(xs, residual, norm, target, *shots_and_codec(plan, xs[0])))
    with pytest.raises(ValueError, match=r"inboxes of 65536 bytes do not hold 4 rows of 16384 columns in FP from each"):
        kernels.cut(9, 16384, FP, virtual.boxes[0], SMALL, 1)
    memory = SimpleNamespace(mailbox=virtual.boxes[0], device=torch.device("meta"))
    with pytest.raises(ValueError, match="x is on cpu, the group's memory on meta"):
        Ranks(2, TWO_SHOT, None, memory).reduce_norm_quant(xs[0], None, norm, target)  # type: ignore[arg-type]
    tall = Target(Quantization.NVFP4, layout=ScaleLayout.SWIZZLED_128X4, normed=False)
    memory = SimpleNamespace(mailbox=virtual.boxes[0], device=CPU, max_spins=1)
    with pytest.raises(ValueError, match="flags of 8 tiles do not serve 128 rows"):
        Ranks(2, ONE_SHOT, None, memory, config=SMALL).reduce_norm_quant(xs[0], None, norm, tall)  # type: ignore[arg-type]


def test_messages_of_several_kernels() -> None:
    call(tritons.VERSIONS[-1], in_the_way_of, "messages_of_several_kernels")


def what_is_not_aligned_and_what_the_engine_adds_up() -> None:
    """Rows that do not begin at multiples of 16 bytes are copied; the engine's all-reduce has our kernel behind it."""
    from tests.amd.operators.reduce_norm_quant import SMALL, assert_results, norm_of
    from tests.amd.operators.reduce_norm_quant import Ranks as VirtualRanks

    virtual, target = VirtualRanks(2), Target(Quantization.FP8_PER_TOKEN, OCP)
    norm = norm_of(64, torch.bfloat16, target.quantization)
    wide = [random_rows(5, 68, torch.bfloat16, rank) for rank in range(2)]
    views = [lambda x: x[:, :64], lambda x: x.flatten()[4:324].view(5, 64), lambda x: x[:, 4:]]
    for view, shots in itertools.product(views, (1, 2)):
        xs = [view(x) for x in wide]
        outs, plan = [], (ONE_SHOT, TWO_SHOT)[shots - 1]
        with virtual.gpu.together():
            for rank, box in enumerate(virtual.boxes):
                virtual.gpu.stream = rank
                memory = SimpleNamespace(mailbox=box, device=CPU, max_spins=1_000_000)
                ranks = Ranks(2, plan, None, memory, config=SMALL)  # type: ignore[arg-type]
                outs.append(ranks.reduce_norm_quant(xs[rank], None, norm, target))
        for out in outs:
            assert_results(out, reference.reduce_norm_quant(xs, None, norm, target, FP, shots))
    virtual.gpu.stream = 0
    memory = SimpleNamespace(mailbox=virtual.boxes[0], device=CPU)
    engine = Plan(((0, ENGINE),))
    ranks = Ranks(2, engine, None, memory, engine=lambda x: x + x)  # type: ignore[arg-type]
    x, residual = wide[0][:, :64], wide[1][:, :64]
    assert_results(
        ranks.reduce_norm_quant(x, residual, norm, target), reference.norm_quant(x + x, residual, norm, target)
    )


def test_what_is_not_aligned_and_what_the_engine_adds_up() -> None:
    call(tritons.VERSIONS[-1], in_the_way_of, "what_is_not_aligned_and_what_the_engine_adds_up")


@pytest.mark.parametrize("columns", [16, 2880, 8192, 12800])
@pytest.mark.parametrize("codec", list(CODECS))
def test_slots_fit_the_inboxes(columns: int, codec: str) -> None:
    """No row of a rank has the place of another one that is on its way."""
    from llm_quant_rocm.kernels import reduce_norm_quant as kernels
    from llm_quant_rocm.kernels.quick_reduce import SLOTS, Mailbox

    for world, mib, rows in itertools.product(range(2, 9), (4, 32), (1, 40, 65, 5000)):
        box = Mailbox(torch.zeros(world, dtype=torch.int64), torch.zeros(4), torch.zeros(1), 0, mib << 20, 1 << 15)
        for shots in (1, 2):
            cut = kernels.cut(rows, columns, CODECS[codec], box, kernels.Config(512, 132), shots)
            assert 1 <= cut.programs <= min(rows, 132)
            pieces = cut.programs * cut.ring * (world if shots == 1 else 1)
            if shots == 2:
                pieces += -pieces % world
            assert pieces * kernels.piece_bytes(columns, CODECS[codec]) <= box.phase_bytes
            turns = -(-rows // cut.programs)
            assert cut.ring >= SLOTS.value if turns > 1 else cut.ring == 1
            if shots == 2:
                places: dict[tuple[int, int], list[tuple[int, int]]] = {}
                for turn, program in itertools.product(range(min(turns, 9)), range(cut.programs)):
                    place = (program * cut.ring + turn % cut.ring) // world
                    places.setdefault(((turn + program) % world, place), []).append((program, turn))
                for users in places.values():
                    assert len({program for program, _ in users}) == 1
                    assert all(b - a >= SLOTS.value for (_, a), (_, b) in itertools.pairwise(users))


def test_what_travels_without_flags() -> None:
    """Exact rows for which there are programs and memory, wide enough for every lane; and their memory is behind the
    flags."""
    from llm_quant_rocm.comm.quick_reduce import LAMPORT_BYTES
    from llm_quant_rocm.kernels import reduce_norm_quant as kernels
    from llm_quant_rocm.kernels.quick_reduce import Mailbox

    def serves(rows: int, columns: int, codec: Codec = FP, world: int = 2, lamport_bytes: int = LAMPORT_BYTES) -> bool:
        config = kernels.default_config(rows, columns, codec, nvidia(9, 0))
        return kernels.without_flags(rows, columns, codec, world, lamport_bytes, config)

    assert serves(1, 528) and serves(1, 16384) and serves(64, 8192) and serves(128, 4096) and serves(132, 3072)
    assert not serves(65, 8192) and not serves(1, 8192, INT4) and not serves(1, 8192, FP, 2, 0) and not serves(1, 512)
    assert serves(1, 8192, FP, 8) and not serves(1, 8208, FP, 8)  # 64 words of a lane, and 96
    for columns in range(16, 32769, 16):  # no lane has another one's words
        config = kernels.default_config(1, columns, FP, nvidia(9, 0))
        assert serves(1, columns) == (config.block(columns) >= 8 * config.threads)
    assert not kernels.without_flags(3, 4096, FP, 2, LAMPORT_BYTES, kernels.Config(512, programs=2))
    for world in range(2, 9):
        box = Mailbox(torch.zeros(world, dtype=torch.int64), torch.zeros(4), torch.zeros(1), 0, 4096, 33, LAMPORT_BYTES)
        assert box.lamport_at == 4 * 4096 + 2 * 33 * world * 8 and box.lamport_at % 16 == 0
        assert box.region_bytes() == box.lamport_at + 2 * world * LAMPORT_BYTES


def test_plans() -> None:
    """Sizes from which on something else serves, as predicted: docs/fusion.md has the reasons."""
    fp4 = CODECS["FP4"]
    one, two, mib = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT, 1 << 20
    assert predicted(2).steps == ((0, Choice(one, FP)),)
    assert predicted(2, fp4).steps == ((0, Choice(one, FP)), (mib, Choice(one, fp4)))
    assert predicted(4).steps == ((0, Choice(one, FP)), (760_000, Choice(two, FP)))
    assert [choice for _, choice in predicted(4, fp4).steps] == [
        Choice(one, FP), Choice(two, FP), Choice(one, fp4), Choice(two, fp4)]  # fmt: skip
    assert [choice for _, choice in predicted(8, fp4).steps] == [Choice(one, FP), Choice(two, FP), Choice(two, fp4)]
    plan = Plan(((0, Choice(one, FP)), (1001, Choice(two, FP)), (5000, Choice(two, fp4))))
    assert [plan.choose(n) for n in (0, 1000, 1001, 4999, 5000)] == [
        Choice(one, FP), Choice(one, FP), Choice(two, FP), Choice(two, FP), Choice(two, fp4)]  # fmt: skip
    exact, coded = predicted(4), predicted(4, fp4)
    assert coded.between(range(2 * mib, 4 * mib), exact).steps == (
        *exact.steps, (2 * mib, Choice(one, fp4)), coded.steps[3], (4 * mib, Choice(two, FP))
    )  # fmt: skip
    assert coded.between(range(4 * mib, mib), exact).steps == exact.steps
    engines = Plan(((0, ENGINE), (4096, Choice(one, FP))))
    assert engines.by(fp4).steps == ((0, Choice(two, fp4)), (4096, Choice(one, fp4)))


def test_plans_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "llm-quant-rocm" / "reduce_norm_quant" / "sm_90.json"
    file.parent.mkdir(parents=True)
    steps = [{"from_bytes": 0, "algorithm": "one_shot", "codec": "FP"}, {"from_bytes": 4096, "algorithm": "engine"}]
    entry = {"world_size": 2, "dtype": "bfloat16", "codec": "FP", "steps": steps}
    file.write_text(json.dumps({"crossovers": [entry]}))
    one = (0, Choice(Algorithm.ONE_SHOT, FP))
    assert Plan.of(2, FP, "sm_90", engine=True).steps == (one, (4096, ENGINE))
    assert Plan.of(2, FP, "sm_90").steps == (one, (4096, Choice(Algorithm.TWO_SHOT, FP)))
    assert "one_shot FP from 0 bytes, engine from 4096 bytes (measured:" in Plan.of(2, FP, "sm_90", True).describe()
    assert Plan.of(8, FP, "sm_90") == predicted(8) and Plan.of(2, INT4, "sm_90") == predicted(2, INT4)
    file.write_text("[]")
    with pytest.raises(ValueError, match="is no file of crossovers"):
        Plan.of(2, FP, "sm_90")


def test_names(forgotten: None) -> None:
    assert ranks_named("").world == 1
    ranks = connect("alone", None, CPU)
    assert ranks_named("alone") is ranks and ranks.world == 1
    with pytest.raises(ValueError, match="registered under 'alone' already: disconnect it first"):
        connect("alone", None, CPU)
    with pytest.raises(ValueError, match=r"no ranks are registered under 'tp:9' \(registered: 'alone'\): call"):
        ranks_named("tp:9")
    disconnect("alone")
    disconnect("alone")
    with pytest.raises(ValueError, match="registered: none"):
        ranks_named("alone")


def test_too_many_ranks(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_of.dist, "get_world_size", lambda group: 9)
    with pytest.raises(ValueError, match="'all' has 9 ranks; reduce_norm_quant serves up to 8"):
        connect("all", MagicMock(), CPU)
    assert "all" not in ranks_of._NAMED


@pytest.mark.parametrize("view", [(0, 64), (4, 68)], ids=["stride", "start"])
def test_rows_begin_at_lines_of_16_bytes(view: tuple[int, int]) -> None:
    x = random_rows(5, 68, torch.bfloat16, 1)[:, slice(*view)]
    copy = ranks_of._aligned(x)
    assert copy.data_ptr() % 16 == 0 and copy.stride(0) * 2 % 16 == 0
    assert_same(copy, x)
    assert ranks_of._aligned(copy) is copy
