# SPDX-License-Identifier: Apache-2.0
"""`--quantization ptpc_fp8`: which layers of a BF16 or FP16 checkpoint become FP8, and which stay.

Linear layers and mixture-of-experts layers are quantized while the checkpoint loads. Embeddings, `lm_head`, router
gates and the user's `ignored_layers` stay in the checkpoint's precision. Attention layers get KV cache scales.
"""

import json
import logging
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from llm_quant_rocm_vllm.layer_names import shard_name

NAME = "ptpc_fp8"

logger = logging.getLogger("llm_quant_rocm")

# A router's logits choose experts: FP8 noise flips the choice. No model's projection (gate_proj, gate_up_proj,
# per_layer_input_gate) matches. The names are those of vLLM's models, 0.26 to 0.33.
_ROUTER = re.compile(r"(^|\.)(gate|(\w+_)?router|\w*experts?_gate)(\.|$)")

_LINEAR = "linear layers"
_EXPERTS = "mixture-of-experts layers"
_IGNORED = "layers named by ignored_layers"
_ROUTERS = "router gates"
_EMBEDDINGS = "embeddings and output heads"


class PtpcFp8Config(QuantizationConfig):
    """Per-token activations, per-channel weights, both E4M3, quantized while loading.

    Args:
        ignored_layers: layers to leave unquantized. Each entry is a layer's name, the name of a part of the model
            ("model.layers.0", all layers below it), the end of a name ("o_proj"), or "re:" and a regular expression
            that matches from a name's beginning. A fused layer (qkv_proj, gate_up_proj) goes by its own name or by
            the checkpoint's names of all its shards.

    Without arguments it is what `--quantization ptpc_fp8` asks for. `ignored_layers` come from
    `--hf-overrides '{"quantization_config_dict_json": "{\\"ignored_layers\\": [...]}"}'`, from a JSON file named by
    the override `quantization_config_file`, or from the checkpoint's own
    `"quantization_config": {"quant_method": "ptpc_fp8", "ignored_layers": [...]}`.
    """

    def __init__(self, ignored_layers: list[str] | None = None) -> None:
        super().__init__()
        self.ignored_layers = list(ignored_layers or [])
        self._layers: defaultdict[str, list[str]] = defaultdict(list)
        self._reported = False

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
        method = config.get("quant_method", NAME)
        if method != NAME:
            raise ValueError(_already_quantized(method))
        unknown = sorted(set(config) - {"quant_method", "ignored_layers"})
        if unknown:
            raise ValueError(f"{NAME} knows no setting {', '.join(unknown)}: it takes ignored_layers alone")
        return cls(config.get("ignored_layers"))

    @classmethod
    def from_config_dict_json(cls, text: str) -> "PtpcFp8Config":
        """The configuration in a JSON text: vLLM's hook for the override `quantization_config_dict_json`."""
        return cls.from_config(json.loads(text))

    @classmethod
    def from_config_file(cls, path: str) -> "PtpcFp8Config":
        """The configuration in a JSON file: vLLM's hook for the override `quantization_config_file`."""
        return cls.from_config_dict_json(Path(path).read_text(encoding="utf-8"))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Takes over no checkpoint; refuses a quantized one that the user asks to quantize again."""
        method = hf_quant_cfg.get("quant_method")
        if user_quant == NAME and method != NAME:
            raise ValueError(_already_quantized(method))
        return None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rewrite checkpoint names among `ignored_layers` to vLLM's; regular expressions stay as they are."""
        names = [name for name in self.ignored_layers if not name.startswith("re:")]
        expressions = [name for name in self.ignored_layers if name.startswith("re:")]
        self.ignored_layers = hf_to_vllm_mapper.apply_list(names) + expressions

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Refuse what would change the numbers in silence; vLLM calls this once the configuration is complete."""
        if envs.VLLM_BATCH_INVARIANT:
            raise ValueError(
                f"{NAME} chooses its kernels by batch size and cannot serve with VLLM_BATCH_INVARIANT=1: unset it, "
                "or serve with --quantization fp8_per_channel"
            )
        if getattr(self, "online_quantization_config", None) is not None:
            raise ValueError(
                f"{NAME} cannot be combined with --quantization-config: drop it, and name layers to leave "
                "unquantized with ignored_layers (docs/vllm.md)"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that serves `layer`, which vLLM calls `prefix`; None for a layer that has no method."""
        # vLLM's layers import much of vLLM, which must not happen while plugins register.
        from vllm.model_executor.layers.attention import Attention, MLAAttention
        from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from llm_quant_rocm_vllm.ptpc_linear import PtpcFp8LinearMethod
        from llm_quant_rocm_vllm.ptpc_moe import PtpcFp8MoEMethod

        if isinstance(layer, LinearBase):
            if self._is_ignored(prefix):
                self._layers[_IGNORED].append(prefix)
                return UnquantizedLinearMethod()
            if _is_router(layer, prefix):
                self._layers[_ROUTERS].append(prefix)
                return UnquantizedLinearMethod()
            self._layers[_LINEAR].append(prefix)
            return PtpcFp8LinearMethod(self, prefix)
        if isinstance(layer, RoutedExperts):
            if self._is_ignored(prefix):
                self._layers[_IGNORED].append(prefix)
                return UnquantizedFusedMoEMethod(layer.moe_config)
            self._layers[_EXPERTS].append(prefix)
            return PtpcFp8MoEMethod(self, layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            self._layers[_EMBEDDINGS].append(prefix or type(layer).__name__)
        elif isinstance(layer, Attention | MLAAttention):
            return BaseKVCacheMethod(self)
        return None

    def shard_name(self, prefix: str, shard: int) -> str:
        """The checkpoint's name of shard number `shard` of the layer that vLLM calls `prefix`, fused or not."""
        return shard_name(prefix, shard, self.packed_modules_mapping)

    def report(self) -> None:
        """Log once what is quantized and what is not. Call it when the whole model exists."""
        if self._reported:
            return
        self._reported = True
        quantized = [f"{len(self._layers[kind])} {kind}" for kind in (_LINEAR, _EXPERTS) if self._layers[kind]]
        left = [
            f"{len(names)} {kind} ({_abbreviate(names)})"
            for kind in (_IGNORED, _ROUTERS, _EMBEDDINGS)
            if (names := self._layers[kind])
        ]
        logger.info(
            "%s: quantizing %s to E4M3, one scale an output channel; left as they are: %s",
            NAME,
            " and ".join(quantized) or "nothing",
            "; ".join(left) or "none",
        )
        seen = [name for prefix in self._layers[_IGNORED] for name in self._names(prefix)]
        for entry in self.ignored_layers:
            if not any(_matches(entry, name) for name in seen):
                logger.warning("%s: ignored_layers names %r, which no layer of this process matches", NAME, entry)

    def _names(self, prefix: str) -> list[str]:
        """The names a layer goes by: vLLM's, and those of its shards where it is fused."""
        shards = self.packed_modules_mapping.get(prefix.rpartition(".")[2], [])
        return [prefix, *(self.shard_name(prefix, index) for index in range(len(shards)))]

    def _is_ignored(self, prefix: str) -> bool:
        fused, *shards = [any(_matches(entry, name) for entry in self.ignored_layers) for name in self._names(prefix)]
        if not fused and any(shards) and not all(shards):
            names = ", ".join(self._names(prefix)[1:])
            raise ValueError(
                f"ignored_layers names some shards of {prefix} and not others: name all of {names}, or none"
            )
        return fused or (bool(shards) and all(shards))


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return name == entry or name.startswith(f"{entry}.") or name.endswith(f".{entry}")


def _is_router(layer: torch.nn.Module, prefix: str) -> bool:
    from vllm.model_executor.layers.fused_moe import GateLinear

    return isinstance(layer, GateLinear) or _ROUTER.search(prefix) is not None


def _abbreviate(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _already_quantized(method: str | None) -> str:
    return (
        f"the checkpoint is already quantized ({method}) and {NAME} quantizes BF16 and FP16 checkpoints: serve it "
        f"without --quantization {NAME}, or serve the unquantized checkpoint"
    )
