# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce between gloo processes: the bits of the reference on every rank."""

import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from llm_quant_rocm import ops
from llm_quant_rocm.comm.policy import Algorithm
from llm_quant_rocm.comm.process_group import ProcessGroupReduce, all_reduce, two_level_all_reduce, two_level_groups
from llm_quant_rocm.comm.reduce_norm_quant import connect
from llm_quant_rocm.comm.roll_call import RollCall
from llm_quant_rocm.formats.wire import CODECS, DTYPES, GROUP, Codec
from llm_quant_rocm.reference import quick_reduce
from tests.comm.processes import run_ranks
from tests.inputs import assert_same, nasty_rows

SHAPES = ((1,), (31,), (33,), (3, 5, 7), (4097,), (257, 33), (2, 8192))


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank sends: nasty rows, begun at another place by every rank, and not contiguous where it has rows."""
    count = torch.Size(shape).numel()
    rows = nasty_rows(256, dtype).flatten().roll(rank * 992)
    values = rows.repeat(-(-count // rows.numel()))[:count] * (1 if rank % 3 else 0.25)
    return values.view(shape) if len(shape) < 2 else values.view(*shape[:-2], shape[-1], shape[-2]).mT


def assert_everywhere(found: torch.Tensor, x: torch.Tensor, expected: Callable[[], torch.Tensor]) -> None:
    """Every rank has found a tensor like `x` with the bits of rank 0's, which alone compares them with `expected`."""
    assert found.shape == x.shape and found.dtype == x.dtype
    first = found.clone(memory_format=torch.contiguous_format)
    dist.broadcast(first.view(torch.uint8), 0)
    assert_same(found, first)
    if dist.get_rank() == 0:
        assert_same(found, expected())


def compare_with_reference(rank: int, world: int) -> None:
    def compare(shape: tuple[int, ...], dtype: torch.dtype, codec: Codec, cast: bool) -> None:
        x = tensor_of(rank, shape, dtype)
        before = x.clone()
        found = all_reduce(x, codec, cast_bf16_to_fp16=cast)
        every = (tensor_of(other, shape, dtype) for other in range(world))
        assert_everywhere(found, x, lambda: quick_reduce.two_shot(list(every), codec, cast_bf16_to_fp16=cast))
        assert_same(x, before)

    for codec, dtype, shape in itertools.product(CODECS.values(), DTYPES, SHAPES):
        compare(shape, dtype, codec, False)
    for shape in SHAPES:
        compare(shape, torch.bfloat16, CODECS["FP4"], True)
    for x in (torch.zeros(0, 5, dtype=torch.float16), torch.ones(3, 5, dtype=torch.float16)):
        found = all_reduce(x, CODECS["FP4"])
        assert found is not x and found.shape == x.shape, "a new tensor, also of one rank and of nothing"
    for values in distributions(world):
        for codec in CODECS.values():
            found = all_reduce(values[rank], codec)
            assert_everywhere(found, values[rank], partial(quick_reduce.two_shot, values, codec))
            if rank == 0:
                assert_near(found, values, codec)
    if world > 2:  # 1 is lost beside 2**30, unless that is taken away first
        last = [0.0] * (world - 3) + [2.0**30, -(2.0**30)]
        found = all_reduce(torch.full((64,), [1.0, *last][rank], dtype=torch.bfloat16), CODECS["FP"])
        assert not found.any()
    if world in (2, 4, 8):
        upstreams_bodies(world)


def distributions(world: int) -> list[list[torch.Tensor]]:
    """Every rank's bf16 values: denormals, some near the largest, signs that alternate and so cancel, one infinity."""
    draw = torch.Generator().manual_seed(world)
    normal = [torch.randn(1000, generator=draw) for _ in range(world)]
    signs = torch.tensor([1.0, -1.0]).repeat(500)
    alternating = [values.abs() * signs * (-1) ** rank for rank, values in enumerate(normal)]
    infinity = [values.clone() for values in normal]
    infinity[-1][700] = float("inf")
    every = [[values * 2.0**-131 for values in normal], [values * 2.0**123 for values in normal], alternating, infinity]
    return [[values.bfloat16() for values in ranks] for ranks in every]


