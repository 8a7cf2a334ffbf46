# SPDX-License-Identifier: Apache-2.0
"""The command `quantize` as a user calls it."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from llm_quant_rocm.cli import _error_plot
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli._error_plot import series
from tests.checkpoint.test_quantize import DEMO_MODEL, read, tensors_of_a_model, write

WORST = "model.layers.1.mlp.up_proj"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("scheme", ["ptpc_fp8", "nvfp4"])
def test_it_writes_a_checkpoint(tmp_path: Path, scheme: str, format: str) -> None:
    result = run(DEMO_MODEL, tmp_path / "out", "--scheme", scheme, "--format", format)
    assert result.exit_code == 0, result.output
    description = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert description["quant_method"] == format
    assert "21 weights are quantized" in result.output and "the worst 10 of 21 weights" in result.output
    assert (tmp_path / "out" / "quantization_error.png").stat().st_size > 1000


def test_the_worst_layer_comes_first(tmp_path: Path) -> None:
    tensors = tensors_of_a_model()
    tensors[f"{WORST}.weight"][::2] = 1e-30  # too small for the other rows' global scale
    result = run(write(tmp_path / "source", tensors), tmp_path / "out", "--scheme", "nvfp4", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    errors = list(answer["errors"].values())
    assert errors == sorted(errors, reverse=True)
    assert (answer["quantized"], len(errors)) == (14, 14)
    assert 0 < answer["bytes_after"] < answer["bytes_before"]


def test_patterns_are_added_to_those_that_always_stay(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model())
    result = run(
        source, tmp_path / "out", "--scheme", "ptpc_fp8", "--json", "--ignore", "*.o_proj", "--ignore", "*.1.*"
    )
    assert result.exit_code == 0, result.output
    assert {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"} <= set(
        json.loads(result.stdout)["kept"]
    )


def test_the_search_is_the_default_and_can_be_left(tmp_path: Path) -> None:
    errors = {}
    for choice in ("search", "nearest"):
        result = run(DEMO_MODEL, tmp_path / choice, "--scheme", "nvfp4", "--json", "--block-scales", choice)
        errors[choice] = json.loads(result.stdout)["errors"]
    result = run(DEMO_MODEL, tmp_path / "default", "--scheme", "nvfp4", "--json")
    assert json.loads(result.stdout)["errors"] == errors["search"]
    assert all(errors["search"][module] < error for module, error in errors["nearest"].items())


def test_fused_layers_share_a_global_scale_unless_it_is_to_be_separate(tmp_path: Path) -> None:
    tensors = tensors_of_a_model()
    tensors[f"{WORST}.weight"] *= 8
    source = write(tmp_path / "source", tensors)
    for choice, count in (("shared", 1), ("separate", 2)):
        out = tmp_path / choice
        result = run(source, out, "--scheme", "nvfp4", "--format", "modelopt", "--global-scales", choice)
        assert result.exit_code == 0, result.output
        written = read(out)
        scales = {written[f"model.layers.1.mlp.{name}.weight_scale_2"].item() for name in ("gate_proj", "up_proj")}
        assert len(scales) == count, choice


def test_what_was_complete_already_is_said(tmp_path: Path) -> None:
    command = (DEMO_MODEL, tmp_path / "out", "--scheme", "ptpc_fp8")
    assert "complete already" not in run(*command).stdout
    assert f"in {tmp_path / 'out'}, which was complete already\n" in run(*command).stdout
    # A file that was lost since is made again.
    next((tmp_path / "out").glob("*.safetensors")).unlink()
    assert "complete already" not in run(*command).stdout


@pytest.mark.parametrize("option", [("--block-scales", "search"), ("--global-scales", "separate")], ids=" ".join)
def test_nvfp4s_options_are_not_ignored(tmp_path: Path, option: tuple[str, str]) -> None:
    """Nor are its defaults, which somebody has asked for."""
    result = run(DEMO_MODEL, tmp_path / "out", "--scheme", "ptpc_fp8", *option)
    assert result.exit_code == 1 and result.stderr == (
        "quantize: FAILED. --block-scales and --global-scales are for --scheme nvfp4, not ptpc_fp8: leave them out.\n"
    )
    assert not (tmp_path / "out").exists()


def nan(folder: Path) -> Path:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = tensors_of_a_model()
    tensors[name][3, 5] = float("nan")
    return write(folder / "nan", tensors, 3)


def odd(folder: Path) -> Path:
    tensors = tensors_of_a_model() | {"model.layers.1.mlp.down_proj.weight": torch.ones(64, 72)}
    folder.mkdir(exist_ok=True)
    return write(folder / "odd", tensors)


def without_a_shard(folder: Path) -> Path:
    source = write(folder / "missing", tensors_of_a_model(), 3)
    (source / "model-00002-of-00003.safetensors").unlink()
    return source


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "nvfp4"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", "nowhere is no folder: download the checkpoint"),
        (
            lambda folder: write(folder / "done", {}, quantization_config={"bits": 4}),
            "is quantized already: start from the",
        ),
        (without_a_shard, "model-00002-of-00003.safetensors is missing, but model.safetensors.index.json names it"),
        (nan, "model.layers.1.mlp.up_proj.weight holds NaN or infinity"),
    ],
    ids=["no-folder", "quantized", "shard", "nan"],
)
def test_one_sentence_for_what_is_wrong(tmp_path: Path, make, message: str, scheme: str) -> None:  # type: ignore[no-untyped-def]
    result = run(make(tmp_path), tmp_path / "out", "--scheme", scheme)
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.startswith("quantize: FAILED. ")
    assert result.stderr.count("\n") == 1 and not result.stdout
    assert not (tmp_path / "out" / "config.json").exists()


def test_an_empty_description_is_none(tmp_path: Path) -> None:
    """As vLLM has it, and doctor."""
    source = write(tmp_path / "source", tensors_of_a_model(), quantization_config={})
    assert run(source, tmp_path / "out", "--scheme", "ptpc_fp8").exit_code == 0


def test_columns_that_are_no_blocks(tmp_path: Path) -> None:
    result = run(odd(tmp_path), tmp_path / "out", "--scheme", "nvfp4")
    assert result.exit_code == 1
    assert "model.layers.1.mlp.down_proj.weight has 72 columns, no multiple of 16" in result.stderr
    assert not (tmp_path / "out").exists(), "found before anything was written"
    assert run(odd(tmp_path / "again"), tmp_path / "out", "--scheme", "ptpc_fp8").exit_code == 0


def test_folders_whose_names_look_like_markup(tmp_path: Path) -> None:
    """Of rich's, and of matplotlib's mathematics."""
    source = write(tmp_path / "m[b]$^$", tensors_of_a_model())
    result = run(source, tmp_path / "[b]out[/i]", "--scheme", "nvfp4")
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / '[b]out[/i]' / 'quantization_error.png'}" in result.output


def test_a_plot_without_room_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(_error_plot, "draw", full)
    result = run(DEMO_MODEL, tmp_path / "out", "--scheme", "ptpc_fp8")
    assert result.exit_code == 0 and "21 weights are quantized" in result.stdout
    assert result.stderr == "no plot: No space left on device\n"


def test_an_ignored_name_that_nothing_matches(tmp_path: Path) -> None:
    result = run(DEMO_MODEL, tmp_path / "out", "--scheme", "ptpc_fp8", "--ignore", "*.o_porj", "--ignore", "*.q_proj")
    assert result.exit_code == 1 and result.stderr == (
        f"quantize: FAILED. ignore names '*.o_porj', which no module of {DEMO_MODEL} matches: it must match the whole "
        "name, as '*.o_proj' does.\n"
    )


@pytest.mark.parametrize("device", ["xpu:7", "meta", "a GPU"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str) -> None:
    result = run(DEMO_MODEL, tmp_path / "out", "--scheme", "nvfp4", "--device", device)
    assert result.exit_code == 1
    assert f"--device {device} cannot be used here" in result.stderr and result.stderr.count("\n") == 1


def test_a_gpu_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("llm_quant_rocm.checkpoint.quantize.quantize_checkpoint", full)
    result = run(DEMO_MODEL, tmp_path / "out", "--scheme", "nvfp4")
    assert result.exit_code == 1
    assert result.stderr.startswith("quantize: FAILED. cpu is out of memory: end what fills it")


def test_the_plot_has_a_line_a_kind_and_puts_experts_together() -> None:
    errors = {
        "model.layers.0.self_attn.q_proj": 0.1,
        "model.layers.10.self_attn.q_proj": 0.2,
        "model.layers.2.self_attn.q_proj": 0.3,
        "model.layers.2.mlp.experts.0.up_proj": 0.4,
        "model.layers.2.mlp.experts.7.up_proj": 0.5,
        "head": 0.6,
    }
    assert series(errors) == {
        "experts up_proj, the worst": {2: 0.5},
        "head": {0: 0.6},
        "q_proj": {0: 0.1, 2: 0.3, 10: 0.2},
    }
