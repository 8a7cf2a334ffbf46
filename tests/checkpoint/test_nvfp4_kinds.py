# SPDX-License-Identifier: Apache-2.0
"""Descriptions of NVFP4 checkpoints that only compressed-tensors writes. tests/engine has the others."""

from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16

from llm_quant_rocm.checkpoint.nvfp4_kinds import Options, check, checkpoint_kind, describe, summary


def described(**groups: QuantizationScheme) -> dict[str, Any]:
    config = QuantizationConfig(config_groups=groups, format="nvfp4-pack-quantized", ignore=["lm_head"])
    return config.model_dump()


@pytest.mark.parametrize("preset", [NVFP4, NVFP4A16], ids=["w4a4", "w4a16"])
def test_what_compressed_tensors_dumps_is_taken(preset: dict[str, Any]) -> None:
    config = described(group_0=QuantizationScheme(targets=["Linear"], **preset))
    assert check(config) == checkpoint_kind(config) == "compressed-tensors"
    assert checkpoint_kind(config | {"quant_method": "compressed_tensors"}) == "compressed-tensors"


def test_a_group_without_weights_is_no_obstacle() -> None:
    """The inputs of attention are quantized by a group of their own, whose weights are null."""
    config = described(
        group_0=QuantizationScheme(targets=["Linear"], **NVFP4A16),
        attention=QuantizationScheme(targets=["LlamaAttention"], input_activations=NVFP4["input_activations"]),
    )
    assert config["config_groups"]["attention"]["weights"] is None
    assert check(config) == "compressed-tensors"


def test_other_blocks_are_refused_by_the_group() -> None:
    config = described(group_0=QuantizationScheme(targets=["Linear"], **NVFP4A16))
    config["config_groups"]["group_0"]["weights"]["group_size"] = 32
    with pytest.raises(ValueError, match=r"^group_0 \(Linear\) has group_size 32, and NVFP4 has blocks of 16"):
        check(config)


def test_blocks_of_another_format_are_its_own() -> None:
    """A group in FP8 beside NVFP4 has blocks of 128, which vLLM reads."""
    config = described(group_0=QuantizationScheme(targets=["Linear"], format="nvfp4-pack-quantized", **NVFP4A16))
    other = {"targets": ["re:.*down_proj"], "format": "float-quantized", "weights": {"group_size": 128}}
    config["config_groups"]["group_1"] = other
    assert check(config) == "compressed-tensors"


@pytest.mark.parametrize(
    "nonsense",
    [
        {"format": ["nvfp4-pack-quantized"], "quant_method": "compressed-tensors"},
        {"config_groups": {"group_0": 1}, "quant_method": "compressed-tensors"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "NVFP4"}},
    ],
    ids=["format", "group", "layer"],
)
def test_nonsense_is_one_sentence(nonsense: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be understood .* download the checkpoint again, or correct its conf"):
        checkpoint_kind(nonsense)


def test_a_layer_without_an_algorithm_is_nonsense() -> None:
    layers = {"a": {"quant_algo": "NVFP4"}, "b": {"group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(ValueError, match=r"cannot be understood \(KeyError\('quant_algo'\)\): download the checkpoint"):
        check(config)


def test_a_configuration_in_words() -> None:
    assert describe({"quant_method": "gptq", "bits": 4}) == "gptq"
    assert describe({"quant_method": "modelopt", "quant_algo": "NVFP4"}) == "modelopt (NVFP4)"
    assert describe({"format": "nvfp4-pack-quantized"}) == "nameless (nvfp4-pack-quantized)"


def test_the_log_says_fp8_of_linear_layers() -> None:
    """Of experts there is none, so that the line is true of a model whose experts alone are quantized."""
    layers = {"mixture-of-experts layers": ["model.layers.0.mlp.experts"]}
    assert summary(layers, Options(prefill="fp8")).endswith("; activations: 16bit, prefill: fp8 in linear layers")
    assert summary(layers, Options()).endswith("; activations: 16bit, prefill: exact")
