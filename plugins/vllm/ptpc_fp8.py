# SPDX-License-Identifier: Apache-2.0
"""`--quantization ptpc_fp8`: which layers of a BF16 or FP16 checkpoint become FP8, and which stay.

Linear layers and mixture-of-experts layers are quantized while the checkpoint loads. Embeddings, `lm_head`, router
gates and the user's `ignored_layers` stay in the checkpoint's precision. Attention layers get KV cache scales.
"""

import json
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from llm_quant_rocm.checkpoint.files import refuse_broken_files
from llm_quant_rocm.checkpoint.online_layers import (
    EMBEDDINGS,
    EXPERTS,
    IGNORED,
    LINEAR,
    NAME,
    ROUTERS,
    OnlineLayers,
    already_quantized,
    read_ignored_layers,
)


class PtpcFp8Config(QuantizationConfig):
    """Per-token activations, per-channel weights, both E4M3, quantized while loading.

    Args:
        ignored_layers: layers to leave unquantized, as `OnlineLayers` takes them.

    Without arguments it is what `--quantization ptpc_fp8` asks for. `ignored_layers` come from
    `--hf-overrides '{"quantization_config_dict_json": "{\\"ignored_layers\\": [...]}"}'`, from a JSON file named by
    the override `quantization_config_file`, or from the checkpoint's own
    `"quantization_config": {"quant_method": "ptpc_fp8", "ignored_layers": [...]}`.
    """

    def __init__(self, ignored_layers: list[str] | None = None) -> None:
        super().__init__()
        self.layers = OnlineLayers(ignored_layers or [])

    @classmethod
    def get_name(cls) -> Any:  # vLLM's type names its own methods only
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
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
        """The configuration in `config`, a checkpoint's `quantization_config` or the user's overrides.

        Raises:
            ValueError: another method's configuration, or a key that is not known.
        """
        return cls(read_ignored_layers(config))

    @classmethod
    def from_config_dict_json(cls, text: str) -> "PtpcFp8Config":
        """The configuration in a JSON text: vLLM's hook for the override `quantization_config_dict_json`.

        Raises:
            ValueError: it is no JSON, or as of `from_config`.
        """
        try:
            return cls.from_config(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{NAME}'s configuration {text!r} is no JSON ({error}): it must be an object with ignored_layers"
            ) from error

    @classmethod
    def from_config_file(cls, path: str) -> "PtpcFp8Config":
        """The configuration in a JSON file: vLLM's hook for the override `quantization_config_file`."""
        return cls.from_config_dict_json(Path(path).read_text(encoding="utf-8"))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Takes over what an empty description says nothing of, and the user asks for; refuses a quantized checkpoint
        that the user asks to quantize again."""
        method = hf_quant_cfg.get("quant_method")
        if user_quant != NAME or method == NAME:
            return None
        if any(hf_quant_cfg.values()):  # vLLM adds an empty method to an empty description
            raise ValueError(already_quantized(method))
        return NAME

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rewrite checkpoint names among `ignored_layers` to vLLM's."""
        self.layers.rename(hf_to_vllm_mapper.apply_list)

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Refuse broken files, and what would change the numbers in silence; vLLM calls this once the configuration is
        complete, before it builds the model."""
        refuse_broken_files(Path(model_name))
        if getattr(self, "online_quantization_config", None) is not None:
            raise ValueError(
                f"{NAME} cannot be combined with --quantization-config: drop it, and name layers to leave "
                "unquantized with ignored_layers (docs/vllm.md)"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that serves `layer`, which vLLM calls `prefix`; None for a layer that has no method."""
        # vLLM's layers import much of vLLM, which must not happen while plugins register.
        from vllm.model_executor.layers.attention import Attention, MLAAttention
        from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts, UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from llm_quant_rocm_vllm import compile_key
        from llm_quant_rocm_vllm.engine_layers import in_checkpoint
        from llm_quant_rocm_vllm.kv_scales import refusing_broken_scales
        from llm_quant_rocm_vllm.ptpc_linear import PtpcFp8LinearMethod
        from llm_quant_rocm_vllm.ptpc_moe import PtpcFp8MoEMethod

        compile_key.begin()
        prefix = in_checkpoint(prefix)
        if isinstance(layer, LinearBase):
            kind = self.layers.kind(prefix, self.packed_modules_mapping)
            if kind != IGNORED and isinstance(layer, GateLinear):
                kind = ROUTERS
            self.layers.note(kind, prefix)
            return PtpcFp8LinearMethod(self, prefix) if kind == LINEAR else UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            if self.layers.is_ignored(prefix, self.packed_modules_mapping):
                self.layers.note(IGNORED, prefix)
                return UnquantizedFusedMoEMethod(layer.moe_config)
            self.layers.note(EXPERTS, prefix)
            return PtpcFp8MoEMethod(self, layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            self.layers.note(EMBEDDINGS, prefix or type(layer).__name__)
        elif isinstance(layer, Attention | MLAAttention):
            return refusing_broken_scales(BaseKVCacheMethod(self), prefix)
        return None

    def report(self) -> None:
        """Log once what is quantized and what is not. Call it when the whole model exists."""
        self.layers.report(self.packed_modules_mapping)
