# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm doctor MODEL`: checkpoints that are whole, and ones with faults planted into them.

The files have headers and no weights, sparse where a weight would be, so that models of any size can be examined.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint
from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli._errors import CommandError
from llm_quant_rocm.cli.doctor import model, schemes
from llm_quant_rocm.cli.doctor.table import Part

ROOT = Path(__file__).parents[2]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F8_E4M3": 8, "F8_E5M2": 8, "U8": 8, "I8": 8, "I32": 32}
# Llama-3.3-70B, but for its layers.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
LINEAR = {
    "self_attn.q_proj": (8192, 8192),
    "self_attn.k_proj": (1024, 8192),
    "self_attn.v_proj": (1024, 8192),
    "self_attn.o_proj": (8192, 8192),
    "mlp.gate_proj": (28672, 8192),
    "mlp.up_proj": (28672, 8192),
    "mlp.down_proj": (8192, 28672),
}
# Of the linear layers of `llama`.
NAMES = [f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEAR]
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}, "input_activations": None}
    },
    "ignore": ["lm_head"],
}


@pytest.fixture(autouse=True)
def a_machine_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed here, and whatever GPU there is."""
    with_engines(monkeypatch, "vllm")
    monkeypatch.setattr(schemes, "_served_here", lambda: True)


def with_engines(monkeypatch: pytest.MonkeyPatch, *engines: str) -> None:
    monkeypatch.setattr(schemes, "installed", lambda engine: "1.0" if engine in engines else None)


def weight(n: int, k: int) -> Tensors:
    return {"weight": ("BF16", (n, k))}


def modelopt(n: int, k: int) -> Tensors:
    scales = {"weight_scale": ("F8_E4M3", (n, k // 16)), "weight_scale_2": ("F32", ()), "input_scale": ("F32", ())}
    return {"weight": ("U8", (n, k // 2)), **scales}


def compressed(n: int, k: int) -> Tensors:
    scales = {"weight_scale": ("F8_E4M3", (n, k // 16)), "weight_global_scale": ("F32", (1,))}
    return {"weight_packed": ("U8", (n, k // 2)), **scales}


def llama(linear: Callable[[int, int], Tensors], layers: int = 2) -> Tensors:
    """The tensors of so many layers, each linear one stored as `linear` says."""
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", (128256, 8192)),
        "lm_head.weight": ("BF16", (128256, 8192)),
        "model.norm.weight": ("BF16", (8192,)),
    }
    for layer in range(layers):
        for name, shape in LINEAR.items():
            tensors |= {f"model.layers.{layer}.{name}.{part}": value for part, value in linear(*shape).items()}
    return tensors


def write(folder: Path, tensors: Tensors, quantization: Any = None, config: dict[str, Any] | None = None) -> Path:
    """A checkpoint with these tensors' headers."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps((CONFIG if config is None else config) | described))
    write_file(folder / "model.safetensors", tensors)
    return folder


def write_file(file: Path, tensors: Tensors) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * _BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def problems(parts: list[Part]) -> list[tuple[str, str]]:
    return [(problem.what, problem.cure) for part in parts for problem in part.problems]


def plans(parts: list[Part]) -> dict[str, Any]:
    return {plan.scheme: plan for plan in parts[0].rows}


# --- checkpoints that are whole


def test_a_16_bit_checkpoint_says_what_each_scheme_takes(tmp_path: Path) -> None:
    parts = model.examine(write(tmp_path / "llama", llama(weight, 80)), 8)
    assert problems(parts) == []
    found = plans(parts)
    # 70.55e9 parameters, of which 68.45e9 are quantized.
    assert found["16 bits"].memory == pytest.approx(141.1e9 / 2**30 / 8, rel=1e-3)
    assert found["PTPC FP8"].memory == pytest.approx(72.7e9 / 2**30 / 8, rel=1e-3)
    assert found["NVFP4"].memory == pytest.approx((68.45e9 * 4.5 / 8 + 4.2e9) / 2**30 / 8, rel=3e-3)
    assert (found["PTPC FP8"].quantized, found["PTPC FP8"].kept) == (7 * 80, 0)
    assert found["PTPC FP8"].command == (
        f"vllm serve {tmp_path / 'llama'} --tensor-parallel-size 8 --quantization ptpc_fp8"
    )
    rows = {row.layer: row for row in parts[1].rows}
    assert rows["model.layers.*.mlp.down_proj"].count == 80
    assert rows["model.layers.*.mlp.down_proj"].per_rank == [8192, 28672 // 8]
    assert rows["model.layers.*.self_attn.k_proj"].per_rank == [128, 8192]
    assert rows["lm_head"].served == "16 bits"


def test_the_folder_that_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "llama", llama(weight)))
    assert plans(model.examine(Path("."), 1))["NVFP4"].command.splitlines() == [
        "llm-quant-rocm quantize . llama-NVFP4 --scheme nvfp4",
        "vllm serve llama-NVFP4",
    ]


@pytest.mark.parametrize(
    "config",
    [
        COMPRESSED | {"ignore": ["re:*lm_head"]},
        COMPRESSED | {"config_groups": ["group_0"]},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": ["a"]},
    ],
    ids=["expression", "groups", "layers"],
)
def test_a_description_that_cannot_be_understood(tmp_path: Path, config: Any) -> None:
    write(tmp_path, llama(compressed), config)
    with pytest.raises(CommandError, match="cannot be understood .*: download the checkpoint again, or correct"):
        model.examine(tmp_path, 1)


@pytest.mark.parametrize("without", ["config_groups", "targets"])
def test_a_description_that_leaves_something_out(tmp_path: Path, without: str) -> None:
    config = json.loads(json.dumps(COMPRESSED))
    (config if without in config else config["config_groups"]["group_0"]).pop(without)
    assert model.examine(write(tmp_path, llama(compressed), config), 1)


