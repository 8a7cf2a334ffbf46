# SPDX-License-Identifier: Apache-2.0
"""Broken scales of an FP8 KV cache are refused as they arrive, in every format that has some."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from llm_quant_rocm_vllm.nvfp4 import NvFp4Config
from llm_quant_rocm_vllm.ptpc_fp8 import PtpcFp8Config

PREFIX = "model.layers.0.self_attn.attn"
FLAT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [], "group_size": 16}
GROUP = {
    "targets": ["Linear"],
    "format": "nvfp4-pack-quantized",
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "modelopt": FLAT,
    "mixed": {
        **FLAT,
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"lm_head": {"quant_algo": "NVFP4", "group_size": 16}},
        "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": GROUP},
        "kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True},
    },
}
KINDS = ["ptpc_fp8", *CONFIGURATIONS]


def attention(kind: str, cache: str = "fp8_e4m3") -> Any:
    """An attention layer, as far as its scales go, as vLLM makes it before a checkpoint of this kind is loaded."""
    config = NvFp4Config.from_config(CONFIGURATIONS[kind]) if kind in CONFIGURATIONS else PtpcFp8Config()
    layer: Any = torch.nn.Module()
    layer.kv_cache_dtype = cache
    layer.quant_method = config.get_quant_method(object.__new__(Attention), PREFIX)
    layer.quant_method.create_weights(layer)
    return layer


def load(layer: Any, name: str, value: float) -> None:
    parameter = getattr(layer, name)
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, torch.tensor(value))


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_scale_is_refused(kind: str, value: float) -> None:
    """vLLM took a negative one for 1.0 and infinity for a scale, and failed an assertion without words for 0."""
    layer = attention(kind)
    load(layer, "k_scale", 0.25)
    with pytest.raises(ValueError, match=rf"^{PREFIX}\.v_scale is {value:g} in the checkpoint; a scale of a KV cache"):
        load(layer, "v_scale", value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_of_values_alone_is_refused(kind: str) -> None:
    layer = attention(kind)
    load(layer, "v_scale", 0.25)
    with pytest.raises(ValueError, match=rf"^{PREFIX}\.k_scale is missing from the checkpoint"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_not_quantized_needs_none(kind: str) -> None:
    layer = attention(kind, "auto")
    load(layer, "k_scale", float("nan"))
    assert layer.k_scale.isnan().all()
