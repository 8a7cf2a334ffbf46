# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm bench serve` on the demo model: a real server, asked by vLLM's own client."""

import json
from pathlib import Path

import ports
import pytest
from typer.testing import CliRunner

from llm_quant_rocm.cli import _server
from llm_quant_rocm.cli._app import app

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


@pytest.mark.usefixtures("forked")
def test_serving_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_free_port", ports.free)
    result = CliRunner().invoke(
        app,
        ["bench", "serve", str(DEMO_MODEL), "--quantization", "ptpc_fp8", "--prompts", "2", "--input-len", "32"]
        + ["--output-len", "4", "--serve-args=--enforce-eager", "--json"],
    )
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert {"device", "vllm", "llm-quant-rocm", "date"} <= answer["environment"].keys()
    load = answer["methods"]["ptpc_fp8"]["2"]
    assert load["speedup"] == 1.0
    # 8 tokens in all
    assert load["output_tokens_s"] * load["seconds"] > 7.9 and load["ttft_ms"] > 0 and load["tpot_ms"] > 0
