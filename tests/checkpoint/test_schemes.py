# SPDX-License-Identifier: Apache-2.0
"""PTPC checkpoints, the search for block scales, experts, and the errors that are reported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig

from llm_quant_rocm.checkpoint.layouts import LAYOUTS, PTPC_LAYOUTS, Layout
from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint
from llm_quant_rocm.checkpoint.reader import TensorInfo
from llm_quant_rocm.checkpoint.schemes import NvFp4, Ptpc, relative_error
from llm_quant_rocm.formats import fp8
from tests.checkpoint.test_quantize import DEMO_MODEL, read, tensors_of_a_model, weight_of, write
from tests.inputs import assert_same


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("layout", list(PTPC_LAYOUTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_ptpc_holds_the_codes_of_the_format(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    original = tensors_of_a_model(dtype)
    report = quantize_checkpoint(
        write(tmp_path / "source", original, 3), tmp_path / "target", layout, scheme="ptpc_fp8"
    )
    found = read(tmp_path / "target")
    assert len(report.quantized) == 14
    for module in report.quantized:
        codes, scale = fp8.quantize_rows(original[f"{module}.weight"], fp8.OCP)
        assert_same(found[f"{module}.weight"], codes)
        assert_same(found[f"{module}.weight_scale"], scale if layout == "compressed-tensors" else scale.flatten())
    for name in original.keys() - {f"{module}.weight" for module in report.quantized}:
        assert_same(found[name], original[name])


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "nvfp4"])
def test_what_the_disk_needs_is_foretold(scheme: str) -> None:
    """Room for a checkpoint is asked for before it is written: every byte but a scalar's or two."""
    w = torch.randn(48, 96).bfloat16()
    method = (
        Ptpc(PTPC_LAYOUTS["modelopt"])
        if scheme == "ptpc_fp8"
        else NvFp4(LAYOUTS["modelopt"], False, lambda name: [name], lambda name: w, None)
    )
    tensors, _ = method.quantize("q_proj.weight", w)
    whole = sum(tensor.nbytes for tensor in tensors.values() if tensor.dim())
    assert method.nbytes(TensorInfo("model.safetensors", "BF16", (48, 96))) == whole


def test_compressed_tensors_decompresses_ptpc(tmp_path: Path) -> None:
    original = tensors_of_a_model(torch.float32)
    quantize_checkpoint(write(tmp_path / "source", original), tmp_path / "target", scheme="ptpc_fp8")
    config = QuantizationConfig.model_validate(description(tmp_path / "target"))
    scheme = config.config_groups["group_0"]
    assert (config.format, scheme.weights.strategy, scheme.input_activations.strategy) == (
        "float-quantized", "channel", "token",
    )  # fmt: skip
    assert scheme.input_activations.dynamic
    found = read(tmp_path / "target")
    module = "model.layers.1.mlp.down_proj"
    state = {part: found[f"{module}.{part}"] for part in ("weight", "weight_scale")}
    values = FloatQuantizationCompressor.decompress(state, scheme)["weight"]
    assert_same(values.float(), fp8.dequantize(state["weight"], state["weight_scale"]))
    assert (values - original[f"{module}.weight"]).norm() < 0.03 * original[f"{module}.weight"].norm()


def test_modelopt_calls_ptpc_per_channel_and_token(tmp_path: Path) -> None:
    quantize_checkpoint(
        write(tmp_path / "source", tensors_of_a_model()), tmp_path / "target", "modelopt", scheme="ptpc_fp8"
    )
    found = description(tmp_path / "target")
    assert (found["quant_method"], found["quant_algo"]) == ("modelopt", "FP8_PER_CHANNEL_PER_TOKEN")
    assert found["ignore"] == ["lm_head", "model.embed_tokens"]


