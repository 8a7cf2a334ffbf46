# SPDX-License-Identifier: Apache-2.0
"""`--quantization ptpc_fp8`: which layers of a BF16 or FP16 checkpoint become FP8, and which stay.

Linear layers and mixture-of-experts layers are quantized while the checkpoint loads. Embeddings, `lm_head`, router
gates and the user's `ignored_layers` stay in the checkpoint's precision. Attention layers get KV cache scales.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from llm_quant_rocm.checkpoint.files import refuse_broken_files
from llm_quant_rocm.checkpoint.online_layers import (
    EMBEDDINGS,
    EXPERTS,
    IGNORED,
    LINEAR,
    NAME,
    OnlineLayers,
    already_quantized,
    read_ignored_layers,
)
from llm_quant_rocm_sglang.engine_layers import cache_method, is_inherited, with_common_fused
from llm_quant_rocm_sglang.names import ListedNames, Names

# What SGLang adds to a checkpoint's configuration.
_SGLANGS_KEYS = ("packed_modules_mapping", "hf_config")

# SGLang multiplies this layer's weight into its neighbours itself, and wants it in 16 bits.
_ABSORBED = "layers that SGLang absorbs into others"


def chosen(model_config: Any) -> str | None:
    """`ptpc_fp8` where the user or the checkpoint asks for it, else None. A draft model that has a method of its own is
    then asked for nothing, where it was for its target's.

    Raises:
        ValueError: the checkpoint is quantized by another method, `ignored_layers` is wrong, or files are broken.
    """
    asked = (model_config.quantization or "").lower() == NAME
    config = model_config._parse_quant_hf_config()
    method = None if config is None else str(config.get("quant_method") or "").lower()
    if asked and config and method != NAME:
        if not is_inherited(model_config):
            raise ValueError(already_quantized(method))
        model_config.quantization = None
        return None
    if not asked and (method != NAME or model_config.quantization):
        return None
    # Here, before SGLang starts a process: what is wrong is then the last thing that the user sees.
    read_ignored_layers(config or {}, _SGLANGS_KEYS)
    refuse_broken_files(Path(model_config.model_path))
    return NAME


class PtpcFp8Config(QuantizationConfig):
    """Per-token activations, per-channel weights, both E4M3, quantized while loading.

    Args:
        ignored_layers: layers to leave unquantized, as `OnlineLayers` takes them.
        fused: what the model fuses.
        model: its configuration of transformers'.

    Without arguments it is what `--quantization ptpc_fp8` asks for. `ignored_layers` come from the checkpoint's own
    `"quantization_config": {"quant_method": "ptpc_fp8", "ignored_layers": [...]}`, or from
    `--json-model-override-args '{"quantization_config": {...}}'`.
    """

    def __init__(
        self,
        ignored_layers: list[str] | None = None,
        fused: Mapping[str, list[str]] | None = None,
        model: Any = None,
    ) -> None:
        super().__init__()
        self.layers = OnlineLayers(ignored_layers or [])
        self.names = Names(model)
        self.packed_modules_mapping = with_common_fused(fused)

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """90: Hopper, and gfx90a as ROCm counts."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PtpcFp8Config":
        """The configuration in `config`, a checkpoint's `quantization_config`.

        Raises:
            ValueError: another method's configuration, or a key that is not known.
        """
        ignored = read_ignored_layers(config, _SGLANGS_KEYS)
        return cls(ignored, config.get("packed_modules_mapping"), config.get("hf_config"))

    def get_scaled_act_names(self) -> list[str]:
        return []

    def update_packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        """Add what a model fuses."""
        self.packed_modules_mapping |= mapping

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Add SGLang's names to the checkpoint's among `ignored_layers`."""
        self.layers.rename(ListedNames(hf_to_sglang_mapper).apply_list)
        self.names.mapper = hf_to_sglang_mapper

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that serves `layer`, which SGLang calls `prefix`; None for a layer that has no method."""
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from llm_quant_rocm_sglang.ptpc_linear import PtpcFp8LinearMethod
        from llm_quant_rocm_sglang.ptpc_moe import PtpcFp8MoEMethod

        prefix = self.names.in_checkpoint(prefix)
        listed = self.names.in_lists(prefix)
        if isinstance(layer, LinearBase):
            kind = self.layers.kind(listed, self.packed_modules_mapping)
            if kind == LINEAR and prefix.rpartition(".")[2] == "kv_b_proj":
                kind = _ABSORBED
            self.layers.note(kind, prefix)
            return PtpcFp8LinearMethod(self, prefix) if kind == LINEAR else UnquantizedLinearMethod()
        if isinstance(layer, FusedMoE):
            if self.layers.is_ignored(listed, self.packed_modules_mapping):
                self.layers.note(IGNORED, prefix)
                return None
            self.layers.note(EXPERTS, prefix)
            return PtpcFp8MoEMethod(self, layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            self.layers.note(EMBEDDINGS, prefix or type(layer).__name__)
        elif isinstance(layer, RadixAttention):
            return cache_method(BaseKVCacheMethod(self), prefix, algorithm=None)
        return None

    def report(self) -> None:
        """Log once what is quantized and what is not. Call it when the whole model exists."""
        self.layers.report(self.packed_modules_mapping)
