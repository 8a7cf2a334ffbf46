# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm doctor`: what it says of this machine, and of machines with faults planted into them."""

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from llm_quant_rocm import backends, hardware, timing
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli.doctor import engines, environment, machine, operators, packages, render
from llm_quant_rocm.cli.doctor.table import Part, Problem, heading
from llm_quant_rocm.comm import policy
from llm_quant_rocm.environment import VARIABLES

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")


def whats(part: Part) -> list[str]:
    return [problem.what for problem in part.problems]


# --- the command


@on_cpu
def test_this_machine(tmp_path: Path) -> None:
    # A variable with a long value leaves less room for the names of all.
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "80", "XDG_CACHE_HOME": None})
    assert "no GPU: operators run by their torch reference, exact and slow" in result.output
    for word in ("torch", "reference", "nvfp4_moe", "LLM_QUANT_ROCM_NVFP4", "quantized all-reduce: off"):
        assert word in result.output, word
    assert max(map(len, result.output.splitlines())) <= 80


@on_cpu
def test_json_is_one_object_with_every_part() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.output)
    assert list(report) == ["machine", "packages", "operators", "engines", "environment", "passed"]
    assert (result.exit_code == 0) == report["passed"]
    assert report["machine"]["rows"][0]["architecture"] == "cpu"
    assert {row["runs_on"] for row in report["operators"]["rows"]} == {"reference"}


def test_a_fault_makes_exit_status_1_and_names_the_cure() -> None:
    variables = {"LLM_QUANT_ROCM_NVFP4_PREFILL": "fp4"}
    result = CliRunner().invoke(app, ["doctor"], env=variables | {"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "LLM_QUANT_ROCM_NVFP4_PREFILL=fp4: it must be exact or fp8" in result.output
    assert "cure: set it to one of them, or unset it" in result.output


@pytest.mark.parametrize(
    "name", ["LLM_QUANT_ROCM_PTPC_GEMM", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "LLM_QUANT_ROCM_NVFP4"]
)
@pytest.mark.usefixtures("fresh_choices")
def test_a_value_that_is_none_is_one_problem(name: str) -> None:
    """Whether the part that reads it finds it, or the list of variables."""
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"], env={name: "no"}).stdout)
    assert report.pop("passed") is False
    found = [problem["what"] for part in report.values() for problem in part["problems"]]
    assert [what.partition(":")[0] for what in found if name in what] == [f"{name}=no"]


def test_it_imports_no_engine() -> None:
    program = """
import sys
sys.modules["vllm"] = sys.modules["sglang"] = None  # importing them fails
from typer.testing import CliRunner
from llm_quant_rocm.cli._app import app
result = CliRunner().invoke(app, ["doctor", "--json"])
assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


# --- machine


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_gpu_that_torch_was_not_built_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "kfd"
    driver.touch()
    with_gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "hip", None)
    part = machine.examine({driver: ("an AMD GPU", "ROCm")})
    assert len(part.problems) == 1
    assert f"this machine has an AMD GPU ({driver}), and torch" in part.problems[0].what
    assert part.problems[0].cure == "install torch's build for ROCm"


def test_a_gpu_that_is_hidden_or_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "kfd"
    driver.touch()
    with_gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    drivers = {driver: ("an AMD GPU", "ROCm")}
    assert "HIP_VISIBLE_DEVICES" in machine.examine(drivers).problems[0].cure
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "`render`" in machine.examine(drivers).problems[0].cure
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (problem,) = machine.examine({driver: ("an NVIDIA GPU", "CUDA")}).problems
    assert problem.cure == "join the group that owns it, or in a container pass --gpus all"


def test_no_driver_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    assert machine.examine({tmp_path / "kfd": ("an AMD GPU", "ROCm")}).problems == []


def test_an_unknown_amd_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(device: torch.device) -> None:
        raise ValueError("gfx1100 is not supported: llm-quant-rocm knows gfx90a, gfx942, gfx950")

    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(machine.hardware, "detect", unknown)
    part = machine.examine({})
    assert whats(part) == ["cuda:0: gfx1100 is not supported: llm-quant-rocm knows gfx90a, gfx942, gfx950"]
    assert part.rows == []


def test_a_gpu_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(machine.hardware, "detect", lambda device: hardware.nvidia(9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    part = machine.examine({})
    assert whats(part) == ["cuda:0 does not answer: CUDA error: out of memory"]
    assert "another program fills its memory" in part.problems[0].cure


def test_gpus_and_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 3)
    monkeypatch.setattr(machine.hardware, "detect", lambda device: hardware.amd("gfx942"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 192 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {0, 2})
    monkeypatch.setattr(machine, "_copy_bandwidth", lambda device, size: float(size // 2**20))
    part = machine.examine({})
    assert part.problems == []
    assert [(row.device, row.reaches) for row in part.rows] == [("cuda:0", [1]), ("cuda:1", [0, 2]), ("cuda:2", [1])]
    assert {(row.fp8, row.nvfp4_units, row.memory, row.free) for row in part.rows} == {("FNUZ", False, 192.0, 1.0)}
    assert part.rows[0].copy == 256.0  # a quarter of what is free


def test_a_copy_without_room_is_not_measured() -> None:
    assert machine._copy_bandwidth(torch.device("cuda"), 2**20) is None


def test_a_copy_is_in_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device, nbytes: nbytes * 1e4)
    assert machine._copy_bandwidth(torch.device("cuda"), 2**30) == pytest.approx(2**30 / 1e5)


# --- packages


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretends that exactly these packages are installed."""
    monkeypatch.setattr(packages, "installed", lambda package: versions.get(package))


def test_an_unsupported_vllm_is_a_problem_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, torch="2.13.0", vllm="0.25.1")
    part = packages.examine(gpu=False)
    assert len(part.problems) == 1
    assert "vllm 0.25.1 is not supported" in part.problems[0].what
    assert part.problems[0].cure == "pip install 'vllm>=0.26,<0.34'"


def test_an_old_torch_is_not_replaced_by_any_build(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, torch="2.9.1+rocm6.4")
    part = packages.examine(gpu=False)
    assert [problem.cure for problem in part.problems] == [
        "install torch's build for this machine with torch 2.11 and newer"
    ]


def test_versions_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, torch="2.13.0+cpu", vllm="0.33.0", safetensors="9.9")
    verdicts = {row.package: row.verdict for row in packages.examine(gpu=False).rows}
    assert verdicts["torch"] == "tested"
    assert verdicts["vllm"] == "supported, not tested"
    assert verdicts["safetensors"] == "any version"
    assert verdicts["aiter"] == "not installed"


