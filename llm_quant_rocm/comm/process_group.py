# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce over any torch.distributed backend: gloo on CPUs, RCCL or NCCL, within and across hosts.

The algorithm, bytes and results of `reference.quick_reduce`: segments go to their owners by one all-to-all, sums to all
by one all-gather. Every rank of a group calls with a tensor of the same shape and dtype, as for
torch.distributed.all_reduce, and gets a new tensor.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from llm_quant_rocm.comm.policy import MAX_WORLD_SIZE, Algorithm
from llm_quant_rocm.comm.roll_call import RollCall
from llm_quant_rocm.formats.wire import DTYPES, Codec, decode, encode
from llm_quant_rocm.reference.quick_reduce import add, carried, join, split


def all_reduce(
    x: torch.Tensor, codec: Codec, group: dist.ProcessGroup | None = None, cast_bf16_to_fp16: bool = False
) -> torch.Tensor:
    """The sum of x over the ranks of `group` (the default group where None), on every rank with the same bits.

    Args:
        x: bf16 or fp16, any shape, on a device that the group's backend serves.
        cast_bf16_to_fp16: bf16 values travel as fp16; those beyond its range as its largest.

    Raises:
        TypeError: x's dtype.
        ValueError: more than 8 ranks, or this process is not one of them.
    """
    _check(x)
    world = _world_size(group)
    if world == 1 or x.numel() == 0:
        return x.clone()
    values = carried(x, cast_bf16_to_fp16)
    sums = _sum_of_own_segment(values, codec, group)
    return join(decode(_gathered(encode(sums, codec), group), codec, values.dtype), x)