def test_transformers_reads_ptpc(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    quantize_checkpoint(DEMO_MODEL, tmp_path / "target", scheme="ptpc_fp8")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.bfloat16)
    tensors = read(tmp_path / "target")
    with torch.no_grad():
        assert model(torch.arange(4)[None]).logits.isfinite().all()
    linears = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    assert len(linears) == 21
    for name, linear in linears.items():
        values = linear.weight.detach().float()
        if linear.weight.dtype == torch.float8_e4m3fn:
            values = values * linear.weight_scale.float()
        exact = fp8.dequantize(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"])
        torch.testing.assert_close(values, exact, rtol=2**-7, atol=0)


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "nvfp4"])
def test_the_error_of_weights_whose_squares_overflow(tmp_path: Path, scheme: str) -> None:
    w = torch.randn(64, 64)
    errors = []
    for size in (1.0, 2.0**90):
        source = write(tmp_path / f"{size}", {"a.weight": w * size})
        errors += quantize_checkpoint(source, tmp_path / f"{size}-target", scheme=scheme).errors.values()
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_the_search_leaves_less_error_in_every_layer(tmp_path: Path) -> None:
    original = tensors_of_a_model()
    source = write(tmp_path / "source", original, 3)
    nearest = quantize_checkpoint(source, tmp_path / "nearest")
    search = quantize_checkpoint(source, tmp_path / "search", search=True)
    for report, folder in ((nearest, "nearest"), (search, "search")):
        tensors = read(tmp_path / folder)
        for module, error in report.errors.items():
            w = original[f"{module}.weight"].double()
            exact = (weight_of(tensors, module).dequantize().double() - w).norm() / w.norm()
            assert error == pytest.approx(exact.item(), rel=1e-5)
    assert search.errors.keys() == nearest.errors.keys() == set(search.quantized)
    for module, error in search.errors.items():
        assert error < 0.93 * nearest.errors[module], module


def experts(mlp: str) -> dict[str, torch.Tensor]:
    tensors = {f"{mlp}.gate.weight": torch.randn(4, 64), f"{mlp}.shared_expert_gate.weight": torch.randn(1, 64)}
    for expert in range(4):
        for name, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            tensors[f"{mlp}.experts.{expert}.{name}.weight"] = torch.randn(shape) * (1 + expert)
    return tensors


def test_experts_and_their_router(tmp_path: Path) -> None:
    mlp = "model.layers.0.mlp"
    report = quantize_checkpoint(write(tmp_path / "source", experts(mlp), 3), tmp_path / "target", "modelopt")
    assert set(report.kept) == {f"{mlp}.gate", f"{mlp}.shared_expert_gate"}
    assert len(report.quantized) == 12
    found = read(tmp_path / "target")
    for expert in range(4):
        gate, up = (found[f"{mlp}.experts.{expert}.{name}_proj.weight_scale_2"] for name in ("gate", "up"))
        assert gate == up


@pytest.mark.parametrize(
    "layout", [*LAYOUTS.values(), *PTPC_LAYOUTS.values()], ids=[*LAYOUTS, *(f"ptpc-{name}" for name in PTPC_LAYOUTS)]
)
def test_config_json_is_described_last(layout: Layout) -> None:
    """A folder that has it is whole."""
    assert list(layout.describe({}, ["lm_head"], True))[-1] == "config.json"


def test_modelopt_has_no_experts_with_a_scale_a_channel(tmp_path: Path) -> None:
    source = write(tmp_path / "source", experts("model.layers.0.mlp"))
    with pytest.raises(ValueError, match="with one scale a tensor, not one a channel: take compressed-tensors"):
        quantize_checkpoint(source, tmp_path / "target", "modelopt", scheme="ptpc_fp8")
    assert len(quantize_checkpoint(source, tmp_path / "target", scheme="ptpc_fp8").quantized) == 12


def test_the_relative_error_is_that_of_the_whole() -> None:
    w = torch.randn(7, 32)
    values = w + 0.1 * torch.randn(7, 32)
    slices = [slice(0, 3), slice(3, 7)]
    found = relative_error(w, ((rows, values[rows]) for rows in slices))
    assert found == pytest.approx(((values - w).norm() / w.norm()).item(), rel=1e-5)
    assert relative_error(torch.zeros(2, 16), [(slice(0, 2), torch.zeros(2, 16))]) == 0.0


def test_memory_holds_the_output_of_one_file(tmp_path: Path) -> None:
    """Eight files of 32 MiB: what the process holds beside the mapped source does not grow from file to file."""
    tensors = {f"{i}.proj.weight": torch.randn(4096, 4096).bfloat16() for i in range(8)}
    source = write(tmp_path / "source", tensors, 8)
    del tensors
    program = (
        "import re, sys; from pathlib import Path\n"
        "import compressed_tensors\n"
        "from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint\n"
        "held = lambda: int(re.search(r'RssAnon:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "source, target = map(Path, sys.argv[1:])\n"
        "seen = []\n"
        "quantize_checkpoint(source, target, scheme='ptpc_fp8', on_progress=lambda *_: seen.append(held()))\n"
        "print((max(seen[2:]) - seen[1]) // 1024)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "target")]
    # So that the C library gives back what is freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=1800)
    # MiB: not even one output of 16 was kept.
    assert int(done.stdout) < 16, done.stdout
