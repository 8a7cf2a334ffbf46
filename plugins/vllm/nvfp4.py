# SPDX-License-Identifier: Apache-2.0
"""NVFP4 checkpoints, taken over from vLLM by themselves: which ones, where, and with what options.

Where vLLM would emulate NVFP4, or refuse it, these checkpoints are served with `nvfp4_triton` and no flag: ModelOpt's
(NVFP4, W4A16_NVFP4, and MIXED_PRECISION with NVFP4 layers) and compressed-tensors' `nvfp4-pack-quantized`. GPUs with
NVFP4 units of their own are left to vLLM.
"""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from llm_quant_rocm.checkpoint.files import refuse_broken_files, refuse_scales_of_inputs
from llm_quant_rocm.checkpoint.nvfp4_choice import LayerChoice, log_takeover
from llm_quant_rocm.checkpoint.nvfp4_kinds import (
    ALIAS,
    MIXED_PRECISION,
    NAME,
    SWITCH,
    Options,
    check,
    checkpoint_kind,
    describe,
    modelopt_settings,
    served_here,
)
from llm_quant_rocm.environment import switched_on
from llm_quant_rocm.json_files import understood

logger = logging.getLogger("llm_quant_rocm")

# ModelOpt's own name says nothing about who serves the checkpoint: vLLM too looks further when the user gives it.
_NO_CHOICE = (None, "modelopt")


