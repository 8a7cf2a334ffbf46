# SPDX-License-Identifier: Apache-2.0
"""Which NVFP4 checkpoints are taken over, where, and what switches it off; without an engine."""

import json
import re
import struct
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvfp4_checkpoints
import pytest
import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

from llm_quant_rocm.checkpoint.files import refuse_broken_files, refuse_scales_of_inputs
from llm_quant_rocm.checkpoint.layer_names import shard_name, shard_numbers
from llm_quant_rocm.checkpoint.nvfp4_kinds import Options, checkpoint_kind
from llm_quant_rocm.checkpoint.nvfp4_tensors import refuse_ragged
from llm_quant_rocm_vllm import nvfp4
from llm_quant_rocm_vllm.nvfp4 import NvFp4Config
from llm_quant_rocm_vllm.nvfp4_linear import NvFp4LinearMethod

FLAT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
LEGACY = {
    "producer": {"name": "modelopt"},
    "quantization": {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    },
}
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head"],
}


def mixed(**layers: str) -> dict[str, Any]:
    recipes = {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": recipes}


def rotated(*locations: str) -> dict[str, Any]:
    """A transform as SpinQuant describes it."""
    places = [{"targets": ["re:.*down_proj$"], "location": location} for location in locations]
    return {"transform_config": {"config_groups": {"R": {"type": "hadamard", "apply": places}}}}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (FLAT, "modelopt"),
        (FLAT | {"quant_algo": "w4a16_nvfp4"}, "modelopt"),
        (LEGACY, "modelopt"),
        (LEGACY | {"quant_method": "modelopt_fp4"}, "modelopt"),
        ({"quantization": {"quant_algo": "NVFP4"}}, "modelopt"),
        (FLAT | {"quant_algo": "NVFP4_AWQ"}, "modelopt"),  # from_config refuses it by name
        (mixed(a="FP8", b="NVFP4"), "modelopt_mixed"),
        (mixed(a="FP8"), None),
        (FLAT | {"quant_algo": "FP8"}, None),
        (FLAT | {"quant_algo": "MXFP8"}, None),
        (COMPRESSED, "compressed-tensors"),
        (COMPRESSED | {"format": "mixed-precision"}, None),
        (
            COMPRESSED
            | {"format": "mixed-precision", "config_groups": {"g": {"format": "nvfp4-pack-quantized", "targets": []}}},
            "compressed-tensors",
        ),
        (COMPRESSED | {"format": "pack-quantized"}, None),
        (COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, None),
        (COMPRESSED | rotated("weight_output", "weight_input"), "compressed-tensors"),  # R1 and R2: the weights hold it
        (COMPRESSED | rotated("input", "weight_input"), None),  # R4
        (COMPRESSED | rotated("q_attn", "k_cache"), None),  # R3
        ({"quant_method": "gptq", "bits": 4}, None),
        ({"quant_method": "mxfp4"}, None),
        ({}, None),
    ],
)
def test_kinds_of_checkpoints(config: dict[str, Any], kind: str | None) -> None:
    assert checkpoint_kind(config) == kind
    assert NvFp4Config.override_quantization_method(config, None) == (kind and "nvfp4_triton")


