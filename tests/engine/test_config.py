# SPDX-License-Identifier: Apache-2.0
"""The plugin's registration and configuration, without an engine."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import vllm
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.models.utils import WeightsMapper

import llm_quant_rocm_vllm
from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.online import quantize_weight, refusing_other_dtypes
from llm_quant_rocm.checkpoint.online_layers import is_embedding, is_head, is_router
from llm_quant_rocm.formats import fp8
from llm_quant_rocm_vllm.nvfp4 import NvFp4Config
from llm_quant_rocm_vllm.ptpc_fp8 import PtpcFp8Config

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """caplog for the library's logger, whether or not vLLM's, below which the plugin hangs it, passes records on."""
    logger = logging.getLogger("llm_quant_rocm")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_registration_can_be_repeated() -> None:
    llm_quant_rocm_vllm.register()
    llm_quant_rocm_vllm.register()
    for name, config in (("ptpc_fp8", PtpcFp8Config), ("nvfp4_triton", NvFp4Config), ("petit_nvfp4", NvFp4Config)):
        assert QUANTIZATION_METHODS.count(name) == 1
        assert get_quantization_config(name) is config


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0", "dev"])
def test_another_vllm_gets_one_warning_and_the_method(
    version: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr("vllm.model_executor.layers.quantization.QUANTIZATION_METHODS", methods := [])
    llm_quant_rocm_vllm.register()
    llm_quant_rocm_vllm.register()
    assert len(log.records) == 1
    assert f"this is vLLM {version}" in log.text
    assert "0.26" in log.text
    assert "0.34" in log.text
    assert methods == ["ptpc_fp8", "nvfp4_triton", "petit_nvfp4"]


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1rc1.dev3+g0abc"])
def test_a_supported_vllm_gets_no_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    llm_quant_rocm_vllm.register()
    assert not log.records


def test_configuration_from_every_source(tmp_path: Path) -> None:
    settings = {"quant_method": "ptpc_fp8", "ignored_layers": ["o_proj"]}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings))
    for config in (
        PtpcFp8Config(["o_proj"]),
        PtpcFp8Config.from_config(settings),
        PtpcFp8Config.from_config_dict_json(json.dumps(settings)),
        PtpcFp8Config.from_config_file(str(file)),
    ):
        assert config.layers.ignored == ["o_proj"]
    assert PtpcFp8Config().layers.ignored == []
    assert PtpcFp8Config().get_supported_act_dtypes() == [torch.bfloat16, torch.float16]
    assert PtpcFp8Config().get_min_capability() == 90


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="knows no setting activation_scheme"):
        PtpcFp8Config.from_config({"quant_method": "ptpc_fp8", "activation_scheme": "static"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"ignored_layers": "o_proj"}', "^ignored_layers is 'o_proj': it must be a list"),
        ('{"ignored_layers": [5]}', r"^ignored_layers is \[5\]: it must be a list"),
        ('{"ignored_layers": [""]}', r"^ignored_layers is \[''\]: it must be a list"),
        ('{"ignored_layers": ["re:["]}', r"^'re:\[' in ignored_layers is no regular expression \("),
        ('["o_proj"]', r"^ptpc_fp8's configuration is \['o_proj'\]: it must be a JSON object"),
        ('{"ignored_layers": ', "^ptpc_fp8's configuration .* is no JSON "),
    ],
    ids=["text", "number", "empty", "expression", "list", "cut off"],
)
def test_wrong_settings_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PtpcFp8Config.from_config_dict_json(text)


def test_names_become_vllms_and_expressions_stay() -> None:
    config = PtpcFp8Config(["re:.*o_proj", "model.layers.0", "lm_head"])
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert config.layers.ignored == ["language_model.model.layers.0", "lm_head", "re:.*o_proj"]


def test_a_quantized_checkpoint_is_refused_and_others_are_left_to_vllm() -> None:
    with pytest.raises(ValueError, match=r"already quantized \(gptq\).*without --quantization ptpc_fp8"):
        PtpcFp8Config.override_quantization_method({"quant_method": "gptq"}, "ptpc_fp8")
    with pytest.raises(ValueError, match="already quantized"):
        PtpcFp8Config.from_config({"quant_method": "gptq"})
    with pytest.raises(ValueError, match=r"already quantized \(its quantization_config names no quant_method\)"):
        PtpcFp8Config.override_quantization_method({"ignored_layers": ["o_proj"]}, "ptpc_fp8")
    assert PtpcFp8Config.override_quantization_method({"quant_method": "gptq"}, None) is None
    assert PtpcFp8Config.override_quantization_method({"quant_method": "ptpc_fp8"}, "ptpc_fp8") is None


def test_an_empty_description_is_none() -> None:
    """To vLLM, which adds the method."""
    assert PtpcFp8Config.override_quantization_method({"quant_method": ""}, "ptpc_fp8") == "ptpc_fp8"
    assert PtpcFp8Config.override_quantization_method({"quant_method": ""}, None) is None
    assert PtpcFp8Config.from_config({"quant_method": ""}).layers.ignored == []


def test_vllms_own_settings_of_online_quantization_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would change nothing, in silence."""
    config = PtpcFp8Config()
    config.maybe_update_config("absent")
    monkeypatch.setattr(config, "online_quantization_config", object(), raising=False)
    with pytest.raises(ValueError, match="cannot be combined with --quantization-config"):
        config.maybe_update_config("absent")


