# SPDX-License-Identifier: Apache-2.0
"""Broken scales of an FP8 KV cache are refused as they arrive, in every format that has some."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from llm_quant_rocm_vllm.nvfp4 import NvFp4Config
from llm_quant_rocm_vllm.ptpc_fp8 import PtpcFp8Config
from tests.kv_scales import (
    BROKEN,
    CONFIGURATIONS,
    KINDS,
    PREFIX,
    check_a_broken_scale_is_refused,
    check_a_scale_of_values_alone_is_refused,
    loading,
)

load = loading(default_weight_loader)


def attention(kind: str, cache: str = "fp8_e4m3") -> Any:
    """An attention layer, as far as its scales go, as vLLM makes it before a checkpoint of this kind is loaded."""
    config = NvFp4Config.from_config(CONFIGURATIONS[kind]) if kind in CONFIGURATIONS else PtpcFp8Config()
    layer: Any = torch.nn.Module()
    layer.kv_cache_dtype = cache
    layer.quant_method = config.get_quant_method(object.__new__(Attention), PREFIX)
    layer.quant_method.create_weights(layer)
    return layer


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_scale_is_refused(kind: str, value: float) -> None:
    """vLLM took a negative one for 1.0 and infinity for a scale, and failed an assertion without words for 0."""
    check_a_broken_scale_is_refused(attention(kind), load, value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_of_values_alone_is_refused(kind: str) -> None:
    check_a_scale_of_values_alone_is_refused(attention(kind), load)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_not_quantized_needs_none(kind: str) -> None:
    layer = attention(kind, "auto")
    load(layer, "k_scale", float("nan"))
    assert layer.k_scale.isnan().all()
