# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce between gloo processes: the bits of the reference on every rank."""

import itertools

import pytest
import torch
import torch.distributed as dist

from llm_quant_rocm.comm.process_group import all_reduce, two_level_all_reduce, two_level_groups
from llm_quant_rocm.formats.wire import CODECS, DTYPES
from llm_quant_rocm.reference import quick_reduce
from tests.comm.processes import run_ranks
from tests.inputs import assert_same, nasty_rows

SHAPES = ((1,), (32,), (255,), (3, 5, 7), (257, 33), (2, 8192))


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank sends: nasty rows, begun at another place by every rank, and not contiguous where it has rows."""
    count = torch.Size(shape).numel()
    rows = nasty_rows(256, dtype).flatten().roll(rank * 992)
    values = rows.repeat(-(-count // rows.numel()))[:count] * (1 if rank % 3 else 0.25)
    return values.view(shape) if len(shape) < 2 else values.view(*shape[:-2], shape[-1], shape[-2]).mT


def compare_with_reference(rank: int, world: int) -> None:
    for codec, dtype, shape in itertools.product(CODECS.values(), DTYPES, SHAPES):
        inputs = [tensor_of(other, shape, dtype) for other in range(world)]
        before = inputs[rank].clone()
        assert_same(all_reduce(inputs[rank], codec), quick_reduce.two_shot(inputs, codec))
        assert_same(inputs[rank], before)
    for shape in SHAPES:
        inputs = [tensor_of(other, shape, torch.bfloat16) for other in range(world)]
        found = all_reduce(inputs[rank], CODECS["FP4"], cast_bf16_to_fp16=True)
        assert_same(found, quick_reduce.two_shot(inputs, CODECS["FP4"], cast_bf16_to_fp16=True))
    assert all_reduce(torch.zeros(0, 5, dtype=torch.float16), CODECS["FP4"]).shape == (0, 5)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_rank_ends_with_the_bits_of_the_reference(world: int) -> None:
    run_ranks(world, compare_with_reference, world)


def compare_hosts_with_reference(rank: int, hosts: list[list[int]]) -> None:
    groups = two_level_groups(hosts)
    for codec, dtype, shape in itertools.product(CODECS.values(), DTYPES, SHAPES):
        inputs = [[tensor_of(other, shape, dtype) for other in host] for host in hosts]
        found = two_level_all_reduce(tensor_of(rank, shape, dtype), codec, *groups)
        assert_same(found, quick_reduce.two_level(inputs, codec))
    inputs = [[tensor_of(other, (700,), torch.bfloat16) for other in host] for host in hosts]
    found = two_level_all_reduce(tensor_of(rank, (700,), torch.bfloat16), CODECS["INT8"], *groups, True)
    assert_same(found, quick_reduce.two_level(inputs, CODECS["INT8"], True))


@pytest.mark.parametrize(
    "hosts",
    [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[0, 1]], [[0], [1], [2]]],
    ids=str,
)
def test_two_levels_end_with_the_bits_of_the_reference(hosts: list[list[int]]) -> None:
    run_ranks(sum(map(len, hosts)), compare_hosts_with_reference, hosts)


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
