# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's names of what engines fuse into one layer."""

from collections.abc import Mapping, Sequence

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
