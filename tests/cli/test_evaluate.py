# SPDX-License-Identifier: Apache-2.0
"""What `eval` makes of its arguments and of an engine's figures; no engine runs here."""

import errno
import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from llm_quant_rocm.cli import _evaluate, _evaluate_worker, _vllm, _worker
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli._errors import CommandError
from llm_quant_rocm.cli._evaluate import Evaluation
from llm_quant_rocm.cli._json import json_of
from llm_quant_rocm.cli._methods import NAMED, Failures, Method, methods_named, refuse_unknown
from llm_quant_rocm.cli._tasks_worker import named
from llm_quant_rocm.cli.evaluate import columns, figures

BASE = Evaluation(800.0, 100, (1, 2, 3, 4), ("A",))
NOISE = Evaluation(1e6, 100, (5, 6, 7, 8), ("C",))
OTHER = Evaluation(801.0, 100, (1, 2, 3, 5), ("B",))


def test_methods_are_ours_the_engines_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    methods = methods_named(f"bf16, nvfp4,fp8_per_tensor,{tmp_path}")
    assert list(methods) == ["bf16", "nvfp4", "fp8_per_tensor", str(tmp_path)]
    assert methods["bf16"] == Method() == NAMED["bf16"]
    assert methods["fp8_per_tensor"] == Method(quantization="fp8_per_tensor")
    assert methods[str(tmp_path)].checkpoint(Path("model"), Path("scratch")) == tmp_path


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "--quantization names nothing: name some"),
        (" , ", "--quantization names nothing: name some"),
        ("bf16,ptpc_fp8,bf16", "--quantization names bf16 twice"),
        ("./nowhere", "--quantization names ./nowhere, which is no checkpoint's folder"),
    ],
    ids=["empty", "commas", "twice", "folder"],
)
def test_lists_that_are_wrong(names: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        methods_named(names)


def test_nvfp4_of_a_model_that_cannot_be_says_why(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot become an NVFP4 checkpoint: .* has no config.json"):
        NAMED["nvfp4"].checkpoint(tmp_path, tmp_path / "scratch")


def test_lm_evals_keys() -> None:
    found = named({"alias": "gsm8k", "sample_len": 5, "exact_match,strict-match": 0.5, "acc,none": 1,
                   "exact_match_stderr,strict-match": 0.1, "acc_stderr,none": "N/A"})  # fmt: skip
    assert found == {"exact_match (strict-match)": 0.5, "acc": 1, "exact_match (strict-match)_stderr": 0.1}


def test_the_table_has_a_column_a_metric() -> None:
    scores = {"bf16": {"gsm8k": {"acc": 0.75, "acc_stderr": 0.013}}, "ptpc_fp8": {"gsm8k": {"acc": 0.7}}}
    assert columns(scores) == {"gsm8k\nacc": {"bf16": "0.75 ± 0.013", "ptpc_fp8": "0.7"}}
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(_evaluate.table("title", {"bf16": BASE, "ptpc_fp8": OTHER}, "bf16", columns(scores)))
    text = console.export_text()
    for word in ("2980.96", "+1.01%", "75.00%", "gsm8k", "0.75 ± 0.013", "with bf16"):
        assert word in text, text


def test_figures_compare_with_the_first() -> None:
    answer = figures({"bf16": BASE, "x": OTHER}, {"x": {"t": {"acc": 1.0}}}, Path("m"), Path("t.txt"), 512)
    assert json.loads(json_of(answer)) == {
        "model": "m", "text": "t.txt", "context": 512, "words": 100, "tokens": 4,
        "methods": {
            "bf16": {
                "word_perplexity": pytest.approx(math.exp(8.0)), "loss_percent": 0.0,
                "greedy_agreement_percent": 100.0, "linear_methods": ["A"], "tasks": {},
            },
            "x": {
                "word_perplexity": pytest.approx(math.exp(8.01)), "loss_percent": pytest.approx(100 * math.expm1(0.01)),
                "greedy_agreement_percent": 75.0, "linear_methods": ["B"], "tasks": {"t": {"acc": 1.0}},
            },
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, [], "has no config.json: name the folder of a checkpoint."),
        ({"config.json": b"{}"}, [], "heldout.txt is not there: name a text file by --text."),
        ({"config.json": b"{}", "heldout.txt": b"\n"}, [], "heldout.txt is empty: name another text file by --text."),
        (
            {"config.json": b"{}", "heldout.txt": "\u6f22\u5b57".encode() * 200},
            [],
            "has 1 words in 400 characters, and perplexity is that of a word: name a text with blanks between words",
        ),
        (
            {"config.json": b"{}", "heldout.txt": b"\x92\xff"},
            [],
            "heldout.txt is no text in UTF-8 (invalid start byte)",
        ),
        ({"config.json": b'{"a": ', "heldout.txt": b"a"}, [], "config.json is no JSON (Expecting value"),
        ({"config.json": b"[1]", "heldout.txt": b"a"}, [], "config.json holds no JSON object: download"),
        ({"config.json": b"{}"}, ["--quantization", "bf16,bf16"], "--quantization names bf16 twice."),
    ],
    ids=["model", "text", "empty", "no blanks", "picture", "broken", "list", "methods"],
)
def test_one_sentence_for_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], options: list[str], message: str
) -> None:
    monkeypatch.setattr(_vllm, "require", lambda: None)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    result = CliRunner().invoke(app, ["eval", str(tmp_path), *options])
    assert result.exit_code == 1
    assert result.stderr.startswith("eval: FAILED. ") and message in result.stderr and result.stderr.count("\n") == 1


