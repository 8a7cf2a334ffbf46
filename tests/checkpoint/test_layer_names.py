# SPDX-License-Identifier: Apache-2.0
"""Which weight of the checkpoint a row or a shard of a fused layer belongs to."""

import pytest

from llm_quant_rocm.checkpoint.layer_names import ShardNames

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}


def test_rows_of_a_fused_layer() -> None:
    names = ShardNames("model.qkv_proj", FUSED, [4, 2, 1])
    found = [names.of_row(row) for row in range(7)]
    assert found == [f"model.{shard}_proj.weight" for shard in "qqqqkkv"]


def test_rows_of_a_layer_of_its_own() -> None:
    names = ShardNames("model.o_proj", FUSED, [3])
    assert {names.of_row(row) for row in range(3)} == {"model.o_proj.weight"}


def test_one_weight_of_several_shards() -> None:
    """Qwen3.5 has q, k and v of its linear attention in one, which engines load as three shards."""
    names = ShardNames("model.in_proj_qkvz", FUSED, [2, 2, 3, 1])
    assert [names.of_row(row) for row in range(8)] == ["model.in_proj_qkv.weight"] * 7 + ["model.in_proj_z.weight"]
    assert names.of_shard((0, 1, 2)) == names.of_shard(1) == "model.in_proj_qkv.weight"
    assert names.of_shard(3) == "model.in_proj_z.weight"
    assert names.of_shard() == names.of_shard((2, 3)) == "model.in_proj_qkvz.weight"


@pytest.mark.parametrize(("shard", "name"), [("k", "k_proj"), ("index_k", "qkv_proj")])
def test_shards_that_the_engine_does_not_name(shard: str, name: str) -> None:
    """MiniMax-M3's indexer, of which vLLM's mapping says nothing."""
    assert ShardNames("model.qkv_proj", FUSED, [4, 2, 2, 1, 1]).of_shard(shard) == f"model.{name}.weight"
