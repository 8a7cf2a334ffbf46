# SPDX-License-Identifier: Apache-2.0
"""The host's side of the all-reduce over peer memory: several ranks on a virtual GPU, and how memory is set up."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from llm_quant_rocm.comm import quick_reduce as comm
from llm_quant_rocm.comm.policy import Algorithm
from llm_quant_rocm.comm.quick_reduce import QuickReduce
from llm_quant_rocm.comm.setup_errors import NoPeerMemory
from llm_quant_rocm.formats.wire import CODECS, Codec
from llm_quant_rocm.hardware import amd, nvidia
from llm_quant_rocm.kernels import quick_reduce as kernels
from llm_quant_rocm.kernels.quick_reduce import Config
from llm_quant_rocm.reference import quick_reduce as reference
from tests.amd import tritons
from tests.amd.isolated import call
from tests.amd.operators.quick_reduce import SMALL, Ranks
from tests.amd.virtual_gpu import activate
from tests.comm.processes import run_ranks
from tests.inputs import assert_same, engine_defaults, random_rows

FP4 = CODECS["FP4"]


def group(world: int, max_spins: int = 1_000_000, phase_bytes: int = 1 << 17) -> tuple[Ranks, list[QuickReduce]]:
    """Several ranks with small inboxes."""
    ranks = Ranks(world, phase_bytes)
    return ranks, [
        QuickReduce(box, region, max_spins, SMALL) for box, region in zip(ranks.boxes, ranks.regions, strict=True)
    ]


def own_memory() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(kernels.STATE_WORDS, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)


def all_reduces() -> None:
    """Messages of many tiles, of none, not aligned, not contiguous, of several dimensions."""
    ranks, members = group(2)
    rows = [random_rows(384, 200, torch.bfloat16, seed) for seed in range(2)]
    views = (
        lambda x: x,
        lambda x: x.flatten()[3:5600],
        lambda x: x[:9].t(),
        lambda x: x[:5].view(1, 5, 8, 25).half(),
        lambda x: x[:0],
    )
    for view in views:
        inputs = [view(x) for x in rows]
        before = [x.clone() for x in inputs]
        for algorithm in (Algorithm.TWO_SHOT, Algorithm.ONE_SHOT):
            launches = len(ranks.gpu.launches)
            with ranks.gpu.together():
                outs = []
                for rank, (member, x) in enumerate(zip(members, inputs, strict=True)):
                    ranks.gpu.stream = rank
                    outs.append(member.all_reduce(x, FP4, algorithm))
            assert len(ranks.gpu.launches) - launches == (2 if inputs[0].numel() else 0)
            shot = getattr(reference, algorithm)
            for out, x, copy in zip(outs, inputs, before, strict=True):
                assert_same(out, shot([y.contiguous() for y in inputs], FP4))
                assert torch.equal(x, copy)
    for member in members:
        member.check()


def lost_rank() -> None:
    ranks, members = group(3, max_spins=50)
    with ranks.gpu.together():
        members[0].all_reduce(torch.ones(100, dtype=torch.float16), FP4)
    with pytest.raises(RuntimeError, match="rank 1 of the group did not arrive in call 1, phase 1, which rank 0"):
        members[0].check()
    members[1].check()


def warmed_up() -> None:
    """What `warm_up` compiles is what a call launches."""
    kernels.warm_up(2, torch.bfloat16, FP4, SMALL, 2)
    compiled = kernels.two_shot_kernel.device_caches[0][0]
    assert len(compiled) == 1
    ranks, members = group(2)
    with ranks.gpu.together():
        for rank, member in enumerate(members):
            ranks.gpu.stream = rank
            member.all_reduce(torch.ones(100, dtype=torch.bfloat16), FP4)
    assert len(compiled) == 1 and len(ranks.gpu.launches) == 2


def on_the_virtual_gpu(case: str) -> None:
    activate("gfx942")
    globals()[case]()


@pytest.mark.parametrize("case", ["all_reduces", "lost_rank", "warmed_up"])
def test_on_the_virtual_gpu(case: str) -> None:
    call(tritons.VERSIONS[-1], on_the_virtual_gpu, case)


@pytest.fixture
def model_is_built() -> Iterator[None]:
    with engine_defaults():
        yield


@pytest.mark.usefixtures("model_is_built")
def test_memory_is_zero_before_anybody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are where the tensors begin in the ranks' buffers, and memory is cleared before the ranks meet. On AMD
    it is proven then."""
    regions: list[torch.Tensor] = []

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        regions.append(torch.full((size,), 255, dtype=dtype, device=device))
        return regions[-1]

    def barrier(timeout_ms: int) -> None:
        assert not regions[0].any() and timeout_ms in (3000, 10_000_000)

    met = MagicMock(side_effect=barrier)

    def rendezvous(region: torch.Tensor, group: object) -> SimpleNamespace:
        return SimpleNamespace(buffer_ptrs=[4096, 65536, region.data_ptr() - 256], rank=2, barrier=met)

    with (
        patch.object(dist, "get_world_size", return_value=3),
        patch.object(comm, "first_refusal", return_value=None),
        patch.object(symmetric_memory, "empty", empty),
        patch.object(symmetric_memory, "rendezvous", rendezvous),
        patch.object(comm, "seconds_of_a_look", return_value=2e-6),
        patch.object(comm, "prove") as prove,
    ):
        for hip, timeout, spins in ((None, 10_000, 2**31 - 2), ("7.2", 3, 1_500_000)):
            monkeypatch.setattr(torch.version, "hip", hip)
            regions.clear()
            found = QuickReduce.over(MagicMock(), torch.device("cpu"), inbox_bytes=1 << 16, timeout=timeout)
            assert found.max_spins == spins
            assert prove.call_count == (hip is not None)
        (proven,) = prove.call_args.args
        assert proven.mailbox is found.mailbox and proven.max_spins == 30_000_000
    assert met.call_count == 2
    box = found.mailbox
    assert box.peers.dtype == torch.int64 and box.peers.tolist() == [4352, 65792, regions[0].data_ptr()]
    assert (box.rank, box.world, box.state.tolist()) == (2, 3, [0] * kernels.STATE_WORDS)
    assert regions[0].numel() == box.region_bytes()
    assert box.report.dtype == torch.int64 and box.lost() is None