def assert_near(found: torch.Tensor, values: list[torch.Tensor], codec: Codec) -> None:
    """Within the error that the codec states, against the sum in fp64; what shares a group with an infinity is NaN."""
    exact = torch.stack(values).double()
    total = exact.sum(0)
    groups = exact.abs().nan_to_num(posinf=0.0)
    largest = torch.nn.functional.pad(groups, (0, -groups.shape[1] % GROUP)).unflatten(1, (-1, GROUP)).amax(2)
    largest = largest.repeat_interleave(GROUP, 1)[:, : groups.shape[1]]
    # One pass for each rank and one for the sum, scales rounded up; then the sum's own roundings.
    one = {"FP": 0.0, "FP8": 1 / 16, "FP4": 1 / 6}.get(codec.name, 1 / codec.limit if codec.quantizes else 0.0)
    bound = largest.sum(0) * one * (2 + one) * 1.01 + total.abs() * 2.0**-7 + 2.0**-132
    infinite = total.isinf()
    if not infinite.any():
        assert ((found.double() - total).abs() <= bound).all()
        return
    lost = (
        infinite
        if codec.name == "FP" or len(values) == 1
        else infinite.nonzero()[0] // GROUP == torch.arange(found.numel()) // GROUP
    )
    assert (found[infinite] == float("inf")).all()
    assert torch.equal(found.isfinite(), ~lost)
    assert ((found.double() - total).abs() <= bound)[~lost].all()


def upstreams_bodies(world: int) -> None:
    """What vLLM's tests/distributed/test_quick_all_reduce.py compares, with its tolerances and, for time, fewer values:
    between 2 random whole numbers, there too the same on both, and a ramp; between 4 and 8 zeros and ones in turn."""
    if world == 2:
        draw = torch.Generator().manual_seed(42)
        for name, dtype in itertools.product(("FP", "INT8", "INT6", "INT4"), DTYPES):
            for low, high in ((1, 23), (-23, 1)):
                x = torch.randint(low, high, (80_008,), generator=draw).to(dtype)
                torch.testing.assert_close(all_reduce(x, CODECS[name]), x * world, atol=2.5, rtol=0.1)
            x = (torch.arange(1 << 16) % 23).to(dtype)
            torch.testing.assert_close(all_reduce(x, CODECS[name]), x * world, atol=2.5, rtol=0.1)
    else:
        for call in range(20):
            x = torch.full((64, (1024, 2048)[call % 2]), call % 2, dtype=torch.float16)
            assert (all_reduce(x, CODECS["INT4"], cast_bf16_to_fp16=True) == call % 2 * world).all()


def find_other_bits(rank: int, wrong: list[int]) -> None:
    x = torch.ones(64, dtype=torch.bfloat16)
    found = x * 3
    found[7] = 2 if rank in wrong else 3
    assert_everywhere(found, x, lambda: x * 3)


@pytest.mark.parametrize("wrong", [[0], [1], [0, 1]], ids=str)
def test_a_rank_with_other_bits_is_found(wrong: list[int]) -> None:
    with pytest.raises(Exception, match=r"1 of 64 differ, first at \[7\]"):
        run_ranks(2, find_other_bits, wrong)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_rank_ends_with_the_bits_of_the_reference(world: int) -> None:
    run_ranks(world, compare_with_reference, world)


def compare_hosts_with_reference(rank: int, hosts: list[list[int]]) -> None:
    groups = two_level_groups(hosts)

    def compare(shape: tuple[int, ...], dtype: torch.dtype, codec: Codec, cast: bool) -> None:
        x = tensor_of(rank, shape, dtype)
        found = two_level_all_reduce(x, codec, *groups, cast)
        every = ([tensor_of(other, shape, dtype) for other in host] for host in hosts)
        assert_everywhere(found, x, lambda: quick_reduce.two_level(list(every), codec, cast))

    for codec, dtype, shape in itertools.product(CODECS.values(), DTYPES, SHAPES):
        compare(shape, dtype, codec, False)
    compare((700,), torch.bfloat16, CODECS["INT8"], True)


@pytest.mark.parametrize(
    "hosts",
    [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[0, 1]], [[0], [1], [2]]],
    ids=str,
)
def test_two_levels_end_with_the_bits_of_the_reference(hosts: list[list[int]]) -> None:
    run_ranks(sum(map(len, hosts)), compare_hosts_with_reference, hosts)


def reduce_as_other_groups_do(rank: int) -> None:
    """Two groups on two "hosts" each, made and used by their own ranks alone, the later one first."""
    for _ in range(2):
        ranks = [0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7]
        hosts = [ranks[:2], ranks[2:]]
        inputs = [[tensor_of(other, (257, 33), torch.bfloat16) for other in host] for host in hosts]
        group = dist.new_group(ranks, use_local_synchronization=True)
        member = ProcessGroupReduce(group, hosts)
        found = member.all_reduce(tensor_of(rank, (257, 33), torch.bfloat16), CODECS["FP4"], Algorithm.TWO_LEVEL)
        assert_same(found, quick_reduce.two_level(inputs, CODECS["FP4"]))
        with pytest.raises(ValueError, match="serves two_level, not two_shot"):
            member.all_reduce(inputs[0][0], CODECS["FP4"], Algorithm.TWO_SHOT)


def test_groups_of_groups() -> None:
    run_ranks(8, reduce_as_other_groups_do)


