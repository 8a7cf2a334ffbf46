# SPDX-License-Identifier: Apache-2.0
"""Which method a checkpoint and a user's wish come to, by SGLang's own ModelConfig; no model is built."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvfp4_checkpoints
import pytest
import sglang
import torch
from conftest import DEMO
from safetensors.torch import load_file, save_file
from sglang.srt.configs import model_config
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.model_loader.weight_utils import get_quant_config
from sglang.srt.plugins.hook_registry import HookRegistry

from llm_quant_rocm.checkpoint.nvfp4_kinds import takeover
from llm_quant_rocm_sglang import nvfp4, ptpc_fp8, register
from llm_quant_rocm_sglang.nvfp4 import NvFp4Config
from llm_quant_rocm_sglang.ptpc_fp8 import PtpcFp8Config


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    register()
    HookRegistry.apply_hooks()


def method(checkpoint: Path, wish: str | None = None, overrides: str = "{}", **facts: bool) -> str | None:
    """The quantization that SGLang would serve the checkpoint with."""
    config = ModelConfig(
        model_path=str(checkpoint), quantization=wish, dtype="bfloat16", model_override_args=overrides, **facts
    )
    return config.quantization


@pytest.fixture(scope="module")
def checkpoints_by_kind(folder: Path, nvfp4_moe: nvfp4_checkpoints.Quantized) -> dict[str, Path]:
    """One of each layout, made of another project's codes."""
    return {
        "modelopt": nvfp4_moe.write_modelopt(folder / "modelopt"),
        "w4a16": nvfp4_moe.write_modelopt(folder / "w4a16", "W4A16_NVFP4"),
        "legacy": nvfp4_moe.write_modelopt(folder / "legacy", legacy=True),
        "mixed": nvfp4_moe.write_mixed(folder / "mixed"),
        "compressed-tensors": nvfp4_moe.write_compressed_tensors(folder / "compressed-tensors", activations=False),
    }


KINDS = ("modelopt", "w4a16", "legacy", "mixed", "compressed-tensors")


@pytest.mark.parametrize("wish", [None, "petit_nvfp4", "nvfp4_triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_is_taken_over(checkpoints_by_kind: dict[str, Path], kind: str, wish: str | None) -> None:
    assert method(checkpoints_by_kind[kind], wish) == nvfp4.NAME


def configuration(checkpoint: Path) -> NvFp4Config:
    """What SGLang's loader makes of the checkpoint."""
    model = ModelConfig(model_path=str(checkpoint), dtype="bfloat16")
    return get_quant_config(model, LoadConfig(), {})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("modelopt", "modelopt_fp4"),
        ("w4a16", "modelopt_fp4"),
        ("legacy", "modelopt_fp4"),
        ("mixed", "modelopt_mixed"),
        ("compressed-tensors", "compressed_tensors"),
    ],
)
def test_what_the_loader_makes_of_a_checkpoint(checkpoints_by_kind: dict[str, Path], kind: str, name: str) -> None:
    """Models of SGLang's, above all their draft models, ask for its name of the format."""
    found = configuration(checkpoints_by_kind[kind])
    assert isinstance(found, NvFp4Config)
    assert found.get_name() == name
    assert found.get_min_capability() <= 90, "gfx90a and Hopper, as SGLang counts"