@pytest.mark.parametrize(
    ("cache", "kept"),
    [
        ({"kv_cache_scheme": "NVFP4"}, False),  # ModelOpt 0.47
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float", "group_size": 16}}, False),
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}}, False),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, True),
        ({"kv_cache_quant_algo": "FP8"}, True),
    ],
)
@pytest.mark.parametrize("nvidia", [False, True])
def test_a_cache_that_is_not_here_is_kept_in_16_bits(
    cache: dict[str, Any], kept: bool, nvidia: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what ModelOpt's NVFP4_KV_CFG writes; a cache that the user chooses is vLLM's affair."""
    if nvidia:
        fake = SimpleNamespace(
            is_cpu=lambda: False, is_rocm=lambda: False, is_cuda=lambda: True,
            get_device_capability=lambda: DeviceCapability(9, 0),
        )  # fmt: skip
        monkeypatch.setattr("vllm.platforms.current_platform", fake)
    of_model = SimpleNamespace(quantization_config=FLAT | deepcopy(cache))
    config = FLAT | deepcopy(cache)
    assert NvFp4Config.override_quantization_method(config, None, of_model) == "nvfp4_triton"
    wanted = get_kv_cache_quant_algo_string(FLAT | cache)
    assert wanted == ("fp8_e4m3" if kept else "nvfp4")
    for described in (config, of_model.quantization_config):
        assert get_kv_cache_quant_algo_string(described) == (wanted if kept or nvidia else None)
    said = [record.message for record in caplog.records if "KV cache in NVFP4" in record.message]
    assert len(said) == (not kept and not nvidia)


@pytest.mark.parametrize("user", ["modelopt_fp4", "modelopt_mixed", "compressed-tensors", "fp8", "ptpc_fp8"])
def test_another_method_that_the_user_names_is_left_alone(user: str) -> None:
    assert NvFp4Config.override_quantization_method(FLAT, user) is None


@pytest.mark.parametrize("user", [None, "modelopt", "nvfp4_triton", "petit_nvfp4"])
def test_names_under_which_we_serve(user: str | None) -> None:
    assert NvFp4Config.override_quantization_method(FLAT, user) == "nvfp4_triton"


def test_our_name_on_another_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match=r"this one's quantization_config is gptq: serve"):
        NvFp4Config.override_quantization_method({"quant_method": "gptq"}, "petit_nvfp4")
    with pytest.raises(ValueError, match="this one is not quantized"):
        NvFp4Config()


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4", "0")
    assert NvFp4Config.override_quantization_method(FLAT, None) is None
    assert NvFp4Config.override_quantization_method(FLAT, "nvfp4_triton") == "nvfp4_triton"
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4", "off")
    with pytest.raises(ValueError, match="LLM_QUANT_ROCM_NVFP4 is 0 or 1, not 'off'"):
        NvFp4Config.override_quantization_method(FLAT, None)


@pytest.mark.parametrize(
    ("platform", "capability", "served"),
    [
        ("rocm", (9, 0), True),
        ("rocm", (9, 4), True),
        ("rocm", (9, 5), True),  # gfx950 multiplies MXFP4, not NVFP4
        ("rocm", (11, 0), False),
        ("cuda", (7, 5), False),
        ("cuda", (8, 0), False),  # no kernel of ours, and vLLM has one
        ("cuda", (9, 0), True),
        ("cuda", (10, 0), False),
        ("cuda", (12, 0), False),
        ("cuda", None, False),
        ("xpu", (9, 0), False),
    ],
)
def test_devices(
    platform: str, capability: tuple[int, int] | None, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(
        is_cpu=lambda: False,
        is_rocm=lambda: platform == "rocm",
        is_cuda=lambda: platform == "cuda",
        get_device_capability=lambda: capability and DeviceCapability(*capability),
    )
    monkeypatch.setattr("vllm.platforms.current_platform", fake)
    expected = "nvfp4_triton" if served else None
    assert NvFp4Config.override_quantization_method(FLAT, None) == expected
    assert NvFp4Config.override_quantization_method(FLAT, "nvfp4_triton") == "nvfp4_triton"


@pytest.mark.parametrize(
    ("user", "switch", "method"),
    [
        (None, "1", "nvfp4_triton"),
        ("petit_nvfp4", "1", "nvfp4_triton"),
        (None, "0", "modelopt_fp4"),
        ("modelopt_fp4", "1", "modelopt_fp4"),
    ],
)
def test_what_vllm_makes_of_it(
    user: str | None, switch: str, method: str, nvfp4_modelopt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4", switch)
    arguments = EngineArgs(model=str(nvfp4_modelopt), quantization=user)
    assert arguments.create_model_config().quantization == method


@pytest.mark.parametrize("kind", ["modelopt", "modelopt_mixed", "compressed-tensors"])
def test_the_log_says_what_leaves_a_checkpoint_to_vllm(
    kind: str, tmp_path: Path, nvfp4_dense: nvfp4_checkpoints.Quantized, caplog: pytest.LogCaptureFixture
) -> None:
    write = {
        "modelopt": nvfp4_dense.write_modelopt,
        "modelopt_mixed": nvfp4_dense.write_mixed,
        "compressed-tensors": partial(nvfp4_dense.write_compressed_tensors, activations=False),
    }
    model = str(write[kind](tmp_path / kind))
    nvfp4.log_takeover.cache_clear()
    with caplog.at_level("INFO"):
        EngineArgs(model=model).create_model_config()
    line = re.search(r"NVFP4 checkpoint \((\S+)\): .* or --quantization (\S+) leaves it to vLLM", caplog.text)
    assert line[1] == kind
    assert EngineArgs(model=model, quantization=line[2]).create_model_config().quantization == line[2]


def test_layers_that_an_older_modelopt_describes_elsewhere(
    tmp_path: Path, nvfp4_dense: nvfp4_checkpoints.Quantized
) -> None:
    model = nvfp4_dense.write_mixed(tmp_path / "mixed")
    file = model / "config.json"
    config = json.loads(file.read_text())
    layers = config["quantization_config"].pop("quantized_layers")
    file.write_text(json.dumps(config))
    described = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (model / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, **described}))
    model_config = EngineArgs(model=str(model)).create_model_config()
    assert model_config.quantization == "nvfp4_triton"
    result = NvFp4Config.from_config(model_config.hf_config.quantization_config)
    assert result.algorithm(None, "model.layers.0.self_attn.o_proj") == "FP8"
    assert result.algorithm(None, "model.layers.0.mlp.down_proj") == "W4A16_NVFP4"
    (model / "hf_quant_config.json").unlink()
    assert EngineArgs(model=str(model)).create_model_config().quantization == "modelopt_mixed"


def test_older_compressed_tensors_describe_it_under_another_key(
    tmp_path: Path, nvfp4_dense: nvfp4_checkpoints.Quantized
) -> None:
    model = nvfp4_dense.write_compressed_tensors(tmp_path / "older", activations=False)
    file = model / "config.json"
    config = json.loads(file.read_text())
    config["compression_config"] = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    assert EngineArgs(model=str(model)).create_model_config().quantization == "nvfp4_triton"
    with pytest.raises(ValueError, match=r"already quantized \(compressed-tensors\)"):
        EngineArgs(model=str(model), quantization="ptpc_fp8").create_model_config()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            FLAT | {"quant_algo": "NVFP4_AWQ"},
            "quant_algo NVFP4_AWQ is not known: nvfp4_triton serves NVFP4, W4A16_NVFP4",
        ),
        (FLAT | {"group_size": 32}, "NVFP4 has group_size 32"),
        (mixed(a="FP8", b="NVFP4_SVD"), "quant_algo NVFP4_SVD of b is not known"),
        (
            {**mixed(a="FP8"), "quantized_layers": {"model.b": {"quant_algo": "NVFP4", "group_size": 8}}},
            "model.b has group_size 8",
        ),
        (
            COMPRESSED | {"config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS | {"group_size": 32}}}},
            r"g \(Linear\) has group_size 32",
        ),
        (
            mixed(**{"a": "FP8", "backbone.embeddings": "W4A16_NVFP4"}),
            "backbone.embeddings is in W4A16_NVFP4, and engines read embeddings in 16 bits: export",
        ),
        (
            mixed(**{"a": "NVFP4", "model.embed_tokens": "FP8"}),
            "model.embed_tokens is in FP8, and engines read embeddings in 16 bits: export",
        ),
        (FLAT | {"activations": "fp8"}, "ACTIVATIONS .* is 16bit or nvfp4, not 'fp8'"),
        ({"quant_method": "gptq"}, "serves no checkpoint"),
        (
            COMPRESSED | {"config_groups": {"group_0": {}}},
            r"cannot be understood \(KeyError\('targets'\)\): download the",
        ),
    ],
)
def test_configurations_that_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NvFp4Config.from_config(config)


@pytest.mark.parametrize(
    "name", ["embed_vision.embedding_projection", "lm_head", "vision.patch_embedding", "embed_tokens_proj.fc"]
)
def test_layers_that_are_no_tables_of_tokens(name: str) -> None:
    assert NvFp4Config.from_config(mixed(**{f"model.{name}": "NVFP4"})).options == Options()


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NvFp4Config.from_config(FLAT).options == Options("16bit", "exact")
    assert NvFp4Config.from_config(COMPRESSED | {"prefill": "fp8"}).options == Options("16bit", "fp8")
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4_ACTIVATIONS", "nvfp4")
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4_PREFILL", "exact")
    assert NvFp4Config.from_config(FLAT | {"prefill": "fp8"}).options == Options("nvfp4", "exact")


@pytest.mark.parametrize(
    ("ignore", "algorithm"),
    [
        ([], "W4A16_NVFP4"),
        (["lm_head"], None),
        (["re:.*lm_head"], None),
        (["output"], None),
        (["other"], "W4A16_NVFP4"),
    ],
)
def test_an_output_head_is_a_linear_to_compressed_tensors(ignore: list[str], algorithm: str | None) -> None:
    head = ParallelLMHead.__new__(ParallelLMHead)  # enough of one to be recognized
    assert NvFp4Config.from_config({**COMPRESSED, "ignore": ignore}).algorithm(head, "lm_head") == algorithm
    # Who keeps it may not call it as vLLM does.
    kept = NvFp4Config.from_config({**COMPRESSED, "ignore": ["lm_head"]})
    assert kept.algorithm(head, "language_model.lm_head") is None


@pytest.mark.parametrize("config", [FLAT, LEGACY, COMPRESSED, mixed(lm_head="NVFP4") | {"ignore": ["lm_head"]}])
@pytest.mark.parametrize("keeps", [True, False])
def test_an_output_head_that_its_model_gives_no_name(config: dict[str, Any], keeps: bool) -> None:
    """As AFMoE, K-EXAONE and Qwen3-Omni do."""
    if not keeps:
        settings = config.get("quantization", config)
        settings = {**settings, "ignore": [], "exclude_modules": []}
        config = {"quantization": settings} if "quantization" in config else settings
    head: Any = ParallelLMHead.__new__(ParallelLMHead)
    with set_current_vllm_config(VllmConfig()):
        served = NvFp4Config.from_config(config).get_quant_method(head, "")
    assert isinstance(served, NvFp4LinearMethod) is not keeps
    assert keeps or served.prefix == "lm_head"  # what messages call it


@pytest.mark.parametrize(
    ("config", "name", "keeps"),
    [
        (mixed(lm_head="NVFP4") | {"ignore": []}, "lm_head", False),
        (COMPRESSED | {"ignore": ["lm_head", "model.layers.0.mlp.down_proj"]}, "model.layers.0.mlp.down_proj", True),
    ],
)
def test_layers_of_a_draft_model(config: dict[str, Any], name: str, keeps: bool) -> None:
    """vLLM puts a name before theirs (--speculative-config), and checkpoints do not."""
    kind = ParallelLMHead if name == "lm_head" else RowParallelLinear
    layer: Any = kind.__new__(kind)
    with set_current_vllm_config(VllmConfig()):
        method = NvFp4Config.from_config(config).get_quant_method(layer, f"draft_model.{name}")
    assert isinstance(method, NvFp4LinearMethod) is not keeps
    assert keeps or method.prefix == name


@pytest.mark.parametrize("name", ["model.layers.2.head", "model.layers.2.shared_head.head"])
def test_the_head_of_a_layer_that_predicts_further_tokens(name: str) -> None:
    """vLLM's DeepSeek and GLM call theirs by the first of these names, checkpoints by the second."""
    head: Any = ParallelLMHead.__new__(ParallelLMHead)
    with set_current_vllm_config(VllmConfig()):
        kept = NvFp4Config.from_config({**FLAT, "ignore": ["*.shared_head.head"]}).get_quant_method(head, name)
        served = NvFp4Config.from_config(FLAT).get_quant_method(head, name)
    assert not isinstance(kept, NvFp4LinearMethod)
    assert isinstance(served, NvFp4LinearMethod) and served.prefix == "model.layers.2.shared_head.head"


@pytest.mark.parametrize(("ignore", "algorithm"), [([], "W4A16_NVFP4"), (["re:.*down_proj"], None)])
def test_the_projections_of_experts_are_quantized_alike_or_left_to_vllm(
    ignore: list[str], algorithm: str | None
) -> None:
    experts: Any = RoutedExperts.__new__(RoutedExperts)
    names = {f"ckpt_{name}_proj_name": f"{name}_proj" for name in ("gate", "up", "down")}
    vars(experts).update(names)
    config = NvFp4Config.from_config({**COMPRESSED, "ignore": ignore})
    assert config.algorithm(experts, "model.layers.0.mlp.experts") == algorithm


@pytest.mark.parametrize(
    ("listed", "algorithm"),
    [
        ("mlp.experts.0.up_proj", "NVFP4"),
        ("mlp.experts", "NVFP4"),  # as transformers calls all of them
        ("mlp.up_proj", "NVFP4"),  # Step-3.5's, by the name of their block
        ("mlp.shared_experts.up_proj", None),
    ],
)
def test_experts_that_a_mixed_checkpoint_does_not_list_stay(listed: str, algorithm: str | None) -> None:
    """vLLM takes for them what is beside them, such as a shared expert."""
    experts: Any = RoutedExperts.__new__(RoutedExperts)
    recipes = {f"model.layers.1.{listed}": "NVFP4", "model.layers.1.mlp.shared_experts.up_proj": "NVFP4"}
    config = NvFp4Config.from_config(mixed(**recipes))
    assert config.algorithm(experts, "model.layers.1.mlp.experts") == algorithm
    assert config.algorithm(experts, "model.layers.11.mlp.experts") is None
    if algorithm is None:
        assert config.get_quant_method(experts, "model.layers.1.mlp.experts") is None


@pytest.mark.parametrize(
    ("prefix", "algorithm"),
    [
        ("model.layers.0.mlp.down_proj", "NVFP4"),
        ("vision_tower.encoder.layers.0.mlp.fc1", None),
        ("model.vision_model.layers.0.mlp.fc1", None),
        ("vit_large_projector.fc", None),
    ],
)
def test_parts_that_older_modelopts_do_not_list(prefix: str, algorithm: str | None) -> None:
    assert NvFp4Config.from_config(FLAT).algorithm(LinearBase.__new__(LinearBase), prefix) == algorithm


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (FLAT, "modelopt_fp4"),
        (LEGACY, "modelopt_fp4"),
        (mixed(a="NVFP4"), "modelopt_mixed"),
        (COMPRESSED, "compressed-tensors"),
    ],
)
def test_models_see_the_format(config: dict[str, Any], name: str) -> None:
    result = NvFp4Config.from_config(config)
    assert result.get_name() == name
    assert result.get_supported_act_dtypes() == [torch.bfloat16, torch.float16]
    assert result.get_min_capability() == 80