class NvFp4Config(QuantizationConfig):
    """What vLLM knows by the name `nvfp4_triton`. A checkpoint gets one of its subclasses (nvfp4_checkpoints.py), which
    are vLLM's own configurations of the format with another choice of method for NVFP4 layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if type(self) is NvFp4Config:
            raise ValueError(
                f"{NAME} serves NVFP4 checkpoints, and this one is not quantized: serve it without "
                "--quantization, or with --quantization ptpc_fp8"
            )
        super().__init__(*args, **kwargs)
        self.options = Options()
        self.layers = LayerChoice("vLLM")

    def get_name(self) -> Any:
        """vLLM's own name of the format: its models ask for it, to know the checkpoint."""
        return super().get_name()

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # where Triton compiles for an NVIDIA GPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """`nvfp4_triton` for a checkpoint that is taken over, else None.

        Raises:
            ValueError: the user asks for `nvfp4_triton` and the checkpoint is of another kind.
        """
        asked = user_quant in (NAME, ALIAS)
        if not asked and (user_quant not in _NO_CHOICE or not switched_on(SWITCH) or not _serves_this_device()):
            return None
        if hf_config is not None:
            _complete(hf_quant_cfg, hf_config)
        kind = checkpoint_kind(hf_quant_cfg)
        if kind is None:
            if asked:
                raise ValueError(
                    f"{NAME} serves NVFP4 checkpoints of ModelOpt and compressed-tensors, and this one's "
                    f"quantization_config is {describe(hf_quant_cfg)}: serve it without --quantization"
                )
            return None
        log_takeover(kind, "vLLM")
        _keep_cache_in_16_bits(hf_quant_cfg, hf_config)
        return NAME

    @classmethod
    @understood()
    def from_config(cls, config: dict[str, Any]) -> "NvFp4Config":
        """The configuration for a checkpoint's `quantization_config`.

        Raises:
            ValueError: an unknown algorithm, a group size other than 16, an unknown option, or nonsense.
        """
        # vLLM's configurations import its layers, which must not happen while plugins register.
        from llm_quant_rocm_vllm.nvfp4_checkpoints import CONFIGURATIONS

        result = super(NvFp4Config, CONFIGURATIONS[check(config)]).from_config(config)
        result.options = Options.read(config)
        return result

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Refuse broken files and options that exclude each other; vLLM calls this before it builds the model."""
        super().maybe_update_config(model_name, *args, **kwargs)
        refuse_broken_files(Path(model_name))
        refuse_scales_of_inputs(Path(model_name))
        if envs.VLLM_BATCH_INVARIANT and self.options.prefill == "fp8":
            raise ValueError(
                f"{SWITCH}_PREFILL=fp8 chooses between FP8 and exact products by batch size, so it cannot serve with "
                "VLLM_BATCH_INVARIANT=1: unset one of them"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that serves `layer`, which vLLM calls `prefix`: ours for NVFP4 layers and FP8 linear layers, else
        the one that vLLM's configuration of the format gives it.

        Raises:
            ValueError: an algorithm that neither knows. vLLM would take the layer for one that is not quantized. Or a
                quantized output head of whose rows vLLM is to make a classifier.
        """
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from llm_quant_rocm_vllm import compile_key
        from llm_quant_rocm_vllm.engine_layers import in_checkpoint, refuse_classifier
        from llm_quant_rocm_vllm.fp8_linear import Fp8LinearMethod
        from llm_quant_rocm_vllm.kv_scales import refusing_broken_scales
        from llm_quant_rocm_vllm.nvfp4_linear import NvFp4LinearMethod
        from llm_quant_rocm_vllm.nvfp4_moe import NvFp4MoEMethod

        compile_key.begin()
        prefix = in_checkpoint(prefix)
        if isinstance(layer, ParallelLMHead):
            prefix = prefix or "lm_head"  # some models (AFMoE, K-EXAONE, Qwen3-Omni) give theirs no name
            # DeepSeek's and GLM's layers that predict further tokens forget a part of the checkpoint's name.
            prefix = re.sub(r"(?<!shared_head)\.head$", ".shared_head.head", prefix)
        if not isinstance(layer, LinearBase | ParallelLMHead | RoutedExperts):
            method = super().get_quant_method(layer, prefix)
            return refusing_broken_scales(method, prefix) if isinstance(method, BaseKVCacheMethod) else method
        is_moe = isinstance(layer, RoutedExperts)
        algorithm = self.algorithm(layer, prefix)
        if algorithm and isinstance(layer, ParallelLMHead):
            refuse_classifier(get_current_vllm_config(), prefix)
        return self.layers.choose(
            prefix,
            algorithm,
            nvfp4=lambda: NvFp4MoEMethod(self, layer, prefix) if is_moe else NvFp4LinearMethod(self, prefix),
            fp8=None if is_moe else lambda: Fp8LinearMethod(self, prefix),
            engines=lambda: super(NvFp4Config, self).get_quant_method(layer, prefix),
            unquantized=UnquantizedLinearMethod,
            fused=self.packed_modules_mapping,
        )

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        """ModelOpt's name of the algorithm that `layer` is quantized with, None for one that we do not know."""
        raise NotImplementedError

    def report(self) -> None:
        """Log once what is served and what is not. Call it when the whole model exists."""
        self.layers.report(self.options)


def _complete(config: dict[str, Any], hf_config: Any) -> None:
    """Add the layers of a mixed checkpoint that older ModelOpts describe in hf_quant_config.json alone: to `config`,
    and to the model's `hf_config`, of which vLLM makes the configuration."""
    settings = modelopt_settings(config)
    if settings is None or str(settings["quant_algo"]).upper() != MIXED_PRECISION or settings.get("quantized_layers"):
        return
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    file = get_hf_file_to_dict("hf_quant_config.json", hf_config.name_or_path, getattr(hf_config, "_commit_hash", None))
    layers = (modelopt_settings(file or {}) or {}).get("quantized_layers")
    if layers:
        for described in (config, getattr(hf_config, "quantization_config", {})):
            (modelopt_settings(described) or {})["quantized_layers"] = layers


def _keep_cache_in_16_bits(config: dict[str, Any], hf_config: Any) -> None:
    """Take a KV cache in NVFP4, which vLLM has on NVIDIA's GPUs alone, out of what ModelOpt says of a checkpoint: from
    `config`, and from the model's `hf_config`, by which vLLM chooses the cache where the user does not."""
    from vllm.platforms import current_platform

    if modelopt_settings(config) is None or current_platform.is_cuda():
        return
    found = False
    for described in (config, getattr(hf_config, "quantization_config", {})):
        for part in (described, described.get("quantization")):
            for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
                if isinstance(part, dict) and _in_nvfp4(part.get(name)):
                    part[name], found = None, True
    if found:
        logger.warning(
            "The checkpoint asks for a KV cache in NVFP4, which vLLM does not have on this device: it is kept in "
            "16 bits (--kv-cache-dtype fp8 takes half of that)"
        )


def _in_nvfp4(cache: Any) -> bool:
    """Whether a description of a KV cache means NVFP4."""
    if isinstance(cache, dict):
        return cache.get("num_bits") == 4 and cache.get("type") == "float"
    return isinstance(cache, str) and cache.upper() == "NVFP4"


def _serves_this_device() -> bool:
    """Whether we serve NVFP4 on this platform better than vLLM does. Asks a driver for no more than a capability."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return served_here("cpu", None)
    capability = current_platform.get_device_capability()
    platform = "rocm" if current_platform.is_rocm() else "cuda" if current_platform.is_cuda() else "other"
    return served_here(platform, None if capability is None else tuple(capability))