@pytest.mark.usefixtures("model_is_built")
def test_only_memory_of_the_host_is_pinned() -> None:
    """On a GPU a kernel writes the report to the host, and no default device moves it to where nothing is pinned."""
    made: list[dict[str, object]] = []
    with patch.object(torch, "zeros", lambda count, **options: made.append({"count": count, **options})):
        comm._own_memory(torch.device("cuda", 1))
    assert made == [
        {"count": kernels.STATE_WORDS, "dtype": torch.int32, "device": torch.device("cuda", 1)},
        {"count": 1, "dtype": torch.int64, "device": "cpu", "pin_memory": True},
    ]


@pytest.mark.usefixtures("model_is_built")
def test_how_long_a_look_takes() -> None:
    """A call of one tile, on this GPU alone, in which no other rank comes."""
    looks: list[int] = []
    clock = SimpleNamespace(now=17.0, perf_counter=lambda: clock.now)

    def one_shot(
        x: torch.Tensor, out: torch.Tensor, box: kernels.Mailbox, codec: Codec, config: Config, most: int
    ) -> None:
        assert (box.world, box.rank, box.cut(1, codec, config, 1)) == (3, 0, kernels.Cut(1, 1, 1))
        assert box.peers.diff().unique().tolist() == [box.region_bytes()] and box.report.is_pinned() is False
        looks.append(most)
        clock.now += 0.05 if most > 1 else 1
        box.report[0] = 1 << 33

    with (
        patch.object(kernels, "one_shot", one_shot),
        patch.object(torch.cuda, "synchronize"),
        patch.object(comm, "time", clock),
    ):
        seconds = comm.seconds_of_a_look(torch.device("cpu"), 3)
    assert looks == [1, 50_000] and seconds == pytest.approx(1e-6)  # the first one compiles


def test_kernels_get_contiguous_values_at_multiples_of_16_bytes() -> None:
    """They store whole vectors, which a simulator takes at any address; what is so already is not copied."""
    got: list[torch.Tensor] = []

    def kernel(x: torch.Tensor, out: torch.Tensor, *rest: object) -> None:
        assert x.is_contiguous() and x.data_ptr() % 16 == out.data_ptr() % 16 == 0
        got.append(x.view(-1))

    box = kernels.Mailbox(torch.zeros(2, dtype=torch.int64), *own_memory(), 0, 4096, 1)
    member = QuickReduce(box, torch.zeros(1, dtype=torch.uint8), config=SMALL)
    base = torch.arange(128).to(torch.bfloat16)
    with patch.dict(comm._KERNELS, {Algorithm.TWO_SHOT: kernel}):
        for x in (base[1:], base.view(8, 16).t(), base[8:]):
            assert member.all_reduce(x, FP4).shape == x.shape
            assert torch.equal(got[-1], x.flatten())
    assert got[-1].data_ptr() == base[8:].data_ptr()


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_how_messages_are_cut(world: int, shots: int) -> None:
    """Every value is in a tile, tiles have flags, and what programs have on their way fits the inboxes."""
    box = kernels.Mailbox(torch.zeros(world, dtype=torch.int64), *own_memory(), 0, 1 << 22, 4096)
    config = Config(blocks=16, programs=40, num_warps=4, buffers=4)
    for codec in CODECS.values():
        for count in (1, 4096, 4097, 10**6, 2**28 - 1):
            cut = box.cut(count, codec, config, shots)
            values = cut.buffers * config.buffer_values * (world if shots == 2 else 1)
            assert (cut.tiles - 1) * values < count <= cut.tiles * values
            assert 1 <= cut.programs <= min(cut.tiles, 40) and cut.tiles <= 4096
            assert cut.programs == min(cut.tiles, 40) or cut.buffers == 1 or cut.tiles * 2 > 4096  # small pieces first
            slots = min(cut.programs * kernels.SLOTS.value, cut.tiles) * world
            assert slots * cut.buffers * config.buffer_bytes(codec) <= 1 << 22
            assert count > 10**6 or cut.buffers <= 4