@pytest.mark.parametrize(
    ("entries", "ignored"),
    [
        (["model.layers.0.self_attn.qkv_proj"], True),
        (["model.layers.0.self_attn.q_proj", "k_proj", "re:.*[.]v_proj"], True),
        (["model.layers.0"], True),
        (["qkv_proj"], True),
        (["re:.*layers\\.0\\."], True),
        (["model.layers.01", "layers", "re:layers", "o_proj"], False),
        ([], False),
    ],
)
def test_ignored_layers(entries: list[str], ignored: bool) -> None:
    config = PtpcFp8Config(entries)
    config.packed_modules_mapping = FUSED
    assert config.layers.is_ignored("model.layers.0.self_attn.qkv_proj", FUSED) is ignored


def test_half_of_a_fused_layer_cannot_be_ignored() -> None:
    config = PtpcFp8Config(["model.layers.0.mlp.up_proj"])
    config.packed_modules_mapping = FUSED
    with pytest.raises(ValueError, match=r"some shards of model\.layers\.0\.mlp\.gate_up_proj"):
        config.layers.is_ignored("model.layers.0.mlp.gate_up_proj", FUSED)


def test_embeddings_by_name() -> None:
    """Models convert images to the dtype of their weights, and would to FP8."""
    layers = (
        "vision_tower.patch_embedder.input_proj",
        "embed_vision.embedding_projection",
        "vision_embedding.linear_fc1",
    )
    assert all(is_embedding(name) for name in layers)
    assert not any(is_embedding(f"model.layers.0.{name}") for name in ("self_attn.q_proj", "per_layer_input_gate"))


def test_heads_by_name() -> None:
    assert all(is_head(name) for name in ("score", "score.2", "classifier", "classifier.out_proj", "model.score"))
    assert not any(is_head(f"model.layers.0.{name}") for name in ("score_proj", "mlp.scorer", "score.mlp.down_proj"))


def test_router_gates_by_name() -> None:
    gates = ("mlp.gate", "mlp.shared_expert_gate", "feed_forward.router", "ffn.router.layer", "text_experts_gate")
    layers = ("mlp.gate_proj", "mlp.gate_up_proj", "per_layer_input_gate", "self_attn.o_proj", "output_gate_proj")
    assert all(is_router(f"model.layers.0.{name}") for name in gates)
    assert not any(is_router(f"model.layers.0.{name}") for name in layers)


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        (GateLinear, "model.layers.0.mlp.chooser"),  # a router by its class, whatever its name
        (LinearBase, "model.layers.0.mlp.gate"),
        (LinearBase, "score"),
        (LinearBase, "vision_tower.patch_embedder.input_proj"),
    ],
)
def test_layers_that_stay_as_they_are(kind: type, prefix: str) -> None:
    assert isinstance(PtpcFp8Config().get_quant_method(object.__new__(kind), prefix), UnquantizedLinearMethod)


def test_layers_of_a_draft_model_are_ignored_by_their_names_in_its_checkpoint() -> None:
    config = PtpcFp8Config(["model.layers.0"])
    layer: LinearBase = object.__new__(LinearBase)
    method = config.get_quant_method(layer, "draft_model.model.layers.0.mlp.down_proj")
    assert isinstance(method, UnquantizedLinearMethod)


def test_attention_gets_scales_of_its_cache() -> None:
    layer = object.__new__(Attention)
    assert isinstance(PtpcFp8Config().get_quant_method(layer, "model.layers.0.self_attn.attn"), BaseKVCacheMethod)


def test_a_weight_on_the_wrong_device_is_refused() -> None:
    weight = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=r"^layer\.weight is on meta, and this engine computes on cpu"):
        quantize_weight(weight, "layer.weight", str, None, "cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_row_of_a_broken_value_is_named(value: float) -> None:
    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    weight[2, 5] = value
    with pytest.raises(ValueError, match=r"^row 2 holds NaN or inf \(in 1 rows\)"):
        quantize_weight(weight, "layer.weight", lambda row: f"row {row}", None, "cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_before_vllm_converts_them(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    load = refusing_other_dtypes(lambda param, loaded_weight, shard: param.data.copy_(loaded_weight), "layer.{}".format)
    with pytest.raises(TypeError, match=rf"^layer\.q is {dtype} in the checkpoint"):
        load(param, torch.ones(2, 2).to(dtype), "q")
    assert not param.any()
    load(param, torch.ones(2, 2), "q")
    assert param.all()


def test_the_other_fp8_flavour_is_refused_on_this_device() -> None:
    codes, scale = fp8.quantize_rows(torch.ones(16, 16), fp8.FNUZ)
    with pytest.raises(TypeError, match=r"wq is torch\.float8_e4m3fnuz, but cpu computes in torch\.float8_e4m3fn"):
        ops.ptpc_linear(torch.ones(2, 16, dtype=torch.bfloat16), codes, scale)
