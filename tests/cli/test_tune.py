# SPDX-License-Identifier: Apache-2.0
"""The command `tune` around a made-up operator: what it asks for, keeps, goes on with, and says."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from llm_quant_rocm import hardware, provenance, tuning
from llm_quant_rocm import tune as tuners
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.tune import search
from llm_quant_rocm.tune.workload import Tuner

# The package has a function of the same name.
command = import_module("llm_quant_rocm.cli.tune")

MEASURED_ON = {
    "device": "a GPU",
    "torch": "1",
    "triton": "3",
    "llm-quant-rocm": provenance.__version__,
    "date": "today",
}


@dataclass(frozen=True)
class Config:
    tile: int


class Workload:
    def __init__(self, weights: Any, m: int) -> None:
        self.m = m

    def ours(self, config: Config) -> Any:
        return (config, self.m)

    def peers(self) -> dict[str, Any]:
        return {}


def compile_two_and_three(self: search.Compiler, configs: list[Config]) -> list[Config]:
    self.reasons.update({config: "no" if config.tile == 1 else None for config in configs})
    return []


def made_up_tuner() -> Tuner:
    return Tuner(
        "ptpc_gemm", (1, 16), lambda device, m, *shape: [Config(1), Config(2), Config(3)], print,
        lambda *shape: None, Workload, lambda m, us: "triton",
    )  # fmt: skip


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows that were timed. The GPU, Triton and the times are made up; tile 1 does not compile."""
    rows: list[int] = []

    def fastest(candidates: dict[Config, Any], peers: Any) -> tuple[Config, dict[str, float]]:
        rows.append(next(iter(candidates.values()))[1])
        assert Config(1) not in candidates
        return min(candidates, key=lambda config: config.tile), {"ours": 1.0}

    monkeypatch.setattr(tuners, "tuner", lambda name: made_up_tuner())
    monkeypatch.setattr(search, "fastest", fastest)
    monkeypatch.setattr(search.Compiler, "_try", compile_two_and_three)
    monkeypatch.setattr(command, "require_gpu", lambda count=1: None)
    monkeypatch.setattr(hardware, "detect", lambda device: hardware.nvidia(9, 0))
    monkeypatch.setattr(
        provenance, "environment", lambda gpus=None: MEASURED_ON | ({"device": f"{gpus} GPUs"} if gpus else {})
    )
    monkeypatch.setattr(provenance, "triton_version", lambda: "3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.shapes.cache_clear()
    yield rows
    tuning.shapes.cache_clear()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tune", "ptpc_gemm", *map(str, arguments)])


def test_what_it_measures_is_what_the_library_then_uses(timed: list[int]) -> None:
    result = run("--layers", "llama-o", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ptpc_gemm"]["measured_on"] == MEASURED_ON
    assert timed == [1, 16]
    found = [shape for shape in tuning.shapes("ptpc_gemm", "sm_90") if (shape.n, shape.k) == (8192, 8192)]
    assert {shape.m: shape.config for shape in found if shape.m in (1, 16)} == {1: {"tile": 2}, 16: {"tile": 2}}
    assert {shape.m for shape in found} > {1, 16}, "the shipped ones are still there"


def test_it_goes_on_where_it_stopped(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(command.time, "monotonic", lambda: float(next(now)))
    layers = ("--layers", "llama-o", "--layers", "llama-qkv")
    result = run(*layers, "--budget", 2)
    assert result.exit_code == 0, result.output
    assert timed == [1, 16]
    assert "2 of 4 shapes are left: the same command goes on" in result.stderr
    assert "ptpc_gemm: all shapes" in run(*layers).stderr
    assert timed == [1, 16, 1, 16]


def test_ctrl_c_is_one_line(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "fastest", stopped)
    result = run("--layers", "llama-o")
    assert result.exit_code == 130 and result.stderr.splitlines()[-1] == "tune: stopped; the same command goes on."


def test_no_time_is_not_all_time(timed: list[int]) -> None:
    result = run("--layers", "llama-o", "--budget", 0)
    assert result.exit_code == 0 and timed == []
    assert (
        "ptpc_gemm: 2 of 2 shapes are left, and the budget of 0 s ended before anything was measured: "
        "name a larger one by --budget, or none; "
    ) in result.stderr


def test_a_shape_that_nothing_fits_is_not_left(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command would not come further with it."""
    monkeypatch.setattr(
        search.Compiler, "_try", lambda self, configs: self.reasons.update(dict.fromkeys(configs, "no")) or []
    )
    result = run("--layers", "llama-o", "--budget", 1000)
    assert result.exit_code == 0 and timed == []
    assert result.stderr.count("no configuration fits (no)") == 2
    assert "ptpc_gemm: all shapes; " in result.stderr


def test_shapes_that_are_there_are_not_measured_again(timed: list[int]) -> None:
    assert run("--layers", "llama-o", "--ms", "16").exit_code == 0
    assert run("--layers", "llama-o").exit_code == 0
    assert timed == [16, 1]
    result = run("--layers", "llama-o")
    assert timed == [16, 1] and "ptpc_gemm: all shapes" in result.stderr


def test_other_versions_are_measured_anew(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    run("--layers", "llama-o", "--ms", "16")
    monkeypatch.setitem(MEASURED_ON, "triton", "4")
    result = run("--layers", "llama-o", "--ms", "16")
    assert timed == [16, 16]
    file = tuning.cache_file("ptpc_gemm", "sm_90")
    assert f"{file} was measured with triton 3: it is measured anew" in result.stderr


@pytest.mark.parametrize(("name", "value"), [("torch", "2"), ("commit", "abc-dirty"), ("device", "8 x a GPU")])
def test_what_the_library_still_serves_is_not_measured_again(
    timed: list[int], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    run("--layers", "llama-o", "--ms", "16")
    monkeypatch.setitem(MEASURED_ON, name, value)
    found = json.loads(run("--layers", "llama-o", "--json").stdout)["ptpc_gemm"]
    assert timed == [16, 1] and found["measured_on"][name].endswith(f"; {value}")
    assert {shape.m for shape in tuning.shapes("ptpc_gemm", "sm_90") if shape.config == {"tile": 2}} == {1, 16}


def test_out_takes_the_place_of_the_cache(timed: list[int], tmp_path: Path) -> None:
    run("--layers", "llama-o", "--ms", "16", "--out", tmp_path / "configs")
    assert (tmp_path / "configs" / "ptpc_gemm" / "sm_90.json").is_file()
    assert not tuning.cache_file("ptpc_gemm", "sm_90").exists()


def test_the_layers_of_a_model(timed: list[int], tmp_path: Path) -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("--model", tmp_path, "--tp", 2, "--ms", 1, "--json")
    shapes = json.loads(result.stdout)["ptpc_gemm"]["shapes"]
    # qkv, o, gate_up, down
    assert [(shape["n"], shape["k"]) for shape in shapes] == [(64, 64), (64, 32), (128, 64), (64, 64)][:3]


def test_a_folder_that_cannot_be_written(timed: list[int], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("--layers", "llama-o", "--ms", "16", "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert "what was measured cannot be kept (" in result.stderr and "name another folder by --out" in result.stderr


def test_experts_are_kept_by_their_slots(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuners, "tuner", lambda name: replace(made_up_tuner(), operator=name, experts=True))
    result = CliRunner().invoke(app, ["tune", "nvfp4_moe", "--layers", "qwen3-*", "--ms", "4", "--json"])
    assert result.exit_code == 0, result.output
    (shape,) = json.loads(result.stdout)["nvfp4_moe"]["shapes"]
    assert {name: shape[name] for name in ("experts", "hidden", "inner", "slots")} == {
        "experts": 128, "hidden": 2048, "inner": 768, "slots": 32,
    }  # fmt: skip
    assert tuning.lookup("nvfp4_moe", "sm_90", 32 / 128, 128, 2048, 768).config == {"tile": 2}


def test_a_dense_model_has_no_experts_to_tune(
    timed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tuners, "tuner", lambda name: replace(made_up_tuner(), operator=name, experts=name.endswith("moe"))
    )
    config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["tune", "nvfp4_moe", "--model", str(tmp_path)])
    assert result.exit_code == 1 and f"{tmp_path} has no routed experts" in result.stderr.replace("\n", "")
    result = CliRunner().invoke(app, ["tune", "--model", str(tmp_path), "--ms", "1"])
    assert result.exit_code == 0, result.output
    for name in ("ptpc_moe", "nvfp4_moe", "quick_reduce"):
        assert f"{name} is left out: " in result.stderr
    assert "nvfp4_gemm_fp8: all shapes" in result.stderr


def test_the_all_reduce_is_measured_between_as_many_gpus(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from llm_quant_rocm.measure import all_reduce

    def measure(world: int, heard: Any, sizes: tuple[int, ...], seconds: float) -> None:
        assert world == 2
        for size in sizes:
            heard("row", {"bytes": size, "us": {"NCCL": 10.0, "INT4": 5.0}})

    monkeypatch.setattr(all_reduce, "measure", measure)
    result = CliRunner().invoke(app, ["tune", "quick_reduce", "--tp", "2", "--json"])
    assert result.exit_code == 0, result.output
    assert (
        "quick_reduce: all sizes" in result.stderr and "4096 bytes, microseconds: NCCL 10.0, INT4 5.0" in result.stderr
    )
    (entry,) = json.loads(result.stdout)["quick_reduce"]["crossovers"]
    assert (entry["world_size"], entry["codec"], len(entry["steps"])) == (2, "INT4", 1)
    assert entry["measured_on"]["device"] == "2 GPUs"
    assert tuning.cache_file("quick_reduce", "sm_90").is_file()


@pytest.mark.parametrize(
    ("operators", "rows", "ending"),
    [
        (
            ["quick_reduce"],
            0,
            "19 of 19 sizes are left, and the budget of 1000 s ended before anything was measured: name a larger one",
        ),
        (["quick_reduce"], 1, "18 of 19 sizes are left: the same command goes on"),
        # What came before will be there the next time, and leave the budget to the all-reduce.
        (["ptpc_gemm", "quick_reduce"], 0, "19 of 19 sizes are left: the same command goes on"),
    ],
    ids=["none", "one", "behind-another"],
)
def test_a_budget_that_ends_before_anything_is_measured(
    timed: list[int], monkeypatch: pytest.MonkeyPatch, operators: list[str], rows: int, ending: str
) -> None:
    pytest.importorskip("triton")
    from llm_quant_rocm.measure import all_reduce

    def measure(world: int, heard: Any, sizes: tuple[int, ...], seconds: float) -> None:
        assert seconds <= 1000
        heard("compiled", 10)
        for size in sizes[:rows]:
            heard("row", {"bytes": size, "us": {"NCCL": 10.0, "INT4": 5.0}})

    monkeypatch.setattr(all_reduce, "measure", measure)
    file = tuning.cache_file("quick_reduce", "sm_90")
    file.parent.mkdir(parents=True)
    file.write_text("cut off")  # and written anew when all is measured
    result = CliRunner().invoke(
        app, ["tune", *operators, "--tp", "2", "--ms", "1", "--layers", "llama-o", "--budget", "1000"]
    )
    assert result.exit_code == 0, result.output
    assert f"quick_reduce: {ending}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ms", "1,x"], "--ms 1,x: it must be positive whole numbers with commas"),
        (["--ms", "0"], "--ms 0: it must be positive whole numbers with commas"),
        (["--layers", "nothing"], "--layers matches none of llama-qkv, "),
        (["--model", "/nowhere"], "/nowhere has no config.json: name a checkpoint's folder."),
        (["--tp", "2"], "--tp cuts a model's layers: name the model by --model."),
        (["gemm"], "gemm is not one of ptpc_gemm, nvfp4_gemm, nvfp4_gemm_fp8, ptpc_moe, nvfp4_moe, quick_reduce."),
        (["quick_reduce"], "quick_reduce is between 2 and 8 GPUs, not 1: say how many by --tp."),
    ],
    ids=["ms", "zero", "layers", "model", "tp", "operator", "ranks"],
)
def test_one_sentence_for_what_is_wrong(timed: list[int], arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("tune: FAILED. ") and message in result.stderr and result.stderr.count("\n") == 1
    assert not timed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ptpc_gem"], "ptpc_gem is not one of ptpc_gemm, "),
        (["--ms", "1,x"], "--ms 1,x: it must be positive whole numbers"),
        (["--model", "/nowhere"], "/nowhere has no config.json"),
    ],
    ids=["operator", "ms", "model"],
)
def test_arguments_are_read_before_a_gpu_is_asked_for(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "require_gpu", lambda *_: pytest.fail("a GPU is asked for"))
    assert message in CliRunner().invoke(app, ["tune", *arguments]).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu() -> None:
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 1
    assert result.stderr == (
        "tune: FAILED. no GPU is here, or torch cannot use it: measure on the machine that will serve the model.\n"
    )
