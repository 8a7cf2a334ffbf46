# SPDX-License-Identifier: Apache-2.0
"""The formats in which NVFP4 checkpoints come: vLLM's own configurations of them, with our choice of method.

vLLM's classes read the configuration, match ignore lists and targets, follow its models' renaming, and serve attention
(KV cache scales), embeddings and layers that are not NVFP4.
"""

from typing import ClassVar

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig, ModelOptNvFp4Config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from llm_quant_rocm.checkpoint.nvfp4_choice import ModelOptExclusions, as_targeted
from llm_quant_rocm.checkpoint.nvfp4_kinds import COMPRESSED_TENSORS_FORMAT
from llm_quant_rocm.checkpoint.nvfp4_tensors import COMPRESSED_TENSORS, MODELOPT, TensorNames
from llm_quant_rocm_vllm.nvfp4 import NvFp4Config

# Parts of a model that ModelOpt never quantized; checkpoints of before 0.39 do not list them.
_UNLISTED = ("vision_tower", "vision_model", "vit_large_projector")


class NvFp4ModelOptConfig(ModelOptExclusions, NvFp4Config, ModelOptNvFp4Config):
    """All layers NVFP4 but those that the checkpoint excludes."""

    tensors: ClassVar[TensorNames] = MODELOPT

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        if self.is_layer_excluded(prefix) or any(part in prefix for part in _UNLISTED):
            return None
        return self.quant_method


class NvFp4MixedConfig(ModelOptExclusions, NvFp4Config, ModelOptMixedPrecisionConfig):
    """An algorithm a layer, by the checkpoint's `quantized_layers`."""

    tensors: ClassVar[TensorNames] = MODELOPT

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        return None if self.is_layer_excluded(prefix) else self._resolve_quant_algo(prefix)

    def _resolve_quant_algo(self, prefix: str) -> str | None:
        """vLLM's answer, where the checkpoint lists the experts `prefix`. For those that it does not, as they are in 16
        bits, vLLM takes any other layer beside them, such as a shared expert."""
        if prefix.endswith(".experts"):
            beside = prefix.removesuffix("experts")
            beside = beside[max(0, beside.find("layers.")) :]  # models and checkpoints differ in what is before it
            found = (name.partition(beside) for name in self.quantized_layers)
            # Step-3.5's experts are called after their block, moe.gate_proj.
            if not any(inside and (rest.split(".")[0] == "experts" or "." not in rest) for _, inside, rest in found):
                return None
        return super()._resolve_quant_algo(prefix)


class NvFp4CompressedTensorsConfig(NvFp4Config, CompressedTensorsConfig):
    """A scheme a layer, by the targets of the checkpoint's `config_groups` and its ignore list."""

    tensors: ClassVar[TensorNames] = COMPRESSED_TENSORS

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        if isinstance(layer, ParallelLMHead):
            layer = as_targeted(layer, self.ignore)
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