def one_shot(x: torch.Tensor, codec: Codec, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """`all_reduce` where everybody sends everything to everybody: nothing is encoded a second time."""
    _check(x)
    if _world_size(group) == 1 or x.numel() == 0:
        return x.clone()
    received = _gathered(encode(split(x, 1), codec), group)
    return join(add(decode(received, codec, x.dtype), x.dtype), x)


def two_level_groups(
    hosts: Sequence[Sequence[int]], backend: str | None = None, timeout: timedelta | None = None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups (inside, between) of this process for `two_level_all_reduce`.

    Args:
        hosts: the ranks of each host, in the default group; all of them call, and with the same hosts. The lowest ranks
            of all hosts exchange with each other, then the next ones.
        backend, timeout: of the new groups; torch's defaults where None.

    Raises:
        ValueError: hosts of different size, or none; a rank on two of them; this process on none of them; or hosts of
            which now one, now another has the lower rank, as [0, 3] and [1, 2]: groups add in the order of their ranks.
    """
    if len({len(host) for host in hosts}) != 1:
        raise ValueError(
            f"hosts of {', '.join(str(len(host)) for host in hosts) or 'no'} ranks: a two-level all-reduce needs as "
            "many ranks on every host"
        )
    twice = [rank for rank, hosted in Counter(chain.from_iterable(hosts)).items() if hosted > 1]
    if twice:
        raise ValueError(f"rank {twice[0]} is named twice by the hosts {[list(host) for host in hosts]}")
    rows = sorted(sorted(host) for host in hosts)
    columns = [list(peers) for peers in zip(*rows, strict=True)]
    if any(sorted(column) != column for column in columns):
        raise ValueError(f"the ranks of the hosts {rows} interleave; number them host by host")
    rank = dist.get_rank()
    if not any(rank in host for host in hosts):
        raise ValueError(f"rank {rank} is on none of the hosts {rows}")
    # Each is made by its members alone: other processes may be making other groups.
    inside, between = (
        dist.new_group(
            next(ranks for ranks in level if rank in ranks), timeout, backend, use_local_synchronization=True
        )
        for level in (rows, columns)
    )
    return inside, between


def two_level_all_reduce(
    x: torch.Tensor,
    codec: Codec,
    inside: dist.ProcessGroup,
    between: dist.ProcessGroup,
    cast_bf16_to_fp16: bool = False,
) -> torch.Tensor:
    """The sum of x over several hosts. Between hosts travels one segment of each rank, encoded.

    `inside` are the ranks of this host, `between` those with this one's place on every host: `two_level_groups`. Each
    may have up to 8 ranks. Arguments and errors otherwise as for `all_reduce`.
    """
    _check(x)
    ranks, hosts = _world_size(inside), _world_size(between)
    if hosts == 1 or ranks == 1 or x.numel() == 0:
        return all_reduce(x, codec, inside if hosts == 1 else between, cast_bf16_to_fp16)
    values = carried(x, cast_bf16_to_fp16)
    host_sum = _sum_of_own_segment(values, codec, inside)
    total = _sum_of_own_segment(host_sum, codec, between)
    # [ranks, hosts, bytes]: segments of this host's owners, each in segments of the owners between hosts
    wire = _gathered(_gathered(encode(total, codec), between), inside)
    segments = decode(wire, codec, values.dtype).flatten(1)[:, : host_sum.numel()]
    return join(segments, x)


def _check(x: torch.Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"the quantized all-reduce takes bf16 or fp16, not {x.dtype}")


def _world_size(group: dist.ProcessGroup | None) -> int:
    world = dist.get_world_size(group)
    if world < 1:
        raise ValueError("this process is not in the group of the all-reduce")
    if world > MAX_WORLD_SIZE:
        raise ValueError(
            f"the quantized all-reduce serves groups of up to {MAX_WORLD_SIZE} ranks, this one has {world}; "
            "two_level_all_reduce serves more"
        )
    return world


def _sum_of_own_segment(values: torch.Tensor, codec: Codec, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum, in the type of `values`, of the segment that this rank owns: the first shot."""
    sent = encode(split(values, dist.get_world_size(group)), codec)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return add(decode(received, codec, values.dtype), values.dtype)


def _gathered(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Every rank's `part` [...], stacked: [world, ...]."""
    world = dist.get_world_size(group)
    out = torch.empty((world, *part.shape), dtype=part.dtype, device=part.device)
    dist.all_gather(list(out), part, group=group)
    return out


class ProcessGroupReduce:
    """The all-reduces of one group of ranks: `comm.quick_reduce.QuickReduce` where ranks do not share memory.

    All ranks make the same calls in the same order. An error names the call and who is missing (`RollCall`).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hosts: Sequence[Sequence[int]] = (),
        timeout: timedelta | None = None,
    ) -> None:
        """
        Args:
            group: its ranks all call.
            hosts: the group's ranks of each host, as the default group numbers them. If there are several, exchange
                within and between them.
            timeout: of the groups for several hosts; torch's default where None.

        Raises:
            ValueError: hosts that `two_level_groups` refuses.
        """
        self._group = group
        self._levels = two_level_groups(hosts, dist.get_backend(group), timeout) if len(hosts) > 1 else None
        self._roll_call = RollCall(group, "quantized all-reduce")

    def all_reduce(
        self,
        x: torch.Tensor,
        codec: Codec,
        algorithm: Algorithm = Algorithm.PROCESS_GROUP,
        cast_bf16_to_fp16: bool = False,
    ) -> torch.Tensor:
        """The sum of x over the ranks, a new tensor: `all_reduce`, or `two_level_all_reduce` on several hosts.

        Raises:
            TypeError: x's dtype.
            ValueError: an algorithm that this group does not serve.
            RuntimeError: a rank did not arrive within the timeout of its group, or ended.
        """
        serves = Algorithm.TWO_LEVEL if self._levels else Algorithm.PROCESS_GROUP
        if algorithm is not serves:
            raise ValueError(f"this process group serves {serves}, not {algorithm}")
        with self._roll_call.call():
            if self._levels:
                return two_level_all_reduce(x, codec, *self._levels, cast_bf16_to_fp16)
            return all_reduce(x, codec, self._group, cast_bf16_to_fp16)

    def check(self) -> None:
        """Nothing: a lost rank is an error of the call."""