def test_layers_that_cannot_be_blocks() -> None:
    refuse_ragged("layer", 48, 96)
    with pytest.raises(ValueError, match=r"^layer has 168 of 336 input features on each of 2 ranks.*smaller --tensor"):
        refuse_ragged("layer", 168, 336)
    with pytest.raises(ValueError, match=r"^layer has 344 input features, no multiple of 16.*ignore list"):
        refuse_ragged("layer", 344, 344)


def test_names_of_shards() -> None:
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert shard_name("model.attn.qkv_proj", 1, fused) == "model.attn.k_proj"
    assert shard_name("lm_head", 0, fused) == "lm_head"
    assert shard_numbers("v", 3) == [2]
    assert shard_numbers(None, 2) == [0, 1]
    assert shard_numbers((1, 2), 4) == [1, 2]


def test_a_truncated_file_names_the_tensor_that_is_cut_off(tmp_path: Path) -> None:
    refuse_broken_files(tmp_path / "absent")
    file = tmp_path / "model-00001-of-00001.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.zeros(100)}, file)
    refuse_broken_files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(
        ValueError, match=rf"{file.name} is truncated: it has \d+ of \d+ bytes, and b is the first of 1"
    ):
        refuse_broken_files(tmp_path)
    file.write_bytes(whole[:20])
    with pytest.raises(ValueError, match="is truncated in its header, after 20 bytes"):
        refuse_broken_files(tmp_path)
    file.write_bytes(struct.pack("<Q", 8) + b"no JSON!")
    with pytest.raises(ValueError, match=rf"{file.name} is broken, its header is no JSON"):
        refuse_broken_files(tmp_path)
    file.write_bytes(struct.pack("<Q", 8)[:4])
    with pytest.raises(ValueError, match="is truncated in its header, after 4 bytes"):
        refuse_broken_files(tmp_path)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_file_that_is_gone_behind_a_link_is_named_as_that(tmp_path: Path, indexed: bool) -> None:
    """As in a download's cache; no index has named it where there is none."""
    (tmp_path / "2.safetensors").symlink_to("../blobs/0123")
    with pytest.raises(ValueError, match=r"2.safetensors is a link"):
        refuse_broken_files(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "1.safetensors")
    if indexed:
        weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"2.safetensors is a link to ../blobs/0123, which is gone: download"):
        refuse_broken_files(tmp_path)


