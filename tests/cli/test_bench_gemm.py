# SPDX-License-Identifier: Apache-2.0
"""`bench gemm` on a CPU: everyone's results are checked as on a GPU; only the clock is made up."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from llm_quant_rocm import ops, provenance, timing
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli.bench.gemm import BASE, TOLERANCE, measure, panels, products, table

N, K = 48, 256


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and times are made up: bf16 takes 10 us, everyone else 5."""
    monkeypatch.setattr(timing, "copies", lambda nbytes: 2)
    monkeypatch.setattr(timing, "capture", lambda calls: None)
    monkeypatch.setattr(timing, "time_graphs", lambda graphs: {name: 10.0 if name == BASE else 5.0 for name in graphs})


def test_everyone_is_right_and_rows_say_so(clock: None) -> None:
    absent: dict[str, str] = {}
    rows = measure("layer", N, K, (1, 100), torch.device("cpu"), absent)
    assert [(row["m"], row["n"], row["k"]) for row in rows] == [(1, N, K), (100, N, K)]
    for row in rows:
        right = {name for name in row["us"] if name != "vllm_fp8"}
        assert right == {"bf16", "ptpc_linear", "nvfp4_gemm"} | ({"nvfp4_gemm_fp8"} if row["m"] > 64 else set())
        assert 0 < row["error"]["bf16"] < row["error"]["ptpc_linear"] < row["error"]["nvfp4_gemm"] < 0.12
        # vLLM's kernel is not in its build for CPUs.
        assert set(row.get("failed", {})) | set(absent) == {"vllm_fp8"}


def test_a_wrong_result_is_not_timed(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "nvfp4_gemm", lambda x, weight, prefill: torch.zeros(x.shape[0], N))
    (row,) = measure("layer", N, K, (4,), torch.device("cpu"), {})
    assert "nvfp4_gemm" not in row["us"]
    assert "relative error 1.0 exceeds 0.12" in row["failed"]["nvfp4_gemm"]


def test_a_weight_without_blocks_leaves_nvfp4_out() -> None:
    absent: dict[str, str] = {}
    found = products([torch.randn(8, 24, dtype=torch.bfloat16)], absent)
    assert "nvfp4_gemm" not in found and "24 columns, no multiple of 16" in absent["nvfp4_gemm"]
    assert found.keys() <= TOLERANCE.keys()


def test_the_table_shows_speedups_and_gaps() -> None:
    rows = [
        {"layer": "o", "n": 8, "k": 16, "m": 1, "us": {"bf16": 10.0, "ptpc_linear": 5.0}},
        {"layer": "o", "n": 8, "k": 16, "m": 99, "us": {"bf16": 10.0, "nvfp4_gemm_fp8": 20.0}},
    ]
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(rows))
    text = console.export_text()
    assert "5.0 (2.00)" in text and "20.0 (0.50)" in text


def test_a_panel_for_each_who_was_timed_and_a_line_a_layer() -> None:
    rows = [
        {"layer": "qkv", "m": 1, "us": {BASE: 10.0, "ptpc_linear": 5.0}},
        {"layer": "qkv", "m": 99, "us": {BASE: 12.0, "ptpc_linear": 4.0, "vllm_fp8": 24.0}},
        {"layer": "o", "m": 1, "us": {BASE: 10.0}, "failed": {"ptpc_linear": "no"}},
        {"layer": "o", "m": 99, "us": {"ptpc_linear": 5.0}, "failed": {BASE: "no"}},
    ]
    found = panels(rows)
    assert [panel.title for panel in found] == ["ptpc_linear: times as fast as bf16", "vllm_fp8: times as fast as bf16"]
    assert [panel.lines for panel in found] == [{"qkv": [(1, 2.0), (99, 3.0)]}, {"qkv": [(99, 0.5)]}]


def test_the_command_prints_draws_and_names_the_row_that_failed(
    clock: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The package has a function of the module's name.
    module = import_module("llm_quant_rocm.cli.bench.gemm")
    monkeypatch.setattr(module, "require_gpu", lambda: None)
    monkeypatch.setattr(module, "layers_of", lambda *arguments: {"tiny": (N, K)})
    monkeypatch.setattr(module, "measure", lambda *a: measure(*a[:4], torch.device("cpu"), a[5]))
    monkeypatch.setattr(ops, "nvfp4_gemm", lambda x, weight, prefill: torch.zeros(x.shape[0], N))
    monkeypatch.setattr(provenance, "environment", lambda: {"device": "a GPU", "commit": "abc", "date": "today"})
    command = partial(CliRunner().invoke, app)
    plot = tmp_path / "gemm.png"
    result = command(["bench", "gemm", "--ms", "1,8", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "5.0 (2.00)" in result.stdout and "a GPU, commit abc, today" in result.stdout
    assert "layer tiny, n 48, k 256, m 8: nvfp4_gemm failed: ArithmeticError" in result.stdout
    assert plot.stat().st_size > 5000
    found = json.loads(command(["bench", "gemm", "--ms", "1,8", "--json"]).stdout)
    assert found["environment"]["commit"] == "abc" and [row["m"] for row in found["rows"]] == [1, 8]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu() -> None:
    result = CliRunner().invoke(app, ["bench", "gemm"])
    assert result.exit_code == 1
    assert result.stderr.startswith("bench gemm: FAILED. no GPU is here") and result.stderr.count("\n") == 1