@pytest.mark.parametrize(
    ("linear", "config"), [(modelopt, MODELOPT), (compressed, COMPRESSED)], ids=["modelopt", "compressed-tensors"]
)
def test_an_nvfp4_checkpoint_needs_no_flag(tmp_path: Path, linear: Any, config: Any) -> None:
    parts = model.examine(write(tmp_path, llama(linear), config), 1)
    assert problems(parts) == []
    plan = plans(parts)["NVFP4"]
    assert plan.command == f"vllm serve {tmp_path}"
    assert (plan.quantized, plan.kept) == (14, 0)
    linear_bytes = 2 * sum(n * k * 4.5 / 8 + 4 * n for n, k in LINEAR.values())
    assert plan.memory * 2**30 == pytest.approx(linear_bytes + 2 * 2 * 128256 * 8192 + 2 * 8192)
    assert plans(parts)["16 bits"].memory > 3 * (plan.memory - 4)


def test_commands_are_those_of_the_engines_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "a model", llama(weight))
    with_engines(monkeypatch, "sglang")
    assert plans(model.examine(folder, 2))["PTPC FP8"].command == (
        f"python -m sglang.launch_server --model-path '{folder}' --tp-size 2 --quantization ptpc_fp8"
    )
    with_engines(monkeypatch, "vllm", "sglang")
    assert plans(model.examine(folder, 1))["16 bits"].command.splitlines() == [
        f"vllm serve '{folder}'",
        f"python -m sglang.launch_server --model-path '{folder}'",
    ]
    with_engines(monkeypatch)
    assert plans(model.examine(folder, 1))["16 bits"].command == f"vllm serve '{folder}'"


def test_what_hf_quant_config_says_counts(tmp_path: Path) -> None:
    write(tmp_path, llama(modelopt))
    quant = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    parts = model.examine(tmp_path, 1)
    assert problems(parts) == []
    assert "NVFP4" in plans(parts)


@pytest.mark.parametrize("in_older_file", [False, True], ids=["config.json", "hf_quant_config.json"])
def test_a_mixed_checkpoint_is_served_layer_by_layer(tmp_path: Path, in_older_file: bool) -> None:
    def fp8(n: int, k: int) -> Tensors:
        return {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("F32", ())}

    tensors = {name: value for name, value in llama(modelopt).items() if "o_proj" not in name}
    tensors |= {name: value for name, value in llama(fp8).items() if "o_proj" in name}
    layers = {
        name.removesuffix(".weight"): {"quant_algo": "FP8" if "o_proj" in name else "NVFP4"}
        for name in tensors
        if name.endswith("proj.weight")
    }
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    write(tmp_path, tensors, settings | ({} if in_older_file else {"quantized_layers": layers}))
    if in_older_file:
        older = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(older))
    parts = model.examine(tmp_path, 2)
    assert problems(parts) == []
    assert "NVFP4" in plans(parts)
    assert {row.layer.rpartition(".")[2]: row.served for row in parts[1].rows}["o_proj"] == "FP8"


def test_what_this_project_writes_is_whole(tmp_path: Path) -> None:
    demo = ROOT / "examples" / "demo_model"
    assert problems(model.examine(demo, 2)) == []
    for layout in ("compressed-tensors", "modelopt"):
        quantize_checkpoint(demo, tmp_path / layout, layout)
        parts = model.examine(tmp_path / layout, 2)
        assert problems(parts) == []
        assert plans(parts)["NVFP4"].quantized == 21


def test_experts_keep_their_router(tmp_path: Path) -> None:
    tensors: Tensors = {"model.layers.0.mlp.gate.weight": ("BF16", (128, 2048))}
    for expert in range(128):
        for name, shape in {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}.items():
            tensors[f"model.layers.0.mlp.experts.{expert}.{name}.weight"] = ("BF16", shape)
    parts = model.examine(write(tmp_path, tensors, config={"num_attention_heads": 32}), 4)
    assert problems(parts) == []
    rows = {row.layer: row for row in parts[1].rows}
    assert rows["model.layers.*.mlp.experts.*.down_proj"].count == 128
    assert rows["model.layers.*.mlp.experts.*.down_proj"].per_rank == [2048, 192]
    assert (rows["model.layers.*.mlp.gate"].served, rows["model.layers.*.mlp.gate"].per_rank) == (
        "16 bits",
        [128, 2048],
    )


@pytest.mark.parametrize(("ranks", "fits"), [(1, False), (2, True), (4, None)])
def test_whether_it_fits_the_gpus_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, fits: bool | None
) -> None:
    """Two GPUs, one of 100 MiB and one larger; a weight of 128 MiB, and one of which the smaller GPU has no half."""
    folder = write(tmp_path, {"model.a_proj.weight": ("BF16", (8192, 8192))}, config={})
    sizes = [100 * 2**20, 200 * 2**20]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(sizes))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i]))
    assert plans(model.examine(folder, ranks))["16 bits"].fits is fits
    larger = write(tmp_path / "larger", {"model.a_proj.weight": ("BF16", (16384, 8192))}, config={})
    assert not plans(model.examine(larger, ranks))["16 bits"].fits


def test_experts_in_one_tensor_count(tmp_path: Path) -> None:
    tensors: Tensors = {"model.layers.0.mlp.experts.gate_up_proj": ("BF16", (8, 1024, 512))}
    parts = model.examine(write(tmp_path, tensors, config={}), 1)
    assert plans(parts)["PTPC FP8"].quantized == 1
    assert plans(parts)["PTPC FP8"].memory * 2**30 == 8 * 1024 * 512 + 4 * 8 * 1024


def test_a_token_of_a_vision_model_is_no_layer(tmp_path: Path) -> None:
    tensors: Tensors = {"visual.cls_token": ("BF16", (1, 1, 1280)), "visual.head.probe": ("BF16", (1, 1, 1280))}
    with_tokens = plans(model.examine(write(tmp_path, llama(weight) | tensors), 2))
    without = plans(model.examine(write(tmp_path / "without", llama(weight)), 2))
    assert [(plan.quantized, plan.kept) for plan in with_tokens.values()] == [
        (plan.quantized, plan.kept) for plan in without.values()
    ]