def test_files_are_those_of_the_index(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    refuse_broken_files(tmp_path)  # the weights are elsewhere, or not wanted
    (tmp_path / "consolidated.safetensors").write_bytes(b"")  # the same weights once more, half downloaded
    save_file({"a": torch.zeros(1)}, tmp_path / "1.safetensors")
    with pytest.raises(ValueError, match=r"2.safetensors is missing, but model.safetensors.index.json names it: down"):
        refuse_broken_files(tmp_path)
    save_file({"b": torch.zeros(1)}, tmp_path / "2.safetensors")
    refuse_broken_files(tmp_path)
    (tmp_path / "2.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"2.safetensors is truncated"):
        refuse_broken_files(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="index.json has no weight_map: download it again"):
        refuse_broken_files(tmp_path)


@pytest.mark.parametrize("is_indexed", [False, True], ids=["one file", "indexed"])
def test_a_scale_of_awq_is_refused(is_indexed: bool, tmp_path: Path) -> None:
    """vLLM would end in an AttributeError."""
    refuse_scales_of_inputs(tmp_path / "absent")
    name, file = "model.layers.1.self_attn.k_proj.pre_quant_scale", tmp_path / "model.safetensors"
    save_file({"model.layers.1.self_attn.k_proj.weight": torch.zeros(1)}, file)
    refuse_scales_of_inputs(tmp_path)
    save_file({name: torch.ones(16)}, file)
    if is_indexed:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: file.name}}))
    config = NvFp4Config.from_config(dict(FLAT))
    with pytest.raises(ValueError, match=f"^{name} is in the checkpoint, AWQ's scale .*: export the model without AWQ"):
        config.maybe_update_config(str(tmp_path))
