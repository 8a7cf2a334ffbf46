# SPDX-License-Identifier: Apache-2.0
"""Which layers an entry of `ignored_layers` names."""

import pytest

from llm_quant_rocm.checkpoint.online_layers import OnlineLayers


@pytest.mark.parametrize(
    ("entry", "layer", "named"),
    [
        ("model.layers.1", "model.layers.1.mlp.down_proj", True),
        ("model.layers.1", "model.layers.10.mlp.down_proj", False),
        ("down_proj", "model.layers.1.mlp.down_proj", True),
        ("proj", "model.layers.1.mlp.down_proj", False),
        ("re:.*layers.1\\.", "model.layers.1.mlp.down_proj", True),
        ("re:layers", "model.layers.1.mlp.down_proj", False),
    ],
    ids=["part", "longer-number", "end", "end-of-a-word", "expression", "expression-of-the-middle"],
)
def test_entries_name_whole_parts(entry: str, layer: str, named: bool) -> None:
    assert OnlineLayers([entry]).is_ignored(layer, {}) is named