def test_how_large_pieces_are() -> None:
    """As large as one round, or so many full ones, leaves them. Small inboxes make them smaller, but not those of a
    message that fits them whole, which takes no slot twice."""
    config = Config(blocks=16, programs=528, num_warps=4)
    box = kernels.Mailbox(torch.zeros(2, dtype=torch.int64), *own_memory(), 0, 32 << 20, 32768)
    assert box.cut(2**23, FP4, config, 1) == kernels.Cut(4, 512, 512)
    assert box.cut(2**25, FP4, config, 1) == kernels.Cut(3, 2731, 528)
    assert box.cut(2**25, FP4, replace(config, programs=7), 2) == kernels.Cut(8, 512, 7)
    large = replace(box, phase_bytes=128 << 20)
    assert large.cut(2**27, FP4, replace(config, programs=792), 2) == kernels.Cut(7, 2341, 792)  # not 8, in 2.6 rounds
    once = replace(config, programs=792, buffers=3, buffers_at_once=11)
    assert large.cut(2**26, FP4, once, 2) == kernels.Cut(11, 745, 745)
    assert large.cut(2**27, FP4, once, 2) == kernels.Cut(3, 5462, 792)
    assert box.cut(2**26, FP4, once, 2) == kernels.Cut(2, 4096, 792)  # what is one round does not fit
    nearly = replace(box, phase_bytes=8193 * 2 * config.buffer_bytes(FP4))  # pieces of 8 do, for a round and a half
    assert nearly.cut(2**26, FP4, once, 2) == kernels.Cut(3, 2731, 792)


def test_how_many_programs_run() -> None:
    """As many as the registers that they get allow in the two-shot between two Hoppers and up to four; 4 elsewhere."""
    hopper, mi300 = nvidia(9, 0), amd("gfx942")
    assert kernels.default_config(hopper, 2, 2).programs == 7 * 132
    assert kernels.default_config(hopper, 4, 2).programs == 6 * 132
    assert kernels.default_config(hopper, 2, 1).programs == 4 * 132
    assert kernels.default_config(hopper, 8, 2).programs == 4 * 132
    assert kernels.default_config(mi300, 2, 2).programs == 4 * 304
    assert [kernels.default_config(h, 2, 2).num_warps for h in (hopper, mi300)] == [4, 2]
    for world in (2, 3, 4):
        config = kernels.default_config(hopper, world, 2)
        registers = kernels._constants(FP4, torch.bfloat16, config, world)["maxnreg"]
        resident = 65536 // (32 * config.num_warps * registers)  # of the registers of a multiprocessor
        assert resident == config.programs // 132
    assert "maxnreg" not in kernels._constants(FP4, torch.bfloat16, kernels.default_config(mi300, 2, 2), 2)


def test_messages_of_one_round() -> None:
    """What docs/quick_reduce.md says of four ranks."""
    box = kernels.Mailbox(torch.zeros(4, dtype=torch.int64), *own_memory(), 0, comm.INBOX_BYTES, comm.MAX_TILES)
    config = kernels.default_config(nvidia(9, 0), 4, 2)
    for mib, one in ((128, True), (355, True), (356, False), (1024, False)):
        cut = box.cut(mib << 19, FP4, config, 2)
        assert (cut.tiles == cut.programs) is one