def forbid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Files of this name are closed to this user, who may be root."""
    read_text = Path.read_text

    def refuse(path: Path, *args: Any, **options: Any) -> str:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refuse)


@pytest.mark.parametrize(
    ("unreadable", "config", "message"),
    [
        ("config.json", {}, "config.json cannot be read (Permission denied): give this user the right to"),
        ("heldout.txt", {}, "heldout.txt cannot be read (Permission denied): name another by --text."),
        ("", {"text_config": [1]}, "describes itself in a way that cannot be understood"),
    ],
    ids=["config", "text", "a list"],
)
def test_what_cannot_be_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str, config: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(_vllm, "require", lambda: None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "heldout.txt").write_text("a text")
    forbid(monkeypatch, unreadable)
    result = CliRunner().invoke(app, ["eval", str(tmp_path), "--quantization", "bf16"])
    assert result.exit_code == 1
    assert result.stderr.startswith("eval: FAILED. ") and message in result.stderr and result.stderr.count("\n") == 1


QUANTIZED = pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"quantization_config": {"quant_method": "compressed-tensors"}}),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "modelopt"}}}),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}),
    ],
    ids=["config", "text config", "hf_quant_config"],
)


@QUANTIZED
@pytest.mark.parametrize("command", ["eval", "bench serve"])
def test_a_quantized_model_is_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, file: str, content: dict[str, Any]
) -> None:
    """An engine serves it quantized without a flag: under the name bf16, with the loss of a quantization as 0."""
    pretend(lambda *_: pytest.fail("an engine was started"), tmp_path, monkeypatch)
    monkeypatch.setattr(_vllm, "require_command", lambda: None)
    (tmp_path / file).write_text(json.dumps(content))
    result = CliRunner().invoke(app, [*command.split(), str(tmp_path), "--quantization", f"bf16,{tmp_path}/"])
    assert result.exit_code == 1
    assert result.stderr == (
        f"{command}: FAILED. {tmp_path} is quantized already, and would be measured as if it were not: give the 16-bit "
        "checkpoint as MODEL, and name this folder, with a /, in --quantization.\n"
    )


@QUANTIZED
def test_a_quantized_model_is_no_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: dict[str, Any]
) -> None:
    pretend(lambda *_: pytest.fail("an engine was started"), tmp_path, monkeypatch)
    (tmp_path / file).write_text(json.dumps(content))
    result = CliRunner().invoke(app, ["demo", "--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "is quantized already" in result.stdout and "name a 16-bit checkpoint by --model." in result.stdout


def test_a_quantized_model_is_measured_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is called bf16 where all methods are folders."""
    pretend(lambda *_: {"loss": 1.0, "words": 1, "greedy": [1], "kernels": []}, tmp_path, monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "modelopt"}}))
    result = CliRunner().invoke(app, ["eval", str(tmp_path), "--quantization", f"{tmp_path}/", "--json"])
    assert list(json.loads(result.stdout)["methods"]) == [f"{tmp_path}/"]


