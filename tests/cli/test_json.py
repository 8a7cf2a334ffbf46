# SPDX-License-Identifier: Apache-2.0
"""--json is JSON whatever was measured: programs refuse NaN and infinity, for which null stands."""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from llm_quant_rocm.cli import _vllm
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli._json import print_json
from llm_quant_rocm.cli.bench import _output
from llm_quant_rocm.cli.bench.serve import Load
from llm_quant_rocm.cli.doctor import render
from llm_quant_rocm.cli.doctor.table import Part

serve = sys.modules[Load.__module__]
CLI = Path(_vllm.__file__).parent
NAN, INF = float("nan"), float("inf")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=pytest.fail)


def test_the_figures_of_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_vllm, "require_command", lambda: None)
    monkeypatch.setattr(serve, "_measure", lambda *_: {2: Load(1.0, INF, 3.0, NAN)})
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "serve", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    load = {"seconds": 1.0, "output_tokens_s": None, "ttft_ms": 3.0, "tpot_ms": None, "speedup": None}
    assert strict(result.stdout)["methods"] == dict.fromkeys(["bf16", "ptpc_fp8"], {"2": load})


def test_the_figures_of_operators(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"m": 1, "us": {"ours": INF}}]
    table = _output.times("layers", {"m": "rows"}, rows, "ours")
    environment = {"device": "a GPU", "date": "today"}
    _output.show(Console(), table, [], {"rows": rows}, environment, None, as_json=True)
    assert strict(capsys.readouterr().out)["rows"] == [{"m": 1, "us": {"ours": None}}]


def test_the_report_of_the_doctor() -> None:
    @dataclass(frozen=True)
    class Row:
        copy: float

    console = Console(file=io.StringIO())
    render.print_json([Part("machine", "Machine", [Row(INF)])], console)
    assert strict(console.file.getvalue())["machine"]["rows"] == [{"copy": None}]  # type: ignore[attr-defined]


def test_every_command_prints_it_by_one_function() -> None:
    printing = [file.name for file in CLI.rglob("*.py") if "print_json(json.dumps" in file.read_text()]
    assert not printing, f"by {print_json.__module__}"