def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, torch="2.13.0", vllm="0.32.0")
    assert packages.examine(gpu=False).problems == []
    assert whats(packages.examine(gpu=True)) == ["triton is not installed, and the kernels for this GPU need it"]


def test_no_engine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, torch="2.13.0")
    assert any("no engine is installed" in note for note in packages.examine(gpu=False).notes)


# --- operators


@pytest.fixture
def fresh_choices() -> None:
    """Operators remember their choices, and these tests change what they depend on."""
    import_module("llm_quant_rocm.ops.ptpc_gemm")._choose.cache_clear()


def test_every_operator_with_a_choice_is_listed() -> None:
    forced = {name for name, variable in VARIABLES.items() if "reference" in variable.values}
    rows = operators.examine(torch.device("cpu")).rows
    assert {backends.environment.backend_of(row.operator) for row in rows} == forced


@pytest.mark.parametrize(("value", "what"), [("aiter", "cannot serve this call"), ("cutlass", "has the backends")])
@pytest.mark.usefixtures("fresh_choices")
def test_a_forced_backend_that_cannot_serve(monkeypatch: pytest.MonkeyPatch, value: str, what: str) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_PTPC_GEMM", value)
    part = operators.examine(torch.device("cpu"))
    assert len(part.problems) == 1
    assert part.problems[0].what.startswith(f"LLM_QUANT_ROCM_PTPC_GEMM={value}")
    assert what in part.problems[0].what
    assert "ptpc_gemm" not in {row.operator for row in part.rows}
    assert part.problems[0].cure == "unset LLM_QUANT_ROCM_PTPC_GEMM"


def test_what_was_measured_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator's shipped file, and the user's own, of the fused all-reduce crossovers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counted = {row.operator: operators._measured(row.operator, "sm_90") for row in operators.examine(CPU).rows}
    shipped = {folder.name for folder in (Path(operators.tuning.__file__).parent / "configs").iterdir()}
    assert {name for name, count in counted.items() if count} == shipped & counted.keys()
    assert operators._measured("reduce_norm_quant", "gfx942") == 0
    entry = {"dtype": "bfloat16", "steps": [{"from_bytes": 0, "algorithm": "one_shot", "codec": "FP"}]}
    mine = [{"world_size": ranks, "codec": codec, **entry} for ranks in (2, 8) for codec in ("FP", "FP4")]
    file = operators.tuning.cache_file("reduce_norm_quant", "gfx942")
    file.parent.mkdir(parents=True)
    others = [{**mine[0], "world_size": 9}, {**mine[0], "codec": "INT5"}, {**mine[0], "dtype": "float16"}]
    file.write_text(json.dumps({"crossovers": mine + others}))
    parsed: list[str] = []
    monkeypatch.setattr(policy, "json", SimpleNamespace(loads=lambda text: parsed.append(text) or json.loads(text)))
    assert operators._measured("reduce_norm_quant", "gfx942") == 4
    assert len(parsed) == 1, "each file is read once"