def test_layers_named_by_ignored_layers_stay(tmp_path: Path) -> None:
    config = {"quant_method": "ptpc_fp8", "ignored_layers": ["o_proj"]}
    parts = model.examine(write(tmp_path, llama(weight), config), 1)
    assert plans(parts)["PTPC FP8"].kept == 2
    assert "--quantization" not in plans(parts)["PTPC FP8"].command
    # `quantize` refuses it, and no engine serves it in 16 bits.
    assert list(plans(parts)) == ["16 bits", "PTPC FP8"] and not plans(parts)["16 bits"].command
    assert any(note.startswith("not in NVFP4: `quantize` takes no") for note in parts[0].notes)


def test_ignored_layers_that_engines_refuse(tmp_path: Path) -> None:
    config = {"quant_method": "ptpc_fp8", "ignored_layers": "o_proj"}
    found = problems(model.examine(write(tmp_path, llama(weight), config), 1))
    assert found == [("ignored_layers is 'o_proj'", "it must be a list of layers' names")]


def test_another_quantization_is_left_to_the_engine(tmp_path: Path) -> None:
    def gptq(n: int, k: int) -> Tensors:
        return {"qweight": ("I32", (k // 8, n)), "scales": ("F16", (k // 128, n))}

    parts = model.examine(write(tmp_path, llama(gptq), {"quant_method": "gptq", "bits": 4}), 1)
    assert problems(parts) == []
    assert list(plans(parts)) == ["16 bits", "served by the engine itself"]


@pytest.mark.parametrize("name", ["weight", "weight_packed"])
def test_mxfp4_is_left_to_the_engine(tmp_path: Path, name: str) -> None:
    """As AMD's Quark and llm-compressor write it."""

    def mxfp4(n: int, k: int) -> Tensors:
        return {name: ("U8", (n, k // 2)), "weight_scale": ("U8", (n, k // 32))}

    parts = model.examine(write(tmp_path, llama(mxfp4, 80), {"quant_method": "quark"}), 8)
    assert problems(parts) == []
    found = plans(parts)
    assert list(found) == ["16 bits", "served by the engine itself"]
    assert found["served by the engine itself"].memory == pytest.approx(
        (68.45e9 * 4.25 / 8 + 4.2e9) / 2**30 / 8, rel=1e-3
    )
    assert {row.layer: row for row in parts[1].rows}["model.layers.*.mlp.down_proj"].served == "MXFP4"


def gpt_oss(experts: Tensors) -> Tensors:
    """A layer of gpt-oss-120b, whose experts add biases."""
    biases = {"gate_up_proj_bias": ("BF16", (128, 5760)), "down_proj_bias": ("BF16", (128, 2880))}
    tensors: Tensors = {f"model.layers.0.mlp.experts.{part}": value for part, value in (experts | biases).items()}
    return tensors | {
        "model.layers.0.mlp.router.weight": ("BF16", (128, 2880)),
        "model.layers.0.mlp.router.bias": ("BF16", (128,)),
        "model.layers.0.self_attn.q_proj.weight": ("BF16", (4096, 2880)),
        "model.layers.0.self_attn.q_proj.bias": ("BF16", (4096,)),
    }


GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_attention_heads": 64, "num_key_value_heads": 8}
GPT_OSS_16_BITS: Tensors = {"gate_up_proj": ("BF16", (128, 2880, 5760)), "down_proj": ("BF16", (128, 2880, 2880))}


def test_gpt_oss_is_left_to_the_engine(tmp_path: Path) -> None:
    experts: Tensors = {
        "gate_up_proj_blocks": ("U8", (128, 5760, 90, 16)),
        "gate_up_proj_scales": ("U8", (128, 5760, 90)),
        "down_proj_blocks": ("U8", (128, 2880, 90, 16)),
        "down_proj_scales": ("U8", (128, 2880, 90)),
    }
    parts = model.examine(write(tmp_path, gpt_oss(experts), {"quant_method": "mxfp4"}, GPT_OSS), 1)
    assert problems(parts) == []
    assert parts[0].notes[0] == "GptOssForCausalLM, mxfp4; weights alone, on 1 tensor-parallel rank"
    found = plans(parts)["served by the engine itself"]
    assert (found.quantized, found.command) == (2, f"vllm serve {tmp_path}")
    values = 128 * 2880 * (5760 + 2880)
    assert found.memory * 2**30 == values * 4.25 / 8 + 2 * 2880 * (128 + 4096)
    rows = {row.layer: row for row in parts[1].rows}
    assert rows["model.layers.*.mlp.experts.gate_up_proj"].shape == [128, 5760, 2880]
    assert rows["model.layers.*.mlp.experts.down_proj"].stored == "MXFP4"


@pytest.mark.parametrize(
    ("columns", "ranks", "what"),
    [
        (14344, 1, "has 14344 input features, no multiple of 16, so it cannot be NVFP4"),
        (14336, 128, None),
        (14336, 256, "has 56 of 14336 input features on each of 256 ranks, no multiple of 16"),
    ],
)
def test_nvfp4_is_left_out_where_quantize_or_the_engine_would_refuse_it(
    tmp_path: Path, columns: int, ranks: int, what: str | None
) -> None:
    tensors: Tensors = {"model.layers.0.mlp.down_proj.weight": ("BF16", (8192, columns))}
    parts = model.examine(write(tmp_path, tensors, config={}), ranks)
    assert problems(parts) == []
    assert list(plans(parts)) == ["16 bits", *(["NVFP4"] if what is None else []), "PTPC FP8"]
    note = f"not in NVFP4: model.layers.*.mlp.down_proj {what}, unless `quantize --ignore` keeps it in 16 bits"
    assert parts[0].notes[1:] == ([] if what is None else [note])


def test_nvfp4_is_offered_where_quantize_makes_it(tmp_path: Path) -> None:
    """Its own rules: a convolution is no tensor of all experts, and a model of transposed weights is refused."""
    linear: Tensors = {"model.layers.0.mixer.in_proj.weight": ("BF16", (128, 64))}
    short: Tensors = {"model.layers.0.mixer.conv1d.weight": ("BF16", (128, 1, 4))}
    experts: Tensors = {"model.layers.0.moe.input_linear.weight": ("BF16", (8, 128, 64))}
    for name, tensors, config, why in (
        ("convolution", short, {}, None),
        ("experts", experts, {}, "takes experts that have a tensor each"),
        ("gpt2", {}, {"model_type": "gpt2"}, "takes no gpt2, whose weights are transposed"),
    ):
        parts = model.examine(write(tmp_path / name, linear | tensors, config=config), 1)
        assert list(plans(parts)) == ["16 bits", *([] if why else ["NVFP4"]), "PTPC FP8"], name
        assert parts[0].notes[1:] == ([f"not in NVFP4: `quantize` {why}"] if why else []), name


def test_experts_with_biases_are_served_in_16_bits(tmp_path: Path) -> None:
    """The engines' plugins refuse them."""
    parts = model.examine(write(tmp_path, gpt_oss(GPT_OSS_16_BITS), config=GPT_OSS), 1)
    assert problems(parts) == []
    assert list(plans(parts)) == ["16 bits"]
    assert parts[0].notes[1:] == ["not in NVFP4 or PTPC FP8: neither serves experts with biases"]
    assert {row.served for row in parts[1].rows} == {"16 bits"}


def test_a_clamped_swiglu_is_served_in_16_bits(tmp_path: Path) -> None:
    tensors: Tensors = {"model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", (768, 2048))}
    parts = model.examine(write(tmp_path, tensors, config={"text_config": {"swiglu_limit": 7.0}}), 1)
    assert list(plans(parts)) == ["16 bits"]
    assert "experts with a clamped SwiGLU (swiglu_limit)" in parts[0].notes[1]
    # Which is nothing to a model without experts.
    dense = model.examine(write(tmp_path, llama(weight), config=CONFIG | {"swiglu_limit": 7.0}), 1)
    assert list(plans(dense)) == ["16 bits", "NVFP4", "PTPC FP8"]


def test_bytes_of_another_quantization_need_no_scales_of_nvfp4(tmp_path: Path) -> None:
    def bitsandbytes(n: int, k: int) -> Tensors:
        return {"weight": ("U8", (n * k // 2, 1)), "weight.absmax": ("U8", (n * k // 64,))}

    parts = model.examine(write(tmp_path, llama(bitsandbytes), {"quant_method": "bitsandbytes"}), 1)
    assert problems(parts) == []
    assert {row.layer: row for row in parts[1].rows}["model.layers.*.mlp.down_proj"].stored == "other"


# --- planted faults


def fault(folder: Path, ranks: int = 1) -> tuple[str, str]:
    found = problems(model.examine(folder, ranks))
    assert len(found) == 1, found
    return found[0]


def test_a_truncated_file(tmp_path: Path) -> None:
    file = write(tmp_path, llama(weight)) / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
    what, cure = fault(tmp_path)
    assert "model.safetensors is truncated" in what
    assert "is the first of 1 tensors that are cut off" in what
    assert cure == "copy or download the file again"


def test_a_pointer_in_the_place_of_the_weights(tmp_path: Path) -> None:
    file = write(tmp_path, llama(weight)) / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n")
    assert fault(tmp_path) == (
        f"{file} is a Git LFS pointer and not the weights",
        "run `git lfs pull` in its folder, or download the file",
    )


def test_a_file_with_something_behind_its_tensors(tmp_path: Path) -> None:
    """safetensors refuses it, and so does every engine."""
    with (write(tmp_path, llama(weight)) / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")
    what, cure = fault(tmp_path)
    assert "model.safetensors is too long: it has" in what
    assert cure == "copy or download the file again"


@pytest.mark.parametrize(
    "content",
    [b"", b"\x10", b"\x02\0\0\0\0\0\0\0{]", b"\x02\0\0\0\0\0\0\0[]", b"\x08\0\0\0\0\0\0\0" + b'{"a": 1}', b"\xff" * 40],
    ids=["empty", "no-length", "no-json", "a-list", "no-tensor", "huge-length"],
)
def test_a_file_that_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (write(tmp_path, llama(weight)) / "model.safetensors").write_bytes(content)
    what, cure = fault(tmp_path)
    assert "model.safetensors is" in what
    assert cure == "copy or download the file again"


@pytest.mark.parametrize("shape", ['"ab"', "[[1], 2]", 9999 * "["], ids=["text", "lists", "deep"])
def test_a_header_whose_shapes_are_none(tmp_path: Path, shape: str) -> None:
    """The file is at fault, not config.json."""
    header = '{"a.weight": {"dtype": "BF16", "data_offsets": [0, 4], "shape": ' + shape + "}}"
    file = write(tmp_path, llama(weight)) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    assert fault(tmp_path)[0] == f"{file} is broken, its header is no JSON of tensors"


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [([3], [[0, 4], [4, 8]]), ([2], [[0, 4], [2, 6]]), ([2], [[0, 4], [6, 10]]), ([-2], [[0, 4], [4, 0]])],
    ids=["more", "overlap", "gap", "negative"],
)
def test_a_header_whose_bytes_are_not_those_of_its_shapes(
    tmp_path: Path, shape: list[int], offsets: list[list[int]]
) -> None:
    """Which safetensors refuses, when the model is loaded."""
    a, b = (dict(dtype="BF16", data_offsets=place) for place in offsets)
    header = json.dumps({"a.weight": a | {"shape": [2]}, "b.weight": b | {"shape": shape}})
    file = write(tmp_path, llama(weight)) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(max(map(max, offsets))))
    assert fault(tmp_path)[0] == f"{file} is broken, the bytes of b.weight are not where or as many as they must be"


def test_a_weight_of_one_value_is_on_every_rank(tmp_path: Path) -> None:
    tensors = llama(weight) | {"model.scale.weight": ("BF16", ())}
    assert problems(model.examine(write(tmp_path, tensors), 2)) == []


def test_a_file_that_the_index_names_is_missing(tmp_path: Path) -> None:
    write(tmp_path, llama(weight))
    places = {"a.weight": "model-00001-of-00002.safetensors", "model.norm.weight": "model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    what, cure = fault(tmp_path)
    assert "model-00001-of-00002.safetensors is missing" in what
    assert cure == "download it"


@pytest.mark.parametrize(
    ("missing", "said"), [(["a.weight"], "a.weight is"), (["a.weight", "b.weight"], "a.weight and 1 more are")]
)
def test_a_tensor_that_the_index_names_is_missing(tmp_path: Path, missing: list[str], said: str) -> None:
    write(tmp_path, llama(weight))
    places = dict.fromkeys(["model.norm.weight", *missing], "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert fault(tmp_path)[0] == f"{said} in model.safetensors.index.json and in no file"


@pytest.mark.parametrize("indexed", [False, True])
def test_a_tensor_that_is_in_two_files(tmp_path: Path, indexed: bool) -> None:
    """Engines read the whole of every file that the index names."""
    write(tmp_path, llama(weight))
    norm, head = ("BF16", (8192,)), ("BF16", (8, 8192))
    write_file(tmp_path / "rescued.safetensors", {"model.norm.weight": norm, "lm_head.weight": head})
    if indexed:
        places = {"lm_head.weight": "rescued.safetensors", "model.norm.weight": "model.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert fault(tmp_path) == (
        f"model.norm.weight and 1 more are in two files, {tmp_path}/model.safetensors and "
        f"{tmp_path}/rescued.safetensors",
        "keep the right one, or download the checkpoint again",
    )


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2"])
def test_a_scale_that_is_missing(tmp_path: Path, part: str) -> None:
    tensors = llama(modelopt)
    del tensors[f"model.layers.1.mlp.up_proj.{part}"]
    what, _ = fault(write(tmp_path, tensors, MODELOPT))
    assert what == f"model.layers.1.mlp.up_proj.{part} is missing from the checkpoint"


@pytest.mark.parametrize("codes", ["weight", "weight_packed"])
def test_codes_that_are_missing(tmp_path: Path, codes: str) -> None:
    layer, config = (modelopt, MODELOPT) if codes == "weight" else (compressed, COMPRESSED)
    tensors = llama(layer)
    del tensors[f"model.layers.1.mlp.up_proj.{codes}"]
    assert fault(write(tmp_path, tensors, config)) == (
        f"model.layers.1.mlp.up_proj.{codes} is missing from the checkpoint, which has its scales",
        "fetch or export the checkpoint again",
    )


def test_a_scale_of_the_inputs(tmp_path: Path) -> None:
    """ModelOpt's of AWQ, under whose algorithm's name a description is refused."""
    scales: Tensors = {f"model.layers.{layer}.mlp.down_proj.pre_quant_scale": ("BF16", (28672,)) for layer in (0, 1)}
    assert fault(write(tmp_path, llama(modelopt) | scales, MODELOPT)) == (
        "model.layers.0.mlp.down_proj.pre_quant_scale is in the checkpoint, AWQ's scale of the layer's inputs, which "
        "engines do not multiply by it, and 1 more such",
        "export the model without AWQ",
    )


def test_faults_of_many_layers_are_said_once(tmp_path: Path) -> None:
    tensors = {name: value for name, value in llama(modelopt, 3).items() if not name.endswith("up_proj.weight_scale_2")}
    what, cure = fault(write(tmp_path, tensors, MODELOPT))
    assert what == "model.layers.0.mlp.up_proj.weight_scale_2 is missing from the checkpoint, and 2 more such"
    assert cure == "fetch or export the checkpoint again"


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F8_E5M2"])
def test_block_scales_of_another_type(tmp_path: Path, dtype: str) -> None:
    """The loaders refuse them; bytes beside a global scale are no MXFP4."""
    tensors = llama(modelopt)
    for name, (_, shape) in list(tensors.items()):
        if name.endswith("o_proj.weight_scale"):
            tensors[name] = (dtype, shape)
    parts = model.examine(write(tmp_path, tensors, MODELOPT), 1)
    what = f"model.layers.0.self_attn.o_proj.weight_scale is {dtype} in the checkpoint, and NVFP4's block scales are"
    assert problems(parts) == [(f"{what} F8_E4M3, and 1 more such", "fetch or export the checkpoint again")]
    assert {row.stored for row in parts[1].rows if "o_proj" in row.layer} == {"NVFP4"}


def test_scales_that_are_padded(tmp_path: Path) -> None:
    tensors = llama(modelopt) | {"model.layers.0.self_attn.k_proj.weight_scale": ("F8_E4M3", (1024, 640))}
    what, _ = fault(write(tmp_path, tensors, MODELOPT))
    assert "k_proj.weight_scale has shape [1024, 640], and [1024, 8192] values in NVFP4 need [1024, 512]" in what


@pytest.mark.parametrize(
    ("linear", "config", "codes"),
    [(modelopt, MODELOPT, "weight"), (compressed, COMPRESSED, "weight_packed")],
    ids=["modelopt", "compressed-tensors"],
)
def test_codes_in_signed_bytes(tmp_path: Path, linear: Any, config: Any, codes: str) -> None:
    """The loaders refuse them: tests/checkpoint/test_linear_tensors.py."""

    def signed(n: int, k: int) -> Tensors:
        return linear(n, k) | {codes: ("I8", (n, k // 2))}

    parts = model.examine(write(tmp_path, llama(signed), config), 1)
    what = f"model.layers.0.mlp.down_proj.{codes} and 13 more are int8 in the checkpoint, and NVFP4 codes are uint8"
    assert problems(parts) == [(what, "fetch or export the checkpoint again")]
    assert {row.stored for row in parts[1].rows if "_proj" in row.layer} == {"NVFP4"}


@pytest.mark.parametrize("config", [MODELOPT, {"quant_method": "another"}], ids=["nvfp4", "another"])
def test_layers_in_int8_are_no_codes(tmp_path: Path, config: Any) -> None:
    tensors = llama(modelopt if config is MODELOPT else weight)
    tensors["model.layers.0.self_attn.o_proj.weight"] = ("I8", (8192, 8192))
    tensors["model.layers.0.self_attn.o_proj.weight_scale"] = ("F32", (8192, 1))
    for part in ("weight_scale_2", "input_scale"):
        tensors.pop(f"model.layers.0.self_attn.o_proj.{part}", None)
    parts = model.examine(write(tmp_path, tensors, config), 1)
    assert problems(parts) == []
    (stored,) = {row.stored for row in parts[1].rows if "o_proj" in row.layer} - {"NVFP4", "BF16"}
    assert stored == "other"


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_NVFP4_FP8"])
def test_an_unknown_algorithm(tmp_path: Path, algorithm: str) -> None:
    what, cure = fault(write(tmp_path, llama(modelopt), MODELOPT | {"quant_algo": algorithm}))
    assert what == f"quant_algo {algorithm} is not known"
    assert "export the model with one of them" in cure


def test_another_group_size(tmp_path: Path) -> None:
    what, cure = fault(write(tmp_path, llama(modelopt), MODELOPT | {"group_size": 32}))
    assert "has group_size 32, and NVFP4 has blocks of 16" in what
    assert "quantize the model again" in cure


def test_k_that_does_not_fit_after_sharding(tmp_path: Path) -> None:
    tensors = {f"model.layers.0.mlp.down_proj.{part}": value for part, value in modelopt(512, 336).items()} | {
        f"model.layers.0.mlp.up_proj.{part}": value for part, value in modelopt(336, 512).items()
    }
    folder = write(tmp_path, tensors, MODELOPT, {"num_attention_heads": 64})
    assert problems(model.examine(folder, 1)) == []
    what, cure = fault(folder, 2)
    assert what == ("model.layers.*.mlp.down_proj has 168 of 336 input features on each of 2 ranks, no multiple of 16")
    assert cure == "serve with a smaller --tensor-parallel-size"


def test_sizes_that_ranks_cannot_share(tmp_path: Path) -> None:
    folder = write(tmp_path, llama(weight))
    whats = [what for what, _ in problems(model.examine(folder, 3))]
    assert whats[:2] == [
        "64 attention heads cannot be shared by 3 ranks",
        "8 key value heads cannot be shared by 3 ranks",
    ]
    assert "model.layers.*.mlp.down_proj has 28672 input features, which 3 ranks cannot share" in whats
    assert len(whats) == len(set(whats))
    # Ranks beyond the key heads share them: of 8 heads of 128 rows each of 16 ranks has one.
    parts = model.examine(folder, 16)
    assert problems(parts) == []
    shares = {row.layer: row.per_rank for row in parts[1].rows}
    assert shares["model.layers.*.self_attn.k_proj"] == shares["model.layers.*.self_attn.v_proj"] == [128, 8192]
    assert shares["model.layers.*.self_attn.q_proj"] == [512, 8192]


def test_what_latent_attention_compresses_is_on_every_rank(tmp_path: Path) -> None:
    whole = {"q_a_proj": (1536, 7168), "kv_a_proj_with_mqa": (576, 7168), "q_b_proj": (24576, 1536)}
    tensors: Tensors = {f"model.layers.0.self_attn.{name}.weight": ("BF16", shape) for name, shape in whole.items()}
    rows = model.examine(write(tmp_path, tensors), 2)[1].rows
    shares = {row.layer.rpartition(".")[2]: tuple(row.per_rank) for row in rows}
    assert shares == whole | {"q_b_proj": (12288, 1536)}


def test_vocabularies_are_padded_before_they_are_shared(tmp_path: Path) -> None:
    odd: Tensors = {f"{name}.weight": ("BF16", (32001, 8192)) for name in ("model.embed_tokens", "lm_head")}
    parts = model.examine(write(tmp_path, llama(weight) | odd), 2)
    assert problems(parts) == []
    shares = {row.layer: row.per_rank for row in parts[1].rows}
    assert shares["model.embed_tokens"] == shares["lm_head"] == [32064 // 2, 8192]


@pytest.mark.parametrize("part", ["vision_tower", "visual", "audio_tower"])
def test_encoders_need_not_be_on_the_ignore_list(part: str, tmp_path: Path) -> None:
    tensors = llama(modelopt) | {f"model.{part}.layers.0.fc1.weight": ("BF16", (4096, 1024))}
    assert problems(model.examine(write(tmp_path, tensors, MODELOPT), 1)) == []


def test_a_layer_that_should_be_on_the_ignore_list(tmp_path: Path) -> None:
    tensors = {name: value for name, value in llama(modelopt).items() if ".0.mlp.down_proj" not in name}
    tensors["model.layers.0.mlp.down_proj.weight"] = ("BF16", LINEAR["mlp.down_proj"])
    what, cure = fault(write(tmp_path, tensors, MODELOPT))
    assert what.startswith("model.layers.0.mlp.down_proj is BF16 in the checkpoint, where its quantization_config")
    assert cure == "if it is not quantized, the ignore list should name it"
    assert (
        problems(model.examine(write(tmp_path, tensors, MODELOPT | {"ignore": ["*.0.mlp.down*", "lm_head"]}), 1)) == []
    )


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}


@pytest.mark.parametrize("layout", ["targets", "quantized_layers"])
def test_a_layer_that_the_description_does_not_call_quantized(layout: str, tmp_path: Path) -> None:
    """Engines take it for one in 16 bits, and end without a word of why, or serve FP8 codes as values."""

    def described(*left_out: str) -> dict[str, Any]:
        kept = [name for name in NAMES if name not in left_out]
        if layout == "quantized_layers":
            return MIXED | {layout: {name: {"quant_algo": "NVFP4", "group_size": 16} for name in kept}}
        group = COMPRESSED["config_groups"]["group_0"] | {"targets": [f"re:{re.escape(name)}$" for name in kept]}
        return COMPRESSED | {"config_groups": {"group_0": group}}

    tensors = llama(compressed if layout == "targets" else modelopt)
    what, cure = fault(write(tmp_path, tensors, described("model.layers.1.mlp.down_proj")))
    assert what == (
        "model.layers.1.mlp.down_proj is NVFP4 in the checkpoint, whose quantization_config does not call the layer "
        "quantized"
    )
    assert cure == "fetch the checkpoint again, or export it with a description of all that is quantized"
    assert problems(model.examine(write(tmp_path, tensors, described()), 1)) == []


@pytest.mark.parametrize("entry", ["mlp", "mlp.experts", "mlp.experts.1.up_proj", "mlp.up_proj"])
def test_names_by_which_a_mixed_checkpoint_lists_experts(entry: str, tmp_path: Path) -> None:
    tensors = {f"model.layers.1.mlp.experts.0.up_proj.{part}": value for part, value in modelopt(2048, 4096).items()}
    for layer, count in ((1, 0), (2, 1)):
        config = MIXED | {"quantized_layers": {f"language_model.layers.{layer}.{entry}": {"quant_algo": "NVFP4"}}}
        assert len(problems(model.examine(write(tmp_path, tensors, config), 1))) == count


@pytest.mark.parametrize("targets", [["Linear"], ["LlamaMLP", "re:.*self_attn.*"]])
def test_targets_that_are_classes(targets: list[str], tmp_path: Path) -> None:
    group = COMPRESSED["config_groups"]["group_0"] | {"targets": targets}
    config = COMPRESSED | {"config_groups": {"group_0": group}}
    assert problems(model.examine(write(tmp_path, llama(compressed), config), 1)) == []


def test_a_layer_that_should_not_be_on_the_ignore_list(tmp_path: Path) -> None:
    config = COMPRESSED | {"quant_method": "compressed_tensors", "ignore": ["lm_head", "re:.*down_proj"]}
    what, _ = fault(write(tmp_path, llama(compressed), config))
    assert what == "model.layers.0.mlp.down_proj and 1 more are NVFP4 in the checkpoint, and its ignore list names it"


@pytest.mark.parametrize(
    ("linear", "config"),
    [
        (modelopt, MODELOPT),
        (compressed, COMPRESSED),
        (
            modelopt,
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": dict.fromkeys(["model.embed_tokens", *NAMES], {"quant_algo": "NVFP4"}),
            },
        ),
    ],
    ids=["modelopt", "compressed-tensors", "mixed"],
)
def test_a_quantized_table_of_tokens(tmp_path: Path, linear: Any, config: Any) -> None:
    tensors = llama(linear)
    del tensors["model.embed_tokens.weight"]
    tensors |= {f"model.embed_tokens.{part}": value for part, value in linear(128256, 8192).items()}
    what, cure = fault(write(tmp_path, tensors, config))
    where = "in NVFP4" if "quantized_layers" in config else "NVFP4 in the checkpoint"
    assert what == f"model.embed_tokens is {where}, and engines read embeddings in 16 bits"
    assert cure == "export the model with them so"


def test_several_groups_promise_nothing_of_a_layer(tmp_path: Path) -> None:
    """Which of them a layer is in, their targets do not say."""
    tensors = {name: value for name, value in llama(compressed).items() if ".0.mlp.down_proj" not in name}
    tensors["model.layers.0.mlp.down_proj.weight"] = ("BF16", LINEAR["mlp.down_proj"])
    group = COMPRESSED["config_groups"]["group_0"]
    assert problems(model.examine(write(tmp_path / "one", tensors, COMPRESSED), 1))
    several = COMPRESSED | {"config_groups": {"group_0": group, "group_1": group}}
    assert problems(model.examine(write(tmp_path / "several", tensors, several), 1)) == []


@pytest.mark.parametrize(
    ("codes", "scales"),
    [("experts.down_proj", "experts.down_proj_"), ("experts.input_linear.weight", "experts.input_linear.")],
)
def test_experts_in_one_tensor(tmp_path: Path, codes: str, scales: str) -> None:
    """Nothing is missing: the engine says so, too, in these words."""
    tensors = llama(modelopt)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors[prefix + codes] = ("U8", (16, 8192, 2048))
        tensors |= {
            f"{prefix}{scales}weight_scale": ("F8_E4M3", (16, 8192, 256)),
            f"{prefix}{scales}weight_scale_2": ("F32", (16,)),
            f"{prefix}{scales}input_scale": ("F32", ()),
        }
    what, cure = fault(write(tmp_path, tensors, MODELOPT))
    module = f"model.layers.0.{codes.removesuffix('.weight')}"
    assert what == (
        f"{module} has one tensor for all experts in the checkpoint (shape (16, 8192, 2048)), and nvfp4_triton reads "
        "one for each, and 1 more such"
    )
    assert cure == "leave the checkpoint to the engine with LLM_QUANT_ROCM_NVFP4=0"


def test_half_of_a_fused_layer(tmp_path: Path) -> None:
    tensors = {name: value for name, value in llama(modelopt).items() if ".1.self_attn.v_proj" not in name}
    tensors["model.layers.1.self_attn.v_proj.weight"] = ("BF16", (1024, 8192))
    config = MODELOPT | {"ignore": ["lm_head", "model.layers.1.self_attn.v_proj"]}
    what, cure = fault(write(tmp_path, tensors, config))
    q, k, v = (f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
    assert what.startswith(f"{q} (NVFP4), {k} (NVFP4), {v} (16 bits) are stored in different ways")
    assert what.endswith("engines make one layer of them")
    assert cure == "export the model with all of them alike"


def test_a_fused_layer_half_in_fp8(tmp_path: Path) -> None:
    """Of a checkpoint of mixed precision, in which both ways are legal by themselves."""
    tensors: Tensors = {}
    for layer in range(2):
        for name, dtype in (("gate_proj", "F8_E4M3"), ("up_proj", "BF16")):
            tensors[f"model.layers.{layer}.mlp.{name}.weight"] = (dtype, LINEAR[f"mlp.{name}"])
    recipes = {f"model.layers.{layer}.mlp.gate_proj": {"quant_algo": "FP8"} for layer in range(2)}
    recipes["model.layers.0.mlp.down_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": recipes}
    what, _ = fault(write(tmp_path, tensors, mixed))
    assert what == (
        "model.layers.0.mlp.gate_proj (FP8), model.layers.0.mlp.up_proj (16 bits) are stored in different ways, and "
        "engines make one layer of them, and 1 more such"
    )


def test_a_fused_layer_of_two_float_types_is_whole(tmp_path: Path) -> None:
    kept = {
        f"model.layers.1.self_attn.{name}_proj": dtype
        for name, dtype in zip("qkv", ("BF16", "BF16", "F32"), strict=True)
    }
    tensors = {name: value for name, value in llama(modelopt).items() if name.rpartition(".")[0] not in kept}
    tensors |= {f"{name}.weight": (dtype, LINEAR[name.split(".", 3)[3]]) for name, dtype in kept.items()}
    assert problems(model.examine(write(tmp_path, tensors, MODELOPT | {"ignore": ["lm_head", *kept]}), 1)) == []


def test_experts_that_the_described_method_does_not_serve(tmp_path: Path) -> None:
    tensors = gpt_oss(GPT_OSS_16_BITS)
    what, cure = fault(write(tmp_path / "ptpc", tensors, {"quant_method": "ptpc_fp8"}, GPT_OSS))
    assert what == "ptpc_fp8 does not serve experts with biases"
    assert cure.startswith("take quantization_config out of config.json")
    name = "model.layers.0.mlp.experts.0.up_proj"
    tensors = {f"{name}.{part}": value for part, value in modelopt(768, 2048).items()}
    tensors[f"{name}.bias"] = ("BF16", (768,))
    what, cure = fault(write(tmp_path / "nvfp4", tensors, MODELOPT))
    assert what == "nvfp4_triton does not serve experts with biases"
    assert cure == "leave the checkpoint to the engine with LLM_QUANT_ROCM_NVFP4=0"


def test_experts_in_16_bits_are_the_engines(tmp_path: Path) -> None:
    """Of gpt-oss with attention in NVFP4, if the ignore list says so."""
    experts = {name: value for name, value in gpt_oss(GPT_OSS_16_BITS).items() if ".experts." in name}
    tensors = llama(modelopt) | experts
    ignored = MODELOPT | {"ignore": [*MODELOPT["ignore"], "*mlp.experts*"]}
    assert problems(model.examine(write(tmp_path / "ignored", tensors, ignored), 1)) == []
    what, cure = fault(write(tmp_path / "promised", tensors, MODELOPT))
    assert "BF16 in the checkpoint, where its quantization_config promises NVFP4" in what and ".experts." in what
    assert cure == "if it is not quantized, the ignore list should name it"


def test_a_description_that_is_missing(tmp_path: Path) -> None:
    what, cure = fault(write(tmp_path, llama(modelopt)))
    assert "quantized (NVFP4), and neither config.json nor hf_quant_config.json says so" in what
    assert cure == "fetch the checkpoint again, with all its files"


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: None, "is no folder here"),
        (lambda folder: folder.mkdir(), "has no config.json"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")), "is no JSON"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("[]")), "holds no JSON object"),
    ],
    ids=["no-folder", "no-config", "broken-config", "a-list"],
)
def test_what_is_no_checkpoint_at_all(tmp_path: Path, prepare: Any, words: str) -> None:
    prepare(tmp_path / "model")
    with pytest.raises(CommandError, match=words):
        model.examine(tmp_path / "model", 1)


def test_a_link_to_nothing(tmp_path: Path) -> None:
    """As a cache leaves it whose files were removed: neither a weight nor the tokenizer may be lost in silence."""
    write(tmp_path, llama(weight))
    (tmp_path / "tokenizer.json").symlink_to("blobs/0123")
    with pytest.raises(CommandError, match=r"tokenizer\.json is a link to blobs/0123, which is gone: download"):
        model.examine(tmp_path, 1)


def test_mistrals_own_format(tmp_path: Path) -> None:
    """Beside Hugging Face's it is left out, and said; alone it is refused."""
    write(tmp_path, llama(weight))
    whole = model.examine(tmp_path, 1)
    write_file(tmp_path / "consolidated.safetensors", {"layers.0.attention.wq.weight": ("BF16", (8192, 8192))})
    (tmp_path / "params.json").write_text("{}")
    both = model.examine(tmp_path, 1)
    assert (both[0].rows, both[1].rows) == (whole[0].rows, whole[1].rows)
    assert any("are not read here, and vLLM serves them: name --config-format hf" in note for note in both[0].notes)
    (tmp_path / "model.safetensors").unlink()
    assert f"{tmp_path} is in Mistral's own format" in fault(tmp_path)[0]
    (tmp_path / "config.json").unlink()
    with pytest.raises(CommandError, match="is in Mistral's own format"):
        model.examine(tmp_path, 1)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (write(tmp_path, {}) / "model.safetensors").unlink()
    assert fault(tmp_path)[0] == f"{tmp_path} has no safetensors files"


# --- the command


def test_the_command_prints_both_tables_and_its_exit_status_tells(tmp_path: Path) -> None:
    folder = write(tmp_path, llama(modelopt), MODELOPT)
    result = CliRunner().invoke(app, ["doctor", str(folder), "--tp", "2"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "layers quantized" in result.output and "model.layers.*.mlp.down_proj" in result.output
    result = CliRunner().invoke(app, ["doctor", str(folder), "--tp", "2"], env={"COLUMNS": "40"})
    assert f"\n  vllm serve {folder} --tensor-parallel-size 2\n" in result.output, "a command can be copied"
    result = CliRunner().invoke(app, ["doctor", str(folder), "--tp", "3", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["serving"]["problems"][0]["cure"] == (
        "take a tensor-parallel size that divides them"
    )
    result = CliRunner().invoke(app, ["doctor", "Qwen/Qwen3-8B"])
    assert result.exit_code == 1
    assert "Qwen/Qwen3-8B is no folder here: download the model first" in result.output


@pytest.mark.parametrize(("linear", "config"), [(weight, None), (modelopt, MODELOPT)], ids=["16 bits", "NVFP4"])
def test_it_needs_neither_safetensors_nor_compressed_tensors(tmp_path: Path, linear: Any, config: Any) -> None:
    """The library's own dependencies name neither, and headers are read without them."""
    folder = write(tmp_path, llama(linear), config)
    program = f"""
import sys
sys.modules["safetensors"] = sys.modules["compressed_tensors"] = None  # importing them fails
from typer.testing import CliRunner
from llm_quant_rocm.cli._app import app
result = CliRunner().invoke(app, ["doctor", {str(folder)!r}])
assert result.exit_code == 0 and "How it can be served" in result.output, result.exception
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