def test_older_compressed_tensors_describe_it_under_another_key(
    checkpoints_by_kind: dict[str, Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(checkpoints_by_kind["compressed-tensors"], tmp_path / "older"))
    config = json.loads((model / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (model / "config.json").write_text(json.dumps(config))
    assert method(model) == nvfp4.NAME
    assert configuration(model).get_name() == "compressed_tensors"


@pytest.mark.parametrize("missing", ["kv_cache_scheme", "quantized_layers"])
def test_what_modelopt_says_of_a_mixed_checkpoint_elsewhere(
    missing: str, nvfp4_moe: nvfp4_checkpoints.Quantized, tmp_path: Path
) -> None:
    model = nvfp4_moe.write_mixed(tmp_path / "mixed")
    file = model / "config.json"
    config = json.loads(file.read_text())
    layers = config["quantization_config"]["quantized_layers"]
    del config["quantization_config"][missing]
    file.write_text(json.dumps(config))
    described = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "kv_cache_quant_algo": "FP8"}
    (model / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    found = configuration(model)
    assert found.kv_cache_quant_algo == "FP8"
    assert found.quantized_layers == layers


@pytest.mark.parametrize(("text", "what"), [("{", "is no JSON"), ("[]", "holds no JSON object")])
def test_a_broken_file_of_modelopts_is_named(
    text: str, what: str, nvfp4_moe: nvfp4_checkpoints.Quantized, tmp_path: Path
) -> None:
    model = nvfp4_moe.write_mixed(tmp_path / "mixed")
    (model / "hf_quant_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"hf_quant_config\.json {what}.*: download the checkpoint again"):
        method(model)


def test_what_config_json_says_of_a_mixed_checkpoint_comes_first(
    nvfp4_moe: nvfp4_checkpoints.Quantized, tmp_path: Path
) -> None:
    model = nvfp4_moe.write_mixed(tmp_path / "mixed")
    layers = json.loads((model / "config.json").read_text())["quantization_config"]["quantized_layers"]
    other = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "NVFP4"}}}
    (model / "hf_quant_config.json").write_text(json.dumps({"quantization": other}))
    assert configuration(model).quantized_layers == layers


@pytest.mark.parametrize("kind", KINDS)
def test_on_rocm_too(checkpoints_by_kind: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang refuses methods on ROCm that a list does not name."""
    monkeypatch.setattr(model_config, "is_hip", lambda: True)
    assert method(checkpoints_by_kind[kind]) == nvfp4.NAME
    assert method(DEMO, "ptpc_fp8") == "ptpc_fp8"
    assert PtpcFp8Config.get_min_capability() <= 90, "gfx90a, as SGLang counts"
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4", "0")
    if kind in ("modelopt", "legacy"):
        with pytest.raises(ValueError, match="not supported in ROCm"):
            method(checkpoints_by_kind[kind])


def test_another_wish_of_the_user_is_respected(
    checkpoints_by_kind: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("modelopt", "modelopt_mixed", "compressed-tensors"):
        line = takeover(kind, "SGLang")
        wish = re.search(r"--quantization (\S+) leaves it to SGLang$", line)[1]
        assert method(checkpoints_by_kind["mixed" if kind == "modelopt_mixed" else kind], wish) == wish
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4", "0")
    assert method(checkpoints_by_kind["modelopt"]) == "modelopt_fp4"
    monkeypatch.setattr(nvfp4, "_serves_this_device", lambda: False)
    monkeypatch.delenv("LLM_QUANT_ROCM_NVFP4")
    assert method(checkpoints_by_kind["modelopt"]) == "modelopt_fp4"


@pytest.mark.parametrize(
    ("platform", "capability", "is_ours"),
    [
        ("hip", (9, 0), True),
        ("hip", (9, 5), True),
        ("hip", (11, 0), False),
        ("cuda", (8, 0), False),
        ("cuda", (9, 0), True),
        ("cuda", (10, 0), False),
        ("cpu", None, True),
        ("xpu", None, False),
    ],
    ids=["MI250", "MI355X", "RDNA", "Ampere", "Hopper", "Blackwell", "CPU", "other"],
)
def test_on_which_devices(
    platform: str, capability: tuple[int, int] | None, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hip", "cuda"):
        monkeypatch.setattr(f"sglang.srt.utils.is_{name}", lambda name=name: platform == name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: platform != "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert nvfp4._serves_this_device() is is_ours


def test_unquantized_checkpoints(tmp_path: Path) -> None:
    assert method(DEMO) is None
    assert method(DEMO, "ptpc_fp8") == "ptpc_fp8"
    with pytest.raises(ValueError, match="^nvfp4_triton serves NVFP4 checkpoints .* this one is not quantized"):
        method(DEMO, "petit_nvfp4")


def test_what_an_earlier_server_wished_for_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang writes this variable once the checkpoint is known: what stands there before is another server's."""
    monkeypatch.setenv("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "1")
    assert method(DEMO, "ptpc_fp8") == "ptpc_fp8"


def test_a_checkpoint_may_ask_for_ptpc() -> None:
    """As --json-model-override-args makes it, for example."""
    wishes = {"quant_method": "ptpc_fp8", "ignored_layers": ["o_proj"]}
    overrides = json.dumps({"quantization_config": wishes})
    assert method(DEMO, None, overrides) == method(DEMO, "ptpc_fp8", overrides) == "ptpc_fp8"
    other: Any = SimpleNamespace(quantization="fp8", _parse_quant_hf_config=lambda: wishes)
    assert ptpc_fp8.chosen(other) is None, "what the user wishes comes first"
    config = PtpcFp8Config.from_config({**wishes, "packed_modules_mapping": {}, "hf_config": None})
    assert config.layers.ignored == ["o_proj"]
    with pytest.raises(ValueError, match="knows no setting scheme"):
        PtpcFp8Config.from_config({**wishes, "scheme": "tensor"})


def test_an_empty_description_is_none() -> None:
    """To us; without a flag SGLang refuses one."""
    assert method(DEMO, "ptpc_fp8", json.dumps({"quantization_config": {}})) == "ptpc_fp8"
    assert PtpcFp8Config.from_config({"packed_modules_mapping": {}, "hf_config": None}).layers.ignored == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ignore": ["o_proj"]}, "^ptpc_fp8 knows no setting ignore"),
        ({"ignored_layers": "o_proj"}, "^ignored_layers is 'o_proj': it must be a list"),
    ],
    ids=["key", "text"],
)
def test_wrong_settings_of_ptpc_are_refused_before_a_process_starts(wrong: dict[str, Any], words: str) -> None:
    overrides = json.dumps({"quantization_config": {"quant_method": "ptpc_fp8", **wrong}})
    with pytest.raises(ValueError, match=words):
        method(DEMO, None, overrides)


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
def test_a_quantized_checkpoint_is_not_quantized_again(checkpoints_by_kind: dict[str, Path], kind: str) -> None:
    with pytest.raises(ValueError, match="already quantized .*: serve it without --quantization ptpc_fp8"):
        method(checkpoints_by_kind[kind], "ptpc_fp8")


def test_a_draft_of_another_kind_than_its_target(checkpoints_by_kind: dict[str, Path]) -> None:
    """SGLang asks of a draft model what it asks of the target, and takes the draft's own method where it has one."""
    fp8 = json.dumps({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}})
    assert method(DEMO, "ptpc_fp8", is_draft_model=True) == "ptpc_fp8"
    for wish in ("ptpc_fp8", "nvfp4_triton", "petit_nvfp4"):
        assert method(DEMO, wish, fp8, is_draft_model=True) == "fp8"
        for kind in ("modelopt", "compressed-tensors"):
            assert method(checkpoints_by_kind[kind], wish, is_draft_model=True) == nvfp4.NAME
    assert method(DEMO, "nvfp4_triton", is_draft_model=True) is None


