# SPDX-License-Identifier: Apache-2.0
"""What `quantize` writes, served by a vLLM without this plugin: the same numbers as PTPC made while loading."""

from pathlib import Path

import pytest

from llm_quant_rocm.checkpoint import quantize_checkpoint
from llm_quant_rocm.cli._evaluate import Evaluation, evaluate

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


def evaluated(model: Path, text: Path, quantization: str | None = None) -> Evaluation:
    return evaluate(model, text, quantization=quantization, context=512, environment={"VLLM_PLUGINS": ""})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the held-out text: without FP8 in the CPU, vLLM's own products are oneDNN's slow reference."""
    part = tmp_path_factory.mktemp("text") / "part.txt"
    part.write_text((DEMO_MODEL / "heldout.txt").read_text()[:3000])
    return part


@pytest.fixture(scope="module")
def online(text: Path) -> Evaluation:
    """vLLM's own quantization while loading."""
    return evaluated(DEMO_MODEL, text, "fp8_per_channel")


@pytest.mark.parametrize(
    ("layout", "method"),
    [("compressed-tensors", "CompressedTensorsLinearMethod"), ("modelopt", "ModelOptLinearMethod")],
)
def test_vllm_serves_ptpc_checkpoints_without_the_plugin(
    tmp_path: Path, text: Path, online: Evaluation, layout: str, method: str
) -> None:
    quantize_checkpoint(DEMO_MODEL, tmp_path / "model", layout, scheme="ptpc_fp8")
    found = evaluated(tmp_path / "model", text)
    assert any(method in kernel for kernel in found.kernels), found.kernels
    assert found.greedy == online.greedy
    assert found.loss == pytest.approx(online.loss, rel=1e-6)