@pytest.mark.parametrize("operator", ["reduce_norm_quant", "quick_reduce"])
@pytest.mark.parametrize("content", [b"{}", b"\xff"], ids=["empty", "no-text"])
def test_a_broken_file_of_measurements_names_its_cure(
    operator: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "FP4")
    monkeypatch.setattr(operators, "_ranks", lambda: (2, True))
    broken = operators.tuning.cache_file(operator, hardware.detect(CPU).arch)
    broken.parent.mkdir(parents=True)
    broken.write_bytes(content)
    part = operators.examine(CPU)
    assert [problem.what.split(" is no file")[0] for problem in part.problems] == [str(broken)]
    assert part.problems[0].cure == "measure them again, or delete it"


def test_the_policy_of_the_all_reduce_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "FP4")
    assert any("process_group FP4 from" in note for note in operators.examine(torch.device("cpu")).notes)
    monkeypatch.setenv("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "FP5")
    assert any("QUANTIZATION=FP5" in what for what in whats(operators.examine(torch.device("cpu"))))


def test_the_all_reduce_is_judged_by_both_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (note,) = (note for note in operators.examine(CPU).notes if "all-reduce" in note)
    assert note.startswith("vLLM and SGLang, with 2 ranks: quantized all-reduce: off")
    monkeypatch.setenv("ROCM_QUICK_REDUCE_QUANTIZATION", "FP4")
    vllm, sglang = (note for note in operators.examine(CPU).notes if "all-reduce" in note)
    assert vllm.startswith("vLLM, with 2 ranks: quantized all-reduce: off")
    assert sglang.startswith("SGLang, with 2 ranks: quantized all-reduce: engine from 0 bytes, process_group FP4 from")
    monkeypatch.setenv("ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB", "abc")
    part = operators.examine(CPU)
    assert whats(part) == ["ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB=abc"]
    assert part.problems[0].cure == "it must be a whole number, 0 or more"
    monkeypatch.setenv("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "FP4")
    assert whats(operators.examine(CPU)) == whats(part)


def test_each_wrong_variable_of_the_all_reduce_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once, though both engines read it, and the list of variables knows its values."""
    wrong = {"QUANTIZATION": "FP5", "MIN_SIZE_BYTES_MB": "abc", "QUANTIZATION_MIN_SIZE_KB": "-1"}
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in wrong.items():
        monkeypatch.setenv(f"VLLM_ROCM_QUICK_REDUCE_{name}", value)
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    problems = [problem for part in ("operators", "environment") for problem in report[part]["problems"]]
    assert [problem["what"] for problem in problems] == [
        f"VLLM_ROCM_QUICK_REDUCE_{name}={value}" for name, value in wrong.items()
    ]
    assert [problem["cure"].partition(" ")[0] for problem in problems] == ["it"] * 3


# --- engines


def with_entry_points(monkeypatch: pytest.MonkeyPatch, *found: EntryPoint) -> None:
    monkeypatch.setattr(engines, "installed", lambda engine: "0.32.0" if engine == "vllm" else None)
    monkeypatch.setattr(engines, "entry_points", lambda group, name: [p for p in found if p.group == group])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


REGISTERED = EntryPoint("llm_quant_rocm", "llm_quant_rocm_vllm:register", "vllm.general_plugins")


def test_a_registered_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_points(monkeypatch, REGISTERED)
    part = engines.examine(load=False)
    assert part.problems == []
    assert [(row.engine, row.plugin) for row in part.rows] == [("vllm", "llm_quant_rocm_vllm:register")]


def test_a_plugin_that_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_points(monkeypatch)
    part = engines.examine(load=True)
    assert "vllm cannot find the plugin" in part.problems[0].what
    assert part.problems[0].cure == "install llm-quant-rocm in the environment of vllm"
    assert part.rows[0].plugin is None


def test_a_plugin_whose_package_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_points(monkeypatch, EntryPoint("llm_quant_rocm", "gone_vllm:register", "vllm.general_plugins"))
    assert "vllm cannot import gone_vllm" in engines.examine(load=True).problems[0].what


@pytest.mark.parametrize(
    ("value", "passes"), [("llm_quant_rocm", True), ("a,llm_quant_rocm", True), ("a", False), ("", False)]
)
def test_a_plugin_that_is_left_out(monkeypatch: pytest.MonkeyPatch, value: str, passes: bool) -> None:
    with_entry_points(monkeypatch, REGISTERED)
    monkeypatch.setenv("VLLM_PLUGINS", value)
    assert (engines.examine(load=False).problems == []) == passes


def test_blanks_between_plugins_are_a_part_of_names_to_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for_sglang = EntryPoint("llm_quant_rocm", "llm_quant_rocm_sglang:register", "sglang.srt.plugins")
    with_entry_points(monkeypatch, REGISTERED, for_sglang)
    vllm, sglang = engines.HOSTS
    monkeypatch.setenv("VLLM_PLUGINS", "a, llm_quant_rocm")
    assert engines.refusal(vllm).cure == "unset VLLM_PLUGINS, or write a,llm_quant_rocm, without blanks"
    for value, passes in (("a, llm_quant_rocm", True), ("", True), ("a", False)):
        monkeypatch.setenv("SGLANG_PLUGINS", value)
        assert (engines.refusal(sglang) is None) == passes


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("raise ImportError('libamdhip64.so is gone')", "does not load into vllm: ImportError: libamdhip64.so is gone"),
        ("raise SystemExit(3)", "does not load into vllm: exit status 3"),
        ("logging.getLogger('llm_quant_rocm').error('a hook is gone: %s', 'update')", "a hook is gone"),
        ("logging.getLogger('llm_quant_rocm').info('all is well'); print('noise')", None),
    ],
    ids=["raises", "exits", "warns", "loads"],
)
def test_a_plugin_is_loaded_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, what: str) -> None:
    (tmp_path / "planted.py").write_text(f"import logging\n\n\ndef register():\n    {body}\n")
    (tmp_path / "planted-1.dist-info").mkdir()
    entry = "[planted.plugins]\nllm_quant_rocm = planted:register\n"
    (tmp_path / "planted-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "planted-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setattr(engines, "HOSTS", (engines.Host("vllm", "planted.plugins", "VLLM_PLUGINS", is_literal=True),))
    monkeypatch.setattr(engines, "installed", lambda engine: "0.32.0")
    part = engines.examine(load=True)
    assert part.rows[0].loads is (what is None)
    if what:
        assert len(part.problems) == 1
        assert what in part.problems[0].what
    assert engines.examine(load=False).rows[0].loads is None


def test_the_plugin_loads_into_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    with_entry_points(monkeypatch, REGISTERED)
    part = engines.examine(load=True)
    assert part.problems == []
    assert part.rows[0].loads is True


# --- environment


def test_every_variable_is_listed_with_what_it_is_set_to() -> None:
    part = environment.examine({"LLM_QUANT_ROCM_NVFP4": "0"})
    assert {row.variable for row in part.rows} == set(VARIABLES)
    assert {row.variable: row.value for row in part.rows if row.value} == {"LLM_QUANT_ROCM_NVFP4": "0"}
    assert part.problems == []


def test_a_misspelt_variable_is_a_problem() -> None:
    part = environment.examine({"LLM_QUANT_ROCM_NVFP4_PREFIL": "fp8"})
    assert part.problems == [
        Problem("LLM_QUANT_ROCM_NVFP4_PREFIL is set, and nothing reads it", "write LLM_QUANT_ROCM_NVFP4_PREFILL")
    ]


def test_a_misspelt_variable_of_the_all_reduce_is_a_problem() -> None:
    name = "VLLM_ROCM_QUICK_REDUCE_QUANTISATION"
    others = {"VLLM_ROCM_QUICK_REDUCE_OF_A_LATER_VLLM": "1", "VLLM_ROCM_USE_AITER": "1"}
    part = environment.examine({name: "FP4"} | others)
    cure = "write VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"
    assert part.problems == [Problem(f"{name} is set, and nothing reads it", cure)]


def test_ranks_are_those_of_a_model() -> None:
    result = CliRunner().invoke(app, ["doctor", "--tp", "4"])
    assert result.exit_code == 1
    assert result.stderr == "doctor: FAILED. --tp cuts a model's layers: name the model's folder.\n"


# --- rendering


@pytest.mark.parametrize(
    ("count", "line"), [(0, "no problem found"), (1, "1 problem found"), (2, "2 problems found")], ids=str
)
def test_the_last_line_counts(count: int, line: str) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    render.print_tables([Part("x", "X", problems=[Problem("it is wrong", "mend it")] * count)], console)
    assert console.export_text().splitlines()[-1] == f"doctor: {line}"


def test_tables_show_what_there_is_and_hide_empty_columns() -> None:
    @dataclass(frozen=True)
    class Row:
        name: str
        rate: float | None = field(metadata=heading("GB/s"))
        peers: list[int]
        why: dict[str, Any]

    console = Console(width=60, record=True, file=io.StringIO())
    part = Part("x", "A [title]", [Row("a[0]", 1234.56, [], {"b": "no"})], ["a note"], [Problem("it is [red]", "mend")])
    render.print_tables([part], console)
    text = console.export_text()
    for piece in ("a[0]", "GB/s", "1,234.6", "b: no", "a note", "1. it is [red]", "cure: mend", "1 problem found"):
        assert piece in text, text
    assert "peers" not in text
