# SPDX-License-Identifier: Apache-2.0
"""The demo model's figures as the command prints them, with a made-up command."""

import json
from pathlib import Path

import pytest

from benchmarks import demo_model

VALUES = {"word_perplexity": 2.0, "loss_percent": 0.5, "greedy_agreement_percent": 90.0, "checkpoint": "x"}


def test_every_way_to_quantize_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: str, *arguments: str) -> str:
        if command == "quantize":
            folder = Path(arguments[1])
            folder.mkdir()
            report = {"files": {"a": {"errors": {"x": 0.1, "y": 0.2}}, "b": {"errors": {"z": 0.3}}}}
            (folder / "quantization_report.json").write_text(json.dumps(report))
            return ""
        names = arguments[arguments.index("--quantization") + 1].split(",")
        return json.dumps({"environment": {"device": "a CPU"}, "methods": {name: VALUES for name in names}})

    monkeypatch.setattr(demo_model, "run", run)
    command, found = demo_model.quantize()
    ways = [f"nvfp4, {block}, {shared}" for block in ("nearest", "search") for shared in ("shared", "separate")]
    assert list(found["methods"]) == ["bf16", "ptpc_fp8", *ways]
    assert found["methods"][ways[0]] == {
        "block_scales": "nearest", "global_scales": "shared", "mean_relative_error_of_weights": 0.2,
        "word_perplexity": 2.0, "loss_percent": 0.5, "greedy_agreement_percent": 90.0,
    }  # fmt: skip
    assert command.startswith("llm-quant-rocm eval examples/demo_model")
