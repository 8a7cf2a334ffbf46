# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's names of what engines fuse into one layer."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

# The shards of a fused attention projection by the engines' letters, in the order of their rows.
_LETTERS = ("q", "k", "v", "index_q", "index_k")
# Of which of a checkpoint's layers engines make several shards, and how many. Numbers of names and of shards do not
# tell: MiniMax-M3's qkv_proj has two shards more than names, which have none.
_SHARDS = {"in_proj_qkv": 3}


def fused_names(prefix: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The checkpoint's names of the layers that make up the one that the engine calls `prefix`; none if not fused.

    `fused` is the engine's packed_modules_mapping: {"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}.
    """
    parent, dot, leaf = prefix.rpartition(".")
    return [f"{parent}{dot}{name}" for name in fused.get(leaf, ())]


def shard_name(prefix: str, shard: int, fused: Mapping[str, Sequence[str]]) -> str:
    """The checkpoint's name of shard number `shard` of the layer that the engine calls `prefix`, fused or not."""
    names = fused_names(prefix, fused)
    of_shards = [name for name in names for _ in range(_SHARDS.get(name.rpartition(".")[2], 1))]
    return of_shards[shard] if shard < len(of_shards) else prefix


def shard_numbers(shard: str | int | tuple[int, ...] | None, count: int) -> list[int]:
    """The shards that an engine means by `shard`, of a layer with `count`: a number, several, a letter, None: all."""
    if shard is None:
        return list(range(count))
    if isinstance(shard, tuple):
        return list(shard)
    return [_LETTERS.index(shard) if isinstance(shard, str) else shard]


class ShardNames:
    """The names of the weights in a layer's rows, for messages.

    Args:
        prefix, fused: as for `fused_names`.
        sizes: the rows of each shard on this rank.
    """

    def __init__(self, prefix: str, fused: Mapping[str, Sequence[str]], sizes: Sequence[int]) -> None:
        self._prefix, self._fused, self._sizes = prefix, fused, list(sizes)

    def of_row(self, row: int) -> str:
        """The weight that row number `row` belongs to."""
        ends = list(accumulate(self._sizes))
        return f"{shard_name(self._prefix, bisect_right(ends, row), self._fused)}.weight"

    def of_shard(self, shard: str | int | tuple[int, ...] | None = None) -> str:
        """The weight that an engine means by `shard`; the whole layer where several weights are meant."""
        names = {shard_name(self._prefix, number, self._fused) for number in shard_numbers(shard, len(self._sizes))}
        return f"{names.pop() if len(names) == 1 else self._prefix}.weight"
