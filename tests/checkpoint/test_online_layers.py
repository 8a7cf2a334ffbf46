# SPDX-License-Identifier: Apache-2.0
"""Which layers an entry of `ignored_layers` names."""

import pytest

from llm_quant_rocm.checkpoint.online_layers import LINEAR, OnlineLayers


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


def test_every_kind_that_stays_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    layers = OnlineLayers()
    layers.note(LINEAR, "a")
    layers.note("layers of another kind", "b")
    with caplog.at_level("INFO"):
        layers.report({})
    assert "quantizing 1 linear layers to" in caplog.text and "1 layers of another kind (b)" in caplog.text
