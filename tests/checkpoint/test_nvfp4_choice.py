# SPDX-License-Identifier: Apache-2.0
"""What the log says of who serves a model's layers."""

import pytest

from llm_quant_rocm.checkpoint.nvfp4_choice import LayerChoice
from llm_quant_rocm.checkpoint.nvfp4_kinds import Options


def test_layers_that_come_later_have_a_line_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """MTP layers do."""
    layers = LayerChoice("an engine")
    with caplog.at_level("INFO"):
        for prefix in ("model.layers.0.mlp.down_proj", "model.layers.2.mlp.down_proj"):
            layers.choose(prefix, "NVFP4", nvfp4=object, fp8=object, engines=object, unquantized=str, fused={})
            layers.report(Options())
            layers.report(Options())
    first, second = caplog.messages
    assert "1 linear layers (model.layers.0.mlp.down_proj);" in first
    assert "1 linear layers (model.layers.2.mlp.down_proj);" in second