def pretend(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM and lm-eval are there, `run` is what their processes give, and `tmp_path` a model with a text."""
    monkeypatch.setattr(_vllm, "require", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(_worker, "run", run)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "heldout.txt").write_text("a text")


@pytest.mark.parametrize("broken", ["ptpc_fp8", "lm-eval on ptpc_fp8"])
def test_a_method_that_fails_costs_the_others_nothing(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(module: str, job: dict[str, Any], what: str, *_: object) -> Any:
        asked.append(what)
        if what.endswith(broken):
            raise CommandError(f"{what} ended with exit code 1:\nits log")
        if module.endswith("_tasks_worker"):
            return {"gsm8k": {"acc": 0.5}}
        return {"loss": 1.0, "words": 1, "greedy": [1], "kernels": []}

    pretend(run, tmp_path, monkeypatch)
    folder = f"{tmp_path}/"
    result = CliRunner().invoke(
        app, ["eval", str(tmp_path), "--quantization", f"bf16,ptpc_fp8,{folder}", "--tasks", "gsm8k", "--json"]
    )
    assert result.exit_code == 1
    assert "eval: FAILED. ptpc_fp8: " in result.stderr and result.stderr.endswith("exit code 1:\nits log\n")
    answer = json.loads(result.stdout)
    assert list(answer["failed"]) == ["ptpc_fp8"]
    assert answer["methods"][folder]["tasks"] == {"gsm8k": {"acc": 0.5}}
    assert ("ptpc_fp8" in answer["methods"]) == (broken != "ptpc_fp8")
    # What has failed already is not asked again.
    assert ("lm-eval on ptpc_fp8" in asked) == (broken != "ptpc_fp8")


def test_an_engine_that_takes_too_long_is_named_as_the_user_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(module: str, job: dict[str, Any], what: str, variables: object, timeout: float, raised_by: str) -> Any:
        asked.append((what, timeout, raised_by))
        if module.endswith("_tasks_worker"):
            return {"gsm8k": {"acc": 0.5}}
        return {"loss": 1.0, "words": 1, "greedy": [1], "kernels": []}

    pretend(run, tmp_path, monkeypatch)
    options = ["--quantization", f"bf16,{tmp_path}/", "--tasks", "gsm8k", "--timeout", "7"]
    assert CliRunner().invoke(app, ["eval", str(tmp_path), *options]).exit_code == 0
    methods = ("bf16", f"{tmp_path}/")
    assert asked == [(f"{what} on {name}", 7, "--timeout") for what in ("vLLM", "lm-eval") for name in methods]


@pytest.mark.parametrize("command", ["eval", "bench serve"])
@pytest.mark.parametrize("seconds", ["-5", "0"])
def test_no_time_at_all_is_none(command: str, seconds: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "model", "--timeout", seconds])
    assert result.exit_code == 2 and "--timeout" in result.stderr


def test_a_first_method_that_fails_is_the_end() -> None:
    """The others would be compared with nothing."""
    failures, messages = Failures(), Console(quiet=True)
    with pytest.raises(CommandError, match="the engine ended"), failures.kept("bf16", {}, messages):
        raise CommandError("the engine ended")
    assert not failures.reasons


def test_tasks_that_fail_at_once_cost_no_perplexity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(module: str, job: dict[str, Any], what: str, *_: object) -> Any:
        asked.append(what)
        if module.endswith("_tasks_worker"):
            raise CommandError(f"{what} ended with exit code 1: no task gsm9k")
        return {"loss": 1.0, "words": 1, "greedy": [1], "kernels": []}

    pretend(run, tmp_path, monkeypatch)
    options = ("--quantization", "bf16,ptpc_fp8", "--tasks", "gsm9k", "--json")
    result = CliRunner().invoke(app, ["eval", str(tmp_path), *options])
    assert result.exit_code == 1 and "no task gsm9k" in result.stderr
    answer = json.loads(result.stdout)
    assert list(answer["methods"]) == ["bf16", "ptpc_fp8"] and list(answer["failed"]) == ["bf16"]
    # Nor is the other engine started for them.
    assert sum(what.startswith("lm-eval") for what in asked) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", " ,"], "--tasks names nothing: name some of lm-eval's, for example gsm8k."),
        (["--tasks", "mine", "--include", "nowhere"], "--include nowhere: it must be a folder of lm-eval tasks."),
        (["--limit", "9"], "--include and --limit are for lm-eval's tasks: name some by --tasks."),
        (["--include", "."], "--include and --limit are for lm-eval's tasks: name some by --tasks."),
    ],
)
def test_tasks_are_looked_at_before_an_engine_starts(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> Any:
        raise AssertionError("an engine was started")

    pretend(run, tmp_path, monkeypatch)
    result = CliRunner().invoke(app, ["eval", str(tmp_path), "--quantization", "bf16", *options])
    assert (result.exit_code, result.stderr) == (1, f"eval: FAILED. {message}\n")


def test_tasks_may_have_blanks_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(module: str, job: dict[str, Any], *_: object) -> Any:
        if module.endswith("_tasks_worker"):
            return {task: {"acc": 0.5} for task in job["tasks"]}
        return {"loss": 1.0, "words": 1, "greedy": [1], "kernels": []}

    pretend(run, tmp_path, monkeypatch)
    options = ["--quantization", "bf16", "--tasks", "gsm8k, arc_easy,", "--json"]
    answer = json.loads(CliRunner().invoke(app, ["eval", str(tmp_path), *options]).stdout)
    assert list(answer["methods"]["bf16"]["tasks"]) == ["gsm8k", "arc_easy"]


def test_a_model_that_is_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "Llama"
    model.mkdir()
    pretend(lambda *_: {"loss": 1.0, "words": 1, "greedy": [1], "kernels": []}, model, monkeypatch)
    monkeypatch.chdir(model)
    result = CliRunner().invoke(app, ["eval", ".", "--quantization", "bf16"])
    assert "Llama over heldout.txt" in result.stdout


VLLMS = ["fp8", "fp8_per_tensor", "fp8_per_block", "awq", "ptpc_fp8"]


def test_a_misspelt_method_is_found_before_any_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answered(module: str, *_: object) -> list[str]:
        asked.append(module)
        return VLLMS

    monkeypatch.setattr(_vllm, "require", lambda: None)
    monkeypatch.setattr(_worker, "run", answered)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "heldout.txt").write_text("a text")
    result = CliRunner().invoke(app, ["eval", str(tmp_path), "--quantization", "bf16,ptpc_fp8,fp8_per_tensr"])
    assert result.exit_code == 1
    assert asked == ["llm_quant_rocm.cli._names_worker"]
    assert result.stderr == (
        "eval: FAILED. --quantization names fp8_per_tensr, which vLLM does not know: "
        "it could be fp8_per_tensor, fp8_per_block.\n"
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [("nvfp4_prefil_fp8", "could be nvfp4_prefill_fp8"), ("zzz", "could be awq, bf16, fp8, fp8_per_block, ")],
    ids=["near-ours", "near-nothing"],
)
def test_names_that_could_be_meant(monkeypatch: pytest.MonkeyPatch, names: str, message: str) -> None:
    monkeypatch.setattr(_worker, "run", lambda *_: VLLMS)
    with pytest.raises(CommandError, match=message):
        refuse_unknown(methods_named(names), Console(quiet=True))


def test_our_names_and_folders_ask_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(_worker, "run", lambda *_: pytest.fail("vLLM is asked"))
    refuse_unknown(methods_named(f"bf16,nvfp4,nvfp4_prefill_fp8,ptpc_fp8,{tmp_path}"), Console(quiet=True))


def test_every_token_is_in_one_window() -> None:
    tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=-1, encode=lambda text, **options: [*map(int, text)])
    assert _evaluate_worker.cut(tokenizer, "01234567", 4) == [[-1, 0, 1, 2], [-1, 3, 4, 5], [-1, 6, 7]]


@pytest.mark.parametrize("amx", [False, True])
def test_products_in_fp8_are_not_onednns_where_cpus_have_amx(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: seen.append("leave"))
    monkeypatch.setattr(torch, "_scaled_mm", lambda x, bias: seen.append(torch.backends.mkldnn.enabled) or x + bias)
    _evaluate_worker._avoid_slow_products()
    assert torch._scaled_mm(1, bias=2) == 3
    assert seen == (["leave", False] if amx else [True]) and torch.backends.mkldnn.enabled


def test_a_model_that_is_noise_costs_no_other_models_figures() -> None:
    found = figures({"bf16": BASE, "broken": NOISE, "good": OTHER}, {}, Path("model"), Path("text"), 8)
    methods = found["methods"]
    assert math.isinf(methods["broken"]["word_perplexity"]) and math.isinf(methods["broken"]["loss_percent"])
    assert methods["good"]["loss_percent"] == pytest.approx(100 * math.expm1(0.01))
    assert _evaluate.table("title", {"bf16": BASE, "broken": NOISE}, "bf16").row_count == 2


@pytest.mark.parametrize(("loss", "shown"), [(math.inf, "inf"), (math.nan, "nan")])
def test_a_loss_that_is_no_number_is_null_for_programs(
    loss: float, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(module: str, job: dict[str, Any], *_: object) -> Any:
        if module.endswith("_tasks_worker"):
            return {"gsm8k": {"acc": 0.5, "acc_stderr": math.nan}}
        return {"loss": loss if job["quantization"] else 1.0, "words": 1, "greedy": [1], "kernels": []}

    pretend(run, tmp_path, monkeypatch)
    options = ["eval", str(tmp_path), "--quantization", f"{tmp_path}/,ptpc_fp8", "--tasks", "gsm8k"]
    methods = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout, parse_constant=pytest.fail)["methods"]
    assert methods["ptpc_fp8"]["word_perplexity"] is methods["ptpc_fp8"]["loss_percent"] is None
    assert methods[f"{tmp_path}/"]["tasks"] == {"gsm8k": {"acc": 0.5, "acc_stderr": None}}
    assert f" {shown} " in CliRunner().invoke(app, options, env={"COLUMNS": "200"}).stdout
