# SPDX-License-Identifier: Apache-2.0
"""The formats in which NVFP4 checkpoints come: SGLang's own configurations of them, with our choice of method.

SGLang's classes read the configuration, match ignore lists and targets, follow its models' renaming, and serve
attention (KV cache scales), embeddings and layers that are not NVFP4.
"""

from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.utils import check_equal_or_regex_match, should_ignore_layer
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptMixedPrecisionConfig
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from llm_quant_rocm.checkpoint.nvfp4_choice import ModelOptExclusions, as_targeted
from llm_quant_rocm.checkpoint.nvfp4_kinds import COMPRESSED_TENSORS_FORMAT, NAME
from llm_quant_rocm.checkpoint.nvfp4_tensors import COMPRESSED_TENSORS, MODELOPT, TensorNames
from llm_quant_rocm_sglang.nvfp4 import NvFp4Config

# Projections of MLA that SGLang looks for in the names of fused layers.
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
# What checkpoints call the projections of an expert.
_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3"))


class AsListed:
    """ModelOpt's list of excluded modules, of which SGLang takes model.layers.61.self_attn.q_a_proj for that projection
    of every layer, and does not find the experts of a layer that are named one by one."""

    exclude_modules: list[str]

    def is_layer_excluded(self, prefix: str) -> bool:
        """Whether the checkpoint keeps `prefix` as it was."""
        listed, parent = self.exclude_modules, prefix.rpartition(".")[0]
        parts = [(name, *name.rpartition(".")[::2]) for name in listed or ()]
        self.exclude_modules = [
            name for name, of, leaf in parts if leaf not in _LATENT or fnmatchcase(parent, f"*{of}")
        ]
        is_excluded = super().is_layer_excluded  # type: ignore[misc]
        try:
            first = [[f"{prefix}.0.{leaf}" for leaf in leaves] for leaves in _EXPERT if prefix.endswith(".experts")]
            return is_excluded(prefix) or any(all(map(is_excluded, names)) for names in first)
        finally:
            self.exclude_modules = listed


class NvFp4ModelOptConfig(ModelOptExclusions, AsListed, NvFp4Config, ModelOptFp4Config):
    """All layers NVFP4 but those that the checkpoint excludes."""

    tensors: ClassVar[TensorNames] = MODELOPT

    def get_name(self) -> str:
        """SGLang's name, but where it makes layers in 16 bits by that name alone, whatever the list says: in draft
        models (MTP), and Qwen3-Next's attention."""
        model = self.names.architecture
        is_overruled = model.startswith("Qwen3Next") or model.endswith(("NextN", "MTP"))
        return NAME if is_overruled else super().get_name()

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        return None if self.is_layer_excluded(prefix) else "NVFP4"


class NvFp4MixedConfig(ModelOptExclusions, AsListed, NvFp4Config, ModelOptMixedPrecisionConfig):
    """An algorithm a layer, by the checkpoint's `quantized_layers`."""

    tensors: ClassVar[TensorNames] = MODELOPT

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        return None if self.is_layer_excluded(prefix) else self._resolve_quant_algo(prefix)


class NvFp4CompressedTensorsConfig(NvFp4Config, CompressedTensorsConfig):
    """A scheme a layer, by the targets of the checkpoint's `config_groups` and its ignore list."""

    tensors: ClassVar[TensorNames] = COMPRESSED_TENSORS

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        if isinstance(layer, FusedMoE):
            self._add_fused_moe_to_target_scheme_map()
            names = [f"{prefix}.0.{projection}" for projection in ("gate_proj", "up_proj", "down_proj")]
            algorithms = {self._algorithm(layer, name) for name in names}
            return algorithms.pop() if len(algorithms) == 1 else None  # SGLang then says that they must be one
        if isinstance(layer, ParallelLMHead):
            layer = as_targeted(layer, self.ignore)
            meant = (prefix, type(layer).__name__)
            if not any(check_equal_or_regex_match(name, self.target_scheme_map) for name in meant):
                return None  # SGLang's search for a target would end in an error
        return self._algorithm(layer, prefix)

    def _algorithm(self, layer: torch.nn.Module, name: str) -> str | None:
        if should_ignore_layer(name, ignore=self.ignore, fused_mapping=self.packed_modules_mapping):
            return None
        scheme = self.get_scheme_dict(layer, name)
        if scheme is None or (scheme.get("format") or self.quant_format) != COMPRESSED_TENSORS_FORMAT:
            return None
        return "NVFP4" if scheme.get("input_activations") else "W4A16_NVFP4"


CONFIGURATIONS: dict[str, type[NvFp4Config]] = {
    "modelopt": NvFp4ModelOptConfig,
    "modelopt_mixed": NvFp4MixedConfig,
    "compressed-tensors": NvFp4CompressedTensorsConfig,
}
