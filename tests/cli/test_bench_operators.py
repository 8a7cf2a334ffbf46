# SPDX-License-Identifier: Apache-2.0
"""`bench moe`, `rows`, `all_reduce` and `reduce_norm_quant` with a made-up clock: results, tables, plots, errors."""

import json
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

pytest.importorskip("triton")

from llm_quant_rocm import provenance, timing
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli.bench._output import head
from llm_quant_rocm.measure import all_reduce, experts, reduce_norm_quant, rows

ENVIRONMENT = {"device": "a GPU", "torch": "1", "triton": "3", "commit": "abc", "date": "today"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, where bf16 takes 10 us and everything else 5."""
    for name in ("collectives", "moe", "rows"):
        monkeypatch.setattr(import_module(f"llm_quant_rocm.cli.bench.{name}"), "require_gpu", lambda count=1: None)
    clock = lambda graphs, *rest, **more: {name: 10.0 if "bf16" in name else 5.0 for name in graphs}  # noqa: E731
    monkeypatch.setattr(timing, "time_graphs", clock)
    monkeypatch.setattr(timing, "time_variants", clock)
    monkeypatch.setattr(timing, "capture", lambda calls: [call() for call in calls])
    monkeypatch.setattr(timing, "copies", lambda nbytes: 2)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(
        provenance, "environment", lambda gpus=None: ENVIRONMENT | ({"device": f"{gpus} GPUs"} if gpus else {})
    )


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_experts_are_right_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts.Layer(4, 2, 64, 48, device="cpu")
    row = layer.measure(7)
    assert row["us"] == {"bf16_grouped": 10.0, "ptpc_moe": 5.0, "nvfp4_moe": 5.0} and not layer.absent
    assert 0 < row["error"]["bf16_grouped"] < row["error"]["ptpc_moe"] < row["error"]["nvfp4_moe"] < 0.25
    wrong = lambda w13, w2: lambda x, *routing: lambda: torch.zeros_like(x)  # noqa: E731
    row = experts.Layer(4, 2, 64, 48, packed={"nvfp4_moe": wrong}, device="cpu").measure(3, "skewed")
    assert "nvfp4_moe" not in row["us"] and "relative error 1.0 exceeds 0.25" in row["failed"]["nvfp4_moe"]


def test_a_peer_that_cannot_is_absent_with_its_reason() -> None:
    def refuse(w13: Any, w2: Any) -> Any:
        raise RuntimeError("no kernel\nfor this")

    layer = experts.Layer(2, 1, 32, 16, dense={**experts.DENSE, "peer": refuse}, device="cpu")
    assert layer.absent == {"peer": "RuntimeError: no kernel"} and "peer" not in layer.measure(2)["us"]


@pytest.mark.parametrize("name", ["nowhere/plot.png", "plot", "plot.jpeg"])
@pytest.mark.parametrize("command", ["gemm", "moe", "rows", "all_reduce"])
def test_a_plot_that_cannot_be_drawn_is_said_first(tmp_path: Path, command: str, name: str) -> None:
    result = run(command, "--plot", tmp_path / name)
    assert result.exit_code == 1
    assert f"--plot {tmp_path / name}: it must be a file's name that ends in .png" in result.stderr


@pytest.mark.parametrize("module", ["rows", "gemm"])
def test_a_vllm_that_does_not_load_is_absent(module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AttributeError('this torch has no such operator')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    absent: dict[str, str] = {}
    command = import_module(f"llm_quant_rocm.cli.bench.{module}")
    if module == "rows":
        assert not command._vllm_is_there(absent)
    else:
        assert "vllm_fp8" not in command.products([torch.randn(8, 32, dtype=torch.bfloat16)], absent)
    assert "AttributeError: this torch has no such operator" in absent.values()


@pytest.mark.parametrize("inches", [6, 11, 26])
def test_a_plot_shows_all_of_where_it_was_measured(inches: int) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(inches, 4.6), layout="constrained")
    figure.subplots()
    line = "2 x AMD Instinct MI300X VF, torch 2.13.0+rocm7.2, triton 3.9.0, vllm 0.33.0+rocm723, python 3.13.11, " * 2
    head(figure, f"routed experts\n{line}")
    figure.draw_without_rendering()
    assert figure.get_suptitle().replace("\n", " ") == f"routed experts {line.strip()}"
    extent = figure._suptitle.get_window_extent()
    assert extent.x0 >= 0 and extent.x1 <= figure.bbox.x1


def test_a_vllm_whose_kernels_refuse_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("expected at most 0 arguments\nbut received 4")

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(_custom_ops=None))
    found = {"quant": [pytest.fail], "vllm_quant": [refuse]}
    monkeypatch.setattr(rows, "variants", lambda m, k, with_vllm: found)
    absent: dict[str, str] = {}
    command = import_module("llm_quant_rocm.cli.bench.rows")
    assert not command._vllm_is_there(absent)
    assert absent == {"vLLM": "RuntimeError: expected at most 0 arguments"}
    found["vllm_quant"] = [lambda: None]
    assert command._vllm_is_there({})


def test_bench_moe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(experts, "Layer", partial(experts.Layer, device="cpu"))
    config = {
        "hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("moe", "--model", tmp_path, "--tp", 2, "--ms", "1,5", "--plot", tmp_path / "moe.png", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["environment"] == ENVIRONMENT
    assert [(row["model"], row["tokens"]) for row in found["rows"]] == [("experts", 1), ("experts", 5)]
    assert found["rows"][0]["us"]["ptpc_moe"] == 5.0
    assert (tmp_path / "moe.png").stat().st_size > 5000
    text = run("moe", "--model", tmp_path, "--ms", "1").stdout
    assert "5.0 (2.00)" in text and "a GPU" in text and "abc" in text


def test_bench_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rows, "measure", partial(rows.measure, device="cpu"))
    module = import_module("llm_quant_rocm.cli.bench.rows")
    monkeypatch.setattr(module, "_vllm_is_there", lambda absent: bool(absent.update(vLLM="it is not installed")))
    result = run("rows", "--columns", "64,128", "--ms", "1,4", "--plot", tmp_path / "rows.png", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(row["k"], row["m"]) for row in found["rows"]] == [(64, 1), (64, 4), (128, 1), (128, 4)]
    assert found["rows"][0]["us"].keys() == {"quant", "norm_quant", "add_norm_quant", "act_quant", "copy"}
    assert "vLLM" in found["absent"]
    assert (tmp_path / "rows.png").stat().st_size > 5000
    assert "vLLM is left out: " in run("rows", "--columns", "64", "--ms", "1").stdout


Heard = Callable[[str, Any], None]


def test_bench_all_reduce(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(world: int, heard: Heard, sizes: Any, codecs: Any, seconds: float) -> dict[str, Any]:
        assert (world, codecs) == (2, ("FP4", "FP"))
        found = [{"bytes": size, "us": {"NCCL": 9.0, "FP4": 3.0, "FP": 6.0}} for size in sizes]
        for row in found:
            heard("row", row)
        return {"unit": "microseconds a call", "world": world, "errors": {}, "rows": found}

    monkeypatch.setattr(all_reduce, "measure", measure)
    arguments = ("all_reduce", "--tp", 2, "--codecs", "FP4,FP", "--kib", "64,4")
    result = run(*arguments, "--plot", tmp_path / "all.png", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["bytes"] for row in found["rows"]] == [4096, 65536]
    assert found["environment"]["device"] == "2 GPUs"
    assert (tmp_path / "all.png").stat().st_size > 5000
    assert "3.0 (3.00)" in run(*arguments).stdout


def test_bench_reduce_norm_quant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(world: int, heard: Heard, columns: Any, tokens: Any, codec: Any, seconds: float) -> dict[str, Any]:
        us = {"nccl": 9.0, "separate": 12.0, "two_kernels": 8.0, "fused": 4.0, "speed_up": 3.0}
        found = [{"rows": count, "columns": width, "us": dict(us)} for width in columns for count in tokens]
        return {"world": world, "norm_and_quant": "ours", "rows": found}

    monkeypatch.setattr(reduce_norm_quant, "measure", measure)
    arguments = ("reduce_norm_quant", "--columns", "4096", "--ms", "1,16")
    result = run(*arguments, "--plot", tmp_path / "fused.png", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["rows"]) == 2 and (tmp_path / "fused.png").stat().st_size > 5000
    assert found["environment"]["device"] == "2 GPUs"
    assert "4.0 (3.00)" in run(*arguments).stdout


def a_rank_fails(*arguments: Any, **more: Any) -> Any:
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback\nRuntimeError: no peer access\n"
    raise torch.multiprocessing.ProcessRaisedException(text, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_reduce", "--tp", "9"], "--tp 9: it is between 2 and 8 GPUs."),
        (["all_reduce", "--codecs", "FP5"], "--codecs FP5: it must be some of FP4,INT4,INT8,FP8,FP."),
        (["all_reduce", "--kib", "2097152"], "--kib 2097152: messages have up to 1048576 KiB."),
        (
            ["all_reduce"],
            "a rank failed: RuntimeError: no peer access; see that the GPUs are free and reach",
        ),
        (["reduce_norm_quant", "--codec", "FP"], "--codec FP: it must be one of INT8, "),
        (["reduce_norm_quant"], "nothing was measured in that time: raise --seconds."),
        (["moe", "--layers", "nothing"], "--layers matches none of qwen3-30b-a3b, "),
    ],
    ids=["ranks", "codecs", "size", "rank", "codec", "nothing", "layers"],
)
def test_one_sentence_for_what_is_wrong(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "measure", a_rank_fails)
    monkeypatch.setattr(reduce_norm_quant, "measure", lambda *given, **more: {"rows": []})
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"bench {arguments[0]}: FAILED. ") and message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemm", "--layers", "nothing"], "--layers matches none of "),
        (["gemm", "--model", "/nowhere"], "/nowhere has no config.json"),
        (["moe", "--ms", "1,x"], "--ms 1,x: it must be positive"),
        (["rows", "--columns", "wide"], "--columns wide: it must be positive"),
        (["all_reduce", "--codecs", "FP5"], "--codecs FP5: it must be some of"),
        (["all_reduce", "--kib", "0"], "--kib 0: it must be positive"),
        (["reduce_norm_quant", "--codec", "FP"], "--codec FP: it must be one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_are_read_before_a_gpu_is_asked_for(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("collectives", "gemm", "moe", "rows"):
        module = import_module(f"llm_quant_rocm.cli.bench.{name}")
        monkeypatch.setattr(module, "require_gpu", lambda *_: pytest.fail("a GPU is asked for"))
    assert message in run(*arguments).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("command", ["moe", "rows", "all_reduce", "reduce_norm_quant"])
def test_without_a_gpu(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    result = run(command)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"bench {command}: FAILED. no GPU is here") and result.stderr.count("\n") == 1
