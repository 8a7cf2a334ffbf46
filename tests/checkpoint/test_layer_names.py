# SPDX-License-Identifier: Apache-2.0
"""Which weight of the checkpoint a row of a fused layer belongs to."""

from llm_quant_rocm.checkpoint.layer_names import ShardNames

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def test_rows_of_a_fused_layer() -> None:
    names = ShardNames("model.qkv_proj", FUSED, [4, 2, 1])
    found = [names.of_row(row) for row in range(7)]
    assert found == [f"model.{shard}_proj.weight" for shard in "qqqqkkv"]


def test_rows_of_a_layer_of_its_own() -> None:
    names = ShardNames("model.o_proj", FUSED, [3])
    assert {names.of_row(row) for row in range(3)} == {"model.o_proj.weight"}
