# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 KV cache: broken ones are refused as they arrive, and a cache in 16 bits has none, in every format
that has some."""

from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_loader.weight_utils import default_weight_loader

from llm_quant_rocm_sglang import engine_layers
from llm_quant_rocm_sglang.nvfp4 import NvFp4Config
from llm_quant_rocm_sglang.ptpc_fp8 import PtpcFp8Config
from tests import kv_scales
from tests.kv_scales import (
    BROKEN,
    CONFIGURATIONS,
    FLAT,
    PREFIX,
    check_a_broken_scale_is_refused,
    check_a_scale_of_values_alone_is_refused,
    loading,
)

load = loading(default_weight_loader)
# 0.5.17 knows no cache of compressed-tensors': it keeps 16 bits, and has scales of 1 where it is told not to.
UNKNOWN = ["compressed-tensors"] if sglang.__version__.startswith("0.5.17") else []
KINDS = [kind for kind in kv_scales.KINDS if kind not in UNKNOWN]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The server's arguments."""
    arguments = SimpleNamespace(kv_cache_dtype="fp8_e4m3")
    monkeypatch.setattr(engine_layers, "server_arguments", lambda: arguments)
    return arguments


def method(kind: str) -> Any:
    """The method of an attention layer of a checkpoint of this kind."""
    config = NvFp4Config.from_config(CONFIGURATIONS[kind]) if kind in CONFIGURATIONS else PtpcFp8Config()
    return config.get_quant_method(object.__new__(RadixAttention), PREFIX)


def attention(kind: str) -> Any:
    """An attention layer, as far as its scales go, as SGLang makes it before a checkpoint of this kind is loaded."""
    layer: Any = torch.nn.Module()
    layer.quant_method = method(kind)
    layer.quant_method.create_weights(layer)
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_sound_scales(kind: str) -> None:
    layer = attention(kind)
    load(layer, "k_scale", 0.25)
    load(layer, "v_scale", [0.5])
    layer.quant_method.process_weights_after_loading(layer)
    assert (layer.k_scale_float, layer.v_scale_float) == (0.25, 0.5)


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_scale_is_refused(kind: str, value: float) -> None:
    """SGLang served infinity and took that of keys for the others; broken ones of keys failed an assertion."""
    check_a_broken_scale_is_refused(attention(kind), load, value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_of_values_alone_is_refused(kind: str) -> None:
    check_a_scale_of_values_alone_is_refused(attention(kind), load)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_heads_are_refused(kind: str) -> None:
    """SGLang's loader asserted that shapes are equal, of a layer that it did not name."""
    with pytest.raises(ValueError, match=rf"^{PREFIX}\.k_scale is 2 values in the checkpoint, and the engine knows 1 "):
        load(attention(kind), "k_scale", [0.25, 0.5])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_in_16_bits_has_no_scales(kind: str, cache: SimpleNamespace) -> None:
    """SGLang writes it without them, and its Triton kernels read it with them."""
    for wish in ("bfloat16", "bf16"):
        cache.kv_cache_dtype = wish
        assert method(kind) is None
    cache.kv_cache_dtype = "auto"  # which is FP8 where the checkpoint says so
    assert (method(kind) is None) is (kind == "ptpc_fp8")
    for wish in ("fp8_e4m3", "fp8_e5m2", "nvfp4"):
        cache.kv_cache_dtype = wish
        assert isinstance(method(kind), BaseKVCacheMethod)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("target", "draft", "has_scales"),
    [
        ("fp8_e4m3", "bf16", False),
        ("bfloat16", "fp8_e4m3", True),
        ("fp8_e4m3", None, True),
        ("bfloat16", None, False),
    ],
)
def test_a_drafts_cache(target: str, draft: str | None, has_scales: bool, kind: str, cache: SimpleNamespace) -> None:
    """It may be of another dtype than its target's; we asked for the target's."""
    cache.kv_cache_dtype, cache.speculative_draft_kv_cache_dtype = target, draft
    with engine_layers.loading(SimpleNamespace(is_draft_worker=True)):
        assert (method(kind) is not None) is has_scales
    assert (method(kind) is not None) is (target == "fp8_e4m3")


def test_scales_of_a_cache_that_sglang_keeps_in_16_bits(cache: SimpleNamespace) -> None:
    """It knows FP8 of what a checkpoint may ask for."""
    config = NvFp4Config.from_config({**FLAT, "kv_cache_quant_algo": "NVFP4"})
    cache.kv_cache_dtype = "auto"
    assert config.get_quant_method(object.__new__(RadixAttention), PREFIX) is None
