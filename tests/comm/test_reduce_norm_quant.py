# SPDX-License-Identifier: Apache-2.0
"""reduce_norm_quant between gloo processes, the names of ranks, and the kernels behind them on a virtual GPU."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from llm_quant_rocm import ops, reference
from llm_quant_rocm.comm import reduce_norm_quant as ranks_of
from llm_quant_rocm.comm.reduce_norm_quant import FP, Plan, Ranks, connect, disconnect, ranks_named
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, ScaleLayout, Target
from llm_quant_rocm.formats.wire import CODECS
from tests.amd import tritons
from tests.amd.isolated import call
from tests.comm.processes import run_ranks
from tests.inputs import nasty_rows, random_rows

CPU = torch.device("cpu")
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


def every_call(rank: int, world: int) -> None:
    from tests.amd.operators.reduce_norm_quant import assert_results

    group = dist.group.WORLD
    assert group is not None
    ranks = connect("tp:0", group, CPU, CODECS["INT4"])
    assert ranks.memory is None and ranks.obstacle == "cpu has no peer memory"
    plans = (ranks.plan, Plan(0, CODECS["INT4"], 0), Plan(0))
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
        shots, codec = plan.choose(xs[0].numel() * 2)
        norm = Norm(weight, 1e-5, 1.0, scale)
        assert_results(found, reference.reduce_norm_quant(xs, residual, norm, target, codec, shots))
    disconnect("tp:0")


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
    for plan, kernel_calls in ((Plan(1 << 20), 3), (Plan(0), 2)):
        before = len(virtual.gpu.launches)
        outs = []
        with virtual.gpu.together():
            for rank, box in enumerate(virtual.boxes):
                virtual.gpu.stream = rank
                memory = SimpleNamespace(mailbox=box, device=CPU, max_spins=1_000_000)
                ranks = Ranks(2, plan, None, memory, None, SMALL)  # type: ignore[arg-type]
                outs.append(ranks.reduce_norm_quant(xs[rank], residual, norm, target))
        assert len(virtual.gpu.launches) - before == 2 * kernel_calls
        shots, codec = plan.choose(xs[0].numel() * 2)
        for out in outs:
            assert_results(out, reference.reduce_norm_quant(xs, residual, norm, target, codec, shots))
    with pytest.raises(ValueError, match=r"inboxes of 65536 bytes do not hold 4 rows of 16384 columns in FP from each"):
        kernels.programs_of(9, 16384, FP, virtual.boxes[0], SMALL)
    memory = SimpleNamespace(mailbox=virtual.boxes[0], device=torch.device("meta"))
    with pytest.raises(ValueError, match="x is on cpu, the group's memory on meta"):
        Ranks(2, Plan(0), None, memory).reduce_norm_quant(xs[0], None, norm, target)  # type: ignore[arg-type]
    tall = Target(Quantization.NVFP4, layout=ScaleLayout.SWIZZLED_128X4, normed=False)
    memory = SimpleNamespace(mailbox=virtual.boxes[0], device=CPU, max_spins=1)
    with pytest.raises(ValueError, match="flags of 8 tiles do not serve 128 rows"):
        Ranks(2, Plan(1 << 20), None, memory, None, SMALL).reduce_norm_quant(xs[0], None, norm, tall)  # type: ignore[arg-type]


def test_messages_of_several_kernels() -> None:
    call(tritons.VERSIONS[-1], in_the_way_of, "messages_of_several_kernels")


@pytest.mark.parametrize("columns", [16, 2880, 8192, 12800])
@pytest.mark.parametrize("codec", list(CODECS))
def test_slots_fit_the_inboxes(columns: int, codec: str) -> None:
    from llm_quant_rocm.kernels import reduce_norm_quant as kernels
    from llm_quant_rocm.kernels.quick_reduce import SLOTS, Mailbox

    for world, mib, tiles in itertools.product((2, 5, 8), (1, 32), (1, 40, 65, 5000)):
        box = Mailbox(torch.zeros(world, dtype=torch.int64), torch.zeros(4), torch.zeros(1), 0, mib << 20, 1 << 15)
        programs = kernels.programs_of(tiles, columns, CODECS[codec], box, kernels.Config(512, 132))
        assert 1 <= programs <= min(tiles, 132)
        slots = min(tiles, SLOTS.value * programs)
        assert slots * world * kernels.piece_bytes(columns, CODECS[codec]) <= box.phase_bytes


def test_plans() -> None:
    plan = Plan(1000, CODECS["FP4"], 5000)
    assert [plan.choose(n) for n in (0, 1000, 1001, 4999, 5000)] == [
        (1, FP), (1, FP), (2, FP), (2, FP), (2, CODECS["FP4"])]  # fmt: skip
    assert Plan.of(2).one_shot_bytes > Plan.of(8).one_shot_bytes > 0


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
