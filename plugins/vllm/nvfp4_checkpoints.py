# SPDX-License-Identifier: Apache-2.0
"""The formats in which NVFP4 checkpoints come: vLLM's own configurations of them, with our choice of method.

vLLM's classes read the configuration, match ignore lists and targets, follow its models' renaming, and serve attention
(KV cache scales), embeddings and layers that are not NVFP4.
"""

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig, ModelOptNvFp4Config

from llm_quant_rocm_vllm.layer_names import shard_name
from llm_quant_rocm_vllm.nvfp4 import (
    COMPRESSED_TENSORS_FORMAT,
    MIXED_PRECISION,
    MODELOPT_ALGORITHMS,
    NAME,
    NvFp4Config,
    modelopt_settings,
    refuse_group_size,
)
from llm_quant_rocm_vllm.nvfp4_tensors import COMPRESSED_TENSORS, MODELOPT, TensorNames

# Parts of a model that ModelOpt never quantized; checkpoints of before 0.39 do not list them.
_UNLISTED = ("vision_tower", "vision_model", "vit_large_projector")


class _ModelOptExclusions:
    """ModelOpt's list of excluded modules, whose patterns vLLM compares with its own names of fused layers alone."""

    packed_modules_mapping: dict[str, list[str]]

    def is_layer_excluded(self, prefix: str) -> bool:
        """Whether the checkpoint keeps `prefix` as it was.

        Raises:
            ValueError: it keeps some shards of a fused layer and not others.
        """
        is_excluded = super().is_layer_excluded  # type: ignore[misc]
        count = len(self.packed_modules_mapping.get(prefix.rpartition(".")[2], ()))
        shards = {
            name: is_excluded(name)
            for name in (shard_name(prefix, shard, self.packed_modules_mapping) for shard in range(count))
        }
        if any(shards.values()) and not all(shards.values()):
            kept = ", ".join(name for name, excluded in shards.items() if excluded)
            raise ValueError(
                f"the checkpoint keeps {kept} in 16 bits, but not all of {', '.join(shards)}, of which vLLM makes one "
                "layer: export the model with all of them or none"
            )
        return any(shards.values()) or is_excluded(prefix)


class NvFp4ModelOptConfig(_ModelOptExclusions, NvFp4Config, ModelOptNvFp4Config):
    """All layers NVFP4 but those that the checkpoint excludes."""

    tensors: ClassVar[TensorNames] = MODELOPT

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NvFp4ModelOptConfig":
        settings = modelopt_settings(config) or {}
        algorithm = str(settings.get("quant_algo")).upper()
        if algorithm not in MODELOPT_ALGORITHMS:
            raise ValueError(
                f"quant_algo {algorithm} is not known: {NAME} serves {', '.join(MODELOPT_ALGORITHMS)} and "
                f"{MIXED_PRECISION}; export the model with one of them"
            )
        refuse_group_size(settings.get("group_size"), f"the checkpoint's {algorithm}")
        return super(NvFp4Config, cls).from_config(config)

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        if self.is_layer_excluded(prefix) or any(part in prefix for part in _UNLISTED):
            return None
        return self.quant_method


class NvFp4MixedConfig(_ModelOptExclusions, NvFp4Config, ModelOptMixedPrecisionConfig):
    """An algorithm a layer, by the checkpoint's `quantized_layers`."""

    tensors: ClassVar[TensorNames] = MODELOPT

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NvFp4MixedConfig":
        settings = modelopt_settings(config) or {}
        for layer, recipe in settings["quantized_layers"].items():
            algorithm = str(recipe.get("quant_algo")).upper()
            if "NVFP4" not in algorithm:
                continue
            if algorithm not in MODELOPT_ALGORITHMS:
                raise ValueError(
                    f"quant_algo {algorithm} of {layer} is not known: {NAME} serves {', '.join(MODELOPT_ALGORITHMS)}; "
                    "export the model with one of them"
                )
            refuse_group_size(recipe.get("group_size"), layer)
        return super(NvFp4Config, cls).from_config(config)

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        return None if self.is_layer_excluded(prefix) else self._resolve_quant_algo(prefix)


class NvFp4CompressedTensorsConfig(NvFp4Config, CompressedTensorsConfig):
    """A scheme a layer, by the targets of the checkpoint's `config_groups` and its ignore list."""

    tensors: ClassVar[TensorNames] = COMPRESSED_TENSORS

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NvFp4CompressedTensorsConfig":
        for name, group in config["config_groups"].items():
            if (group.get("format") or config.get("format")) == COMPRESSED_TENSORS_FORMAT:
                refuse_group_size(group["weights"].get("group_size"), f"{name} ({', '.join(group['targets'])})")
        return super(NvFp4Config, cls).from_config(config)

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        if not isinstance(layer, RoutedExperts):
            return self._algorithm(layer, prefix)
        self._add_fused_moe_to_target_scheme_map()
        projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        algorithms = {self._algorithm(layer, f"{prefix}.0.{projection}") for projection in projections}
        return algorithms.pop() if len(algorithms) == 1 else None  # vLLM then says that they must be one

    def _algorithm(self, layer: torch.nn.Module, name: str) -> str | None:
        scheme = self.get_scheme_dict(layer, name)
        if scheme is None or scheme.get("format") != COMPRESSED_TENSORS_FORMAT:
            return None
        return "NVFP4" if scheme.get("input_activations") else "W4A16_NVFP4"


CONFIGURATIONS: dict[str, type[NvFp4Config]] = {
    "modelopt": NvFp4ModelOptConfig,
    "modelopt_mixed": NvFp4MixedConfig,
    "compressed-tensors": NvFp4CompressedTensorsConfig,
}
