# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 KV cache in a checkpoint, which vLLM reads: broken ones are refused."""

from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from llm_quant_rocm.checkpoint import kv_scales

# Caches whose scales are a checkpoint's.
_SCALED = ("fp8", "nvfp4")


def refusing_broken_scales(method: BaseKVCacheMethod, prefix: str) -> BaseKVCacheMethod:
    """`kv_scales.refusing_broken_scales`, where the cache of the attention layer `prefix` is quantized."""
    return kv_scales.refusing_broken_scales(
        method, prefix, default_weight_loader, lambda layer: layer.kv_cache_dtype.startswith(_SCALED)
    )
