# SPDX-License-Identifier: Apache-2.0
"""What `quantize` writes, served by a vLLM without this plugin: the same numbers as PTPC made while loading."""

import sys
from pathlib import Path
from unittest.mock import patch

import engines
import forks
import pytest

from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint
from llm_quant_rocm.cli._evaluate import Evaluation, evaluate

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


def evaluated(model: Path, plugins: str, quantization: str | None = None) -> Evaluation:
    text = DEMO_MODEL / "heldout.txt"
    environment = {"VLLM_PLUGINS": plugins, **engines.EAGER}
    with patch.object(sys, "executable", forks.python()):
        return evaluate(model, text, quantization=quantization, context=512, environment=environment)


@pytest.fixture(scope="module")
def online() -> Evaluation:
    """vLLM's own quantization while loading."""
    return evaluated(DEMO_MODEL, "", "fp8_per_channel")


@pytest.mark.parametrize(
    ("layout", "method"),
    [("compressed-tensors", "CompressedTensorsLinearMethod"), ("modelopt", "ModelOptLinearMethod")],
)
def test_vllm_serves_ptpc_checkpoints_without_the_plugin(
    tmp_path: Path, online: Evaluation, layout: str, method: str
) -> None:
    quantize_checkpoint(DEMO_MODEL, tmp_path / "model", layout, scheme="ptpc_fp8")
    found = evaluated(tmp_path / "model", "")
    assert any(method in kernel for kernel in found.kernels), found.kernels
    assert found.greedy == online.greedy
    assert found.loss == pytest.approx(online.loss, rel=1e-6)
