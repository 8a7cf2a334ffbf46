# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's names of what engines fuse into one layer."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

# The shards of a fused attention projection by the engines' letters, in the order of their rows.
_LETTERS = ("q", "k", "v", "index_q", "index_k")


def shard_name(prefix: str, shard: int, fused: Mapping[str, Sequence[str]]) -> str:
    """The checkpoint's name of shard number `shard` of the layer that the engine calls `prefix`, fused or not.

    `fused` is the engine's packed_modules_mapping: {"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}.
    """
    parent, dot, leaf = prefix.rpartition(".")
    shards = fused.get(leaf, [leaf])
    return f"{parent}{dot}{shards[shard]}" if shard < len(shards) else prefix


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
        prefix, fused: as for `shard_name`.
        sizes: the rows of each shard on this rank.
    """

    def __init__(self, prefix: str, fused: Mapping[str, Sequence[str]], sizes: Sequence[int]) -> None:
        self._prefix, self._fused, self._sizes = prefix, fused, list(sizes)

    def of_all(self) -> list[str]:
        """The weights of all shards."""
        return [self.of_shard(shard) for shard in range(len(self._sizes))]

    def of_row(self, row: int) -> str:
        """The weight that row number `row` belongs to."""
        ends = list(accumulate(self._sizes))
        return f"{shard_name(self._prefix, bisect_right(ends, row), self._fused)}.weight"

    def of_shard(self, shard: str | int | tuple[int, ...] | None = None) -> str:
        """The weight that an engine means by `shard`; the whole layer where that is none or several."""
        numbers = shard_numbers(shard, len(self._sizes))
        name = shard_name(self._prefix, numbers[0], self._fused) if len(numbers) == 1 else self._prefix
        return f"{name}.weight"
