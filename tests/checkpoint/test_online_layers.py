# SPDX-License-Identifier: Apache-2.0
"""Which layers an entry of `ignored_layers` names."""

import pytest

from llm_quant_rocm.checkpoint.online_layers import IGNORED, LINEAR, OnlineLayers


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


def test_layers_that_come_later_have_a_line_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """MTP layers do, which the user's list may name."""
    layers = OnlineLayers(["model.layers.2"])
    with caplog.at_level("INFO"):
        for kind, prefix in ((LINEAR, "model.layers.0.mlp.down_proj"), (IGNORED, "model.layers.2.mlp.down_proj")):
            layers.note(kind, prefix)
            layers.report({})
            layers.report({})
    first, warning, second = caplog.messages
    assert "quantizing 1 linear layers to" in first and first.endswith("left as they are: none")
    assert warning.endswith("ignored_layers names 'model.layers.2', which no layer of this process matches so far")
    assert "quantizing nothing" in second and "1 layers named by ignored_layers (model.layers.2" in second