def test_errors() -> None:
    box = kernels.Mailbox(torch.zeros(2, dtype=torch.int64), *own_memory(), 0, 4096, 1)
    member = QuickReduce(box, torch.zeros(1, dtype=torch.uint8), config=SMALL)
    x = torch.zeros(64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"takes bf16 or fp16, not torch\.float32"):
        member.all_reduce(x.float(), FP4)
    with pytest.raises(ValueError, match="x is on meta, the group's memory on cpu"):
        member.all_reduce(x.to("meta"), FP4)
    with pytest.raises(ValueError, match="one_shot and two_shot, not engine"):
        member.all_reduce(x, FP4, Algorithm.ENGINE)
    small = kernels.Mailbox(box.peers, box.state, box.report, 0, 512, 1)
    with pytest.raises(
        ValueError, match="inboxes of 512 bytes with flags of 1 tiles do not serve 64 values of FP between 2 ranks"
    ):
        QuickReduce(small, torch.zeros(1, dtype=torch.uint8), config=SMALL).all_reduce(x, CODECS["FP"])
    with pytest.raises(ValueError, match=r"2147483648 values are too many .* 32 bits: split them"):
        kernels.Mailbox(box.peers, box.state, box.report, 0, 1 << 25, 1 << 15).cut(2**31, FP4, SMALL, 2)
    with (
        patch.object(dist, "get_world_size", return_value=9),
        pytest.raises(ValueError, match="serves 2 to 8 ranks, the group has 9"),
    ):
        QuickReduce.over(MagicMock(), torch.device("cpu"))
    refused = RuntimeError("CUDA driver error: invalid device\nand a trace")
    with (
        patch.object(dist, "get_world_size", return_value=2),
        patch.object(comm, "first_refusal", lambda refusal, group: refusal),
        patch.object(symmetric_memory, "empty"),
        patch.object(symmetric_memory, "rendezvous", side_effect=refused),
        pytest.raises(NoPeerMemory, match="^torch's symmetric memory does not connect the GPUs: .* invalid device$"),
    ):
        QuickReduce.over(MagicMock(), torch.device("cpu"))


def full_on_one_gpu(rank: int) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nand a trace")
    with (
        patch.object(symmetric_memory, "empty", side_effect=full if rank else None),
        patch.object(symmetric_memory, "rendezvous") as met,
        pytest.raises(
            NoPeerMemory,
            match="^torch's symmetric memory gave a rank no .* MiB: CUDA out of memory. Tried to allocate$",
        ),
    ):
        QuickReduce.over(dist.group.WORLD, torch.device("cpu"))
    assert not met.called


def not_connected_on_one_gpu(rank: int) -> None:
    refused = RuntimeError("CUDA driver error: invalid device")
    with (
        patch.object(symmetric_memory, "empty"),
        patch.object(symmetric_memory, "rendezvous", side_effect=refused if rank else None) as met,
        pytest.raises(NoPeerMemory, match="does not connect the GPUs: CUDA driver error: invalid device$"),
    ):
        QuickReduce.over(dist.group.WORLD, torch.device("cpu"))
    assert not met.return_value.barrier.called


def wrong_on_one_gpu(rank: int) -> None:
    stale = NoPeerMemory("a sum of known values is wrong, in call 3 of 12")
    with (
        patch.object(symmetric_memory, "empty", lambda size, **options: torch.zeros(size, **options)),
        patch.object(symmetric_memory, "rendezvous", return_value=MagicMock(buffer_ptrs=[0, 0], rank=rank)),
        patch.object(comm, "seconds_of_a_look", return_value=2e-6),
        patch.object(torch.version, "hip", "7.2"),
        patch.object(comm, "prove", side_effect=stale if rank else None),
        pytest.raises(NoPeerMemory, match="^GPUs do not see what others write to their memory: a sum of .* 3 of 12$"),
    ):
        QuickReduce.over(dist.group.WORLD, torch.device("cpu"), inbox_bytes=1 << 16)


def no_kernel_on_one_gpu(rank: int) -> None:
    with (
        patch.object(symmetric_memory, "empty", lambda size, **options: torch.zeros(size, **options)),
        patch.object(symmetric_memory, "rendezvous", return_value=MagicMock(buffer_ptrs=[0, 0], rank=rank)),
        patch.object(comm, "seconds_of_a_look", side_effect=AssertionError("not compiled") if rank else None),
        pytest.raises(NoPeerMemory, match="^its kernel does not run: .* AssertionError: not compiled$"),
    ):
        QuickReduce.over(dist.group.WORLD, torch.device("cpu"), inbox_bytes=1 << 16)


@pytest.mark.parametrize(
    "case",
    [full_on_one_gpu, not_connected_on_one_gpu, no_kernel_on_one_gpu, wrong_on_one_gpu],
    ids=lambda case: case.__name__,
)
def test_nobody_waits_for_a_rank_without_memory(case: Callable[[int], None]) -> None:
    run_ranks(2, case)