@pytest.mark.skipif(sglang.__version__.startswith("0.5.17"), reason="it does not say whose wish it is")
def test_what_the_user_wishes_of_a_draft(checkpoints_by_kind: dict[str, Path]) -> None:
    wished = {"is_draft_model": True, "is_draft_quantization_explicit": True}
    with pytest.raises(ValueError, match="already quantized"):
        method(checkpoints_by_kind["modelopt"], "ptpc_fp8", **wished)
    with pytest.raises(ValueError, match="this one is not quantized"):
        method(DEMO, "nvfp4_triton", **wished)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_algo": "NVFP4_SVD"}, "quant_algo NVFP4_SVD is not known: nvfp4_triton serves"),
        ({"group_size": 32}, "has group_size 32, and NVFP4 has blocks of 16"),
        ({"activations": "nvfp5"}, "is 16bit or nvfp4, not 'nvfp5'"),
    ],
    ids=["algorithm", "group size", "option"],
)
def test_a_wrong_configuration_is_refused_before_a_process_starts(
    nvfp4_moe: nvfp4_checkpoints.Quantized, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = nvfp4_moe.write_modelopt(tmp_path / "wrong") / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        method(file.parent)


def test_a_wrong_codec_is_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_QUICK_REDUCE_QUANTIZATION", "INT5")
    with pytest.raises(ValueError, match="^ROCM_QUICK_REDUCE_QUANTIZATION=INT5: it must be one of FP, "):
        method(DEMO)


def test_a_truncated_file_of_bf16_is_refused(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(DEMO, tmp_path / "cut"))
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="is truncated: it has"):
        method(copy, "ptpc_fp8")


def test_a_truncated_file_is_refused_before_the_model_is_built(
    nvfp4_moe: nvfp4_checkpoints.Quantized, tmp_path: Path
) -> None:
    file = nvfp4_moe.write_modelopt(tmp_path / "cut") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="is truncated: it has"):
        method(file.parent)


def test_a_scale_of_awq_is_refused(nvfp4_moe: nvfp4_checkpoints.Quantized, tmp_path: Path) -> None:
    """SGLang's models pass over names that they do not know."""
    model = nvfp4_moe.write_modelopt(tmp_path / "awq")
    name = "model.layers.0.self_attn.o_proj.pre_quant_scale"
    save_file({name: torch.ones(64)}, model / "scales.safetensors")
    with pytest.raises(ValueError, match=f"^{name} is in the checkpoint, AWQ's scale .*: export the model without AWQ"):
        method(model)