def meet(store: dist.Store, rank: int, where: str, ranks: list[int]) -> None:
    """Returns when all of `ranks` are there. Unlike a barrier it needs nobody who is lost."""
    store.set(f"{where}: {rank}", "")
    store.wait([f"{where}: {other}" for other in ranks])


def lose_a_rank(rank: int, lost: int, how: str) -> None:
    """A rank does not take part in the third call; the others, of which one comes later than the error, say so."""
    group = dist.new_group()
    if how == "norm":
        connect("tp:0", group, torch.device("cpu"))
        ones = torch.ones(2, 512, dtype=torch.bfloat16)
        operator, call = "reduce_norm_quant", partial(ops.reduce_norm_quant, ones, ones[0], ones, group="tp:0")
    else:
        ProcessGroupReduce(group).all_reduce(torch.ones(1, dtype=torch.bfloat16), CODECS["FP"])  # counts apart
        x = torch.ones(1000, dtype=torch.bfloat16)
        operator, call = "quantized all-reduce", partial(ProcessGroupReduce(group).all_reduce, x, CODECS["FP4"])
        assert_same(call(), x * 3)
        assert_same(call(cast_bf16_to_fp16=True), x * 3)
    # Torch's store of files, which outlives every rank, knows what rank 0 did too.
    others, store = [other for other in range(3) if other != lost], dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == lost and how == "dies before":
        os._exit(0)
    if rank == lost and how == "dies inside":
        for at_once in ("all_to_all_single", "all_gather"):
            setattr(dist, at_once, lambda *args, **kwargs: os._exit(0))
    if rank == lost and how in ("is late", "norm"):
        store.wait([f"noticed: {other}" for other in others])
        return
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
    if rank == others[-1]:
        time.sleep(1)
    does = "ended" if how == "dies inside" else "did not arrive"
    calls = 1 if how == "norm" else 3
    with pytest.raises(RuntimeError, match=f"^{operator}: rank {lost} of the group {does} in call {calls}: "):
        call()
    meet(store, rank, "noticed", others)  # nobody leaves before


@pytest.mark.parametrize(
    ("lost", "how"), [(0, "dies before"), (1, "dies before"), (1, "dies inside"), (2, "is late"), (1, "norm")]
)
def test_a_lost_rank_is_named_with_the_call(lost: int, how: str) -> None:
    run_ranks(3, lose_a_rank, lost, how)


class FrozenStore(dist.HashStore):
    """Of a rank that hangs: it takes what it is told, and answers never."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(60)
        return True


def lose_the_store(rank: int) -> None:
    roll_call = RollCall(dist.group.WORLD, "quantized all-reduce")
    roll_call._store = FrozenStore()  # type: ignore[assignment]
    begin = time.monotonic()
    what = "rank 0 of the default group, which keeps its store, does not answer in call 1: timed out"
    with pytest.raises(RuntimeError, match=what), roll_call.call():
        raise RuntimeError("timed out")
    assert time.monotonic() - begin < 30
    with pytest.raises(torch.OutOfMemoryError, match="^no room$"), roll_call.call():  # nobody is asked
        raise torch.OutOfMemoryError("no room")


def test_the_rank_that_keeps_the_store_may_be_the_lost_one() -> None:
    run_ranks(2, lose_the_store)


def expect_errors(rank: int) -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"takes bf16 or fp16, not torch\.float32"):
        all_reduce(x.float(), CODECS["FP4"])
    with pytest.raises(ValueError, match="up to 8 ranks, this one has 9; two_level_all_reduce serves more"):
        all_reduce(x, CODECS["FP4"])
    pair = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match="not in the group"):
            all_reduce(x, CODECS["FP4"], pair)
    with pytest.raises(ValueError, match="hosts of 5, 4 ranks: .* as many ranks on every host"):
        two_level_groups([[0, 1, 2, 3, 4], [5, 6, 7, 8]])
    with pytest.raises(ValueError, match=r"rank 1 is named twice by the hosts \[\[0, 1\], \[1, 2\]\]"):
        two_level_groups([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="hosts of no ranks"):
        two_level_groups([])
    with pytest.raises(ValueError, match=r"\[\[0, 3\], \[1, 2\]\] interleave; number them host by host"):
        two_level_groups([[3, 0], [1, 2]])
    if rank == 8:
        with pytest.raises(ValueError, match="rank 8 is on none of the hosts"):
            two_level_groups([[0, 1, 2, 3], [4, 5, 6, 7]])


def test_errors() -> None:
    run_ranks(9, expect_errors)


def leave(rank: int) -> None:
    assert rank != 1, "rank 1 fails"


def test_a_failing_rank_fails_the_test() -> None:
    with pytest.raises(Exception, match="rank 1 fails"):
        run_ranks(2, leave)