@pytest.mark.parametrize("is_indexed", [False, True], ids=["one file", "indexed"])
@pytest.mark.parametrize("scale", [0.5, 0.25], ids=["one scale", "two scales"])
@pytest.mark.parametrize("scalar", ["weight_scale_2", "weight_scale"], ids=["NVFP4", "FP8"])
def test_a_scale_that_sglang_would_lose(
    scalar: str, scale: float, is_indexed: bool, nvfp4_moe: nvfp4_checkpoints.Quantized, tmp_path: Path
) -> None:
    """SGLang makes one layer of these two, and gives it the scalars of q_a_proj. Scales of blocks it keeps."""
    model = nvfp4_moe.write_modelopt(tmp_path / "latent")
    latent = f"model.layers.{scalar == 'weight_scale':d}.self_attn.{{}}.{scalar}"
    scales: dict[str, Any] = {latent.format("q_a_proj"): 0.5, latent.format("kv_a_proj_with_mqa"): scale}
    scales["model.layers.2.self_attn.q_a_proj.weight_scale"] = [[1.0, 2.0]]
    save_file({name: torch.tensor(value) for name, value in scales.items()}, model / "scales.safetensors")
    if is_indexed:
        files = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
        index = {"weight_map": files | dict.fromkeys(scales, "scales.safetensors")}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    words = f"kv_a_proj_with_mqa.{scalar} is 0.25 and .*q_a_proj.{scalar} is 0.5, and SGLang takes the second"
    with pytest.raises(ValueError, match=words) if scale != 0.5 else nullcontext():
        assert method(model) == nvfp4.NAME


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32, "ignore": []}, "has group_size 32"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD", "ignore": []}, "quant_algo NVFP4_SVD is not known"),
        ({"quant_method": "fp8"}, "serves no checkpoint with the quantization_config fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": []}, r"cannot be understood \(TypeError"),
    ],
    ids=["group size", "algorithm", "method", "nonsense"],
)
def test_broken_configurations(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NvFp4Config.from_config(config)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_weights_alone_in_nvfp4(nested: bool) -> None:
    """SGLang 0.5.17 knows no W4A16_NVFP4."""
    settings = {"quant_algo": "W4A16_NVFP4", "group_size": 16, "exclude_modules" if nested else "ignore": ["lm_head"]}
    config = NvFp4Config.from_config({"quantization": settings} if nested else {"quant_method": "modelopt", **settings})
    assert config.algorithm(torch.nn.Module(), "model.layers.0.mlp.down_proj") == "NVFP4"
    assert config.algorithm(torch.nn.Module(), "lm_head") is None
    assert not getattr(config, "is_w4a16", False), "SGLang reads NVFP4 instead, whether it knows the other name or not"


def test_the_layers_of_a_mixture_of_formats() -> None:
    """FP8 attention is SGLang's own; a part of the model that an ignore list names is not all below it."""
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    fp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    groups = {
        "group_0": {"format": "float-quantized", "targets": [r"re:.*self_attn\.[qkvo]_proj$"], "weights": fp8},
        "group_1": {"format": "nvfp4-pack-quantized", "targets": [r"re:.*experts\.\d+\.\w+_proj$"], "weights": fp4},
    }
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    experts = "model.layers.0.mlp.experts"
    config = NvFp4Config.from_config({**settings, "ignore": [f"{experts}.0", "model.layers.0.mlp.gate"]})
    layer, linear = object.__new__(FusedMoE), torch.nn.Linear(1, 1)
    assert config.algorithm(layer, experts) == "W4A16_NVFP4"
    assert config.algorithm(linear, "model.layers.0.self_attn.qkv_proj") is None
    assert config.algorithm(linear, "model.layers.0.mlp.gate") is None


def test_a_fused_layer_of_two_kinds_is_refused() -> None:
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*q_proj"]}
    config = NvFp4Config.from_config({**settings, "packed_modules_mapping": {}})
    with pytest.raises(ValueError, match=r"keeps model\.attn\.q_proj in 16 bits, but not all of"):
        config.is_layer_excluded("model.attn.qkv_proj")
    assert not config.is_layer_excluded("model.mlp.gate_up_proj")


@pytest.mark.parametrize("leaf", ["fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"])
def test_a_projection_of_one_layer_is_not_that_of_all(leaf: str) -> None:
    """SGLang looks for MLA's projections in the names of fused layers."""
    names = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")
    ignore = [f"model.layers.61.self_attn.{name}" for name in names]
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "packed_modules_mapping": {}}
    config = NvFp4Config.from_config({**settings, "ignore": ignore})
    assert config.is_layer_excluded(f"model.layers.61.self_attn.{leaf}")
    assert config.is_layer_excluded(f"language_model.model.layers.61.self_attn.{leaf}")
    assert not config.is_layer_excluded(f"model.layers.6.self_attn.{leaf}")
    everywhere = NvFp4Config.from_config({**settings, "ignore": [f"*.{name}" for name in names]})
    assert everywhere.is_layer_excluded(f"model.layers.6.self_attn.{leaf}")
