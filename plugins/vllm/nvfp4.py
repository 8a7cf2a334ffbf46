# SPDX-License-Identifier: Apache-2.0
"""NVFP4 checkpoints, taken over from vLLM by themselves: which ones, where, and with what options.

Where vLLM would emulate NVFP4, or refuse it, these checkpoints are served with `nvfp4_triton` and no flag: ModelOpt's
(NVFP4, W4A16_NVFP4, and MIXED_PRECISION with NVFP4 layers) and compressed-tensors' `nvfp4-pack-quantized`. GPUs with
NVFP4 units of their own are left to vLLM.
"""

import logging
import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from llm_quant_rocm.formats.nvfp4 import BLOCK
from llm_quant_rocm_vllm.checkpoint_files import refuse_truncated
from llm_quant_rocm_vllm.switches import switched_on

NAME = "nvfp4_triton"
ALIAS = "petit_nvfp4"  # what vLLM called its own method of this kind, up to 0.14

MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
MIXED_PRECISION = "MIXED_PRECISION"
COMPRESSED_TENSORS_FORMAT = "nvfp4-pack-quantized"

_SWITCH = "LLM_QUANT_ROCM_NVFP4"
# ModelOpt's own name says nothing about who serves the checkpoint: vLLM too looks further when the user gives it.
_NO_CHOICE = (None, "modelopt")

logger = logging.getLogger("llm_quant_rocm")


@dataclass(frozen=True)
class Options:
    """How NVFP4 layers compute.

    Attributes:
        activations: "16bit", or "nvfp4" to quantize them as hardware with NVFP4 units does: for evaluation, and slow.
        prefill: "exact", or "fp8" for FP8's speed where many tokens come at once (`ops.nvfp4_gemm`).
    """

    activations: str = "16bit"
    prefill: str = "exact"

    @classmethod
    def read(cls, config: dict[str, Any]) -> "Options":
        """From the environment, else from the keys `activations` and `prefill` of the checkpoint's configuration.

        Raises:
            ValueError: a value that is not known.
        """
        known = {"activations": ("16bit", "nvfp4"), "prefill": ("exact", "fp8")}
        chosen = {}
        for option, values in known.items():
            variable = f"{_SWITCH}_{option.upper()}"
            chosen[option] = os.environ.get(variable) or config.get(option) or values[0]
            if chosen[option] not in values:
                raise ValueError(
                    f"{variable} (or {option!r} in the quantization_config) is {' or '.join(values)}, "
                    f"not {chosen[option]!r}"
                )
        return cls(**chosen)


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
        self._layers: defaultdict[str, list[str]] = defaultdict(list)
        self._reported = False

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
        if not asked and (user_quant not in _NO_CHOICE or not switched_on(_SWITCH) or not _serves_this_device()):
            return None
        if hf_config is not None:
            _complete(hf_quant_cfg, hf_config)
        kind = checkpoint_kind(hf_quant_cfg)
        if kind is None:
            if asked:
                raise ValueError(
                    f"{NAME} serves NVFP4 checkpoints of ModelOpt and compressed-tensors, and this one's "
                    f"quantization_config is {_describe(hf_quant_cfg)}: serve it without --quantization"
                )
            return None
        _log_takeover(kind)
        return NAME

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NvFp4Config":
        """The configuration for a checkpoint's `quantization_config`.

        Raises:
            ValueError: an unknown algorithm, a group size other than 16, or an unknown option.
        """
        # vLLM's configurations import its layers, which must not happen while plugins register.
        from llm_quant_rocm_vllm.nvfp4_checkpoints import CONFIGURATIONS

        kind = checkpoint_kind(config)
        if kind is None:
            raise ValueError(f"{NAME} serves no checkpoint with the quantization_config {_describe(config)}")
        result = CONFIGURATIONS[kind].from_config(config)
        result.options = Options.read(config)
        return result

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Refuse broken files and options that exclude each other; vLLM calls this before it builds the model."""
        super().maybe_update_config(model_name, *args, **kwargs)
        refuse_truncated(Path(model_name))
        if envs.VLLM_BATCH_INVARIANT and self.options.prefill == "fp8":
            raise ValueError(
                f"{_SWITCH}_PREFILL=fp8 chooses between FP8 and exact products by batch size, so it cannot serve with "
                "VLLM_BATCH_INVARIANT=1: unset one of them"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that serves `layer`, which vLLM calls `prefix`: ours for NVFP4 layers and FP8 linear layers, else
        the one that vLLM's configuration of the format gives it.

        Raises:
            ValueError: an algorithm that neither knows. vLLM would take the layer for one that is not quantized.
        """
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from llm_quant_rocm_vllm.fp8_linear import Fp8LinearMethod
        from llm_quant_rocm_vllm.nvfp4_linear import NvFp4LinearMethod
        from llm_quant_rocm_vllm.nvfp4_moe import NvFp4MoEMethod

        if not isinstance(layer, LinearBase | ParallelLMHead | RoutedExperts):
            return super().get_quant_method(layer, prefix)
        is_moe = isinstance(layer, RoutedExperts)
        algorithm = self.algorithm(layer, prefix)
        if algorithm in MODELOPT_ALGORITHMS:
            self._layers["mixture-of-experts layers" if is_moe else "linear layers"].append(prefix)
            return NvFp4MoEMethod(self, layer, prefix) if is_moe else NvFp4LinearMethod(self, prefix)
        if algorithm == "FP8" and not is_moe:
            self._layers["linear layers in FP8"].append(prefix)
            return Fp8LinearMethod(self, prefix)
        method = super().get_quant_method(layer, prefix)
        if algorithm is not None and (method is None or isinstance(method, UnquantizedLinearMethod)):
            raise ValueError(
                f"quant_algo {algorithm} of {prefix} is known neither to {NAME} nor to this vLLM: export the model "
                f"with {', '.join(MODELOPT_ALGORITHMS)} or FP8 there, or update vLLM"
            )
        self._layers["layers left to vLLM"].append(prefix)
        return method

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        """ModelOpt's name of the algorithm that `layer` is quantized with, None for one that we do not know."""
        raise NotImplementedError

    def report(self) -> None:
        """Log once what is served and what is not. Call it when the whole model exists."""
        if not self._reported:
            self._reported = True
            counts = [
                f"{len(names)} {kind} ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"
                for kind, names in self._layers.items()
            ]
            logger.info(
                "%s: %s; activations: %s, prefill: %s",
                NAME,
                ", ".join(counts),
                self.options.activations,
                self.options.prefill,
            )


def checkpoint_kind(config: dict[str, Any]) -> str | None:
    """ "modelopt", "modelopt_mixed" or "compressed-tensors" for an NVFP4 checkpoint's `quantization_config`, else None.

    ModelOpt's come in two shapes: {"quantization": {"quant_algo": ...}} and flat, with "quant_method" and "quant_algo".
    An algorithm that only sounds like NVFP4 counts as ModelOpt's, for from_config to name what is known.
    """
    method = str(config.get("quant_method") or "").lower()
    if method == "compressed-tensors":
        groups = config.get("config_groups") or {}
        formats = {config.get("format"), *(group.get("format") for group in groups.values())}
        # A transform (a rotation of activations before the layer) belongs to vLLM's own methods.
        return method if COMPRESSED_TENSORS_FORMAT in formats and not config.get("transform_config") else None
    settings = modelopt_settings(config)
    if settings is None or not (method.startswith("modelopt") or "quantization" in config):
        return None
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm == MIXED_PRECISION:
        layers = settings.get("quantized_layers") or {}
        return (
            "modelopt_mixed"
            if any("NVFP4" in str(layer.get("quant_algo")).upper() for layer in layers.values())
            else None
        )
    return "modelopt" if "NVFP4" in algorithm else None


def modelopt_settings(config: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a ModelOpt `quantization_config`, of either shape, that holds `quant_algo`."""
    settings = config.get("quantization", config)
    return settings if isinstance(settings, dict) and settings.get("quant_algo") else None


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


def refuse_group_size(size: int | str | None, where: str) -> None:
    """ValueError unless `size` is that of NVFP4's blocks, or not given."""
    if size is not None and int(size) != BLOCK:
        raise ValueError(
            f"{where} has group_size {size}, and NVFP4 has blocks of {BLOCK}: quantize the model again, "
            f"or leave the checkpoint to vLLM with {_SWITCH}=0"
        )


def _serves_this_device() -> bool:
    """Whether we serve NVFP4 on this platform better than vLLM does. Asks a driver for no more than a capability."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return True
    capability = current_platform.get_device_capability()
    if capability is None:
        return False
    if current_platform.is_rocm():
        return capability.major == 9  # CDNA: gfx90a, gfx942 and gfx950, which have no units for NVFP4
    # Of NVIDIA's GPUs Hopper has kernels here. Older ones are better served by vLLM's, newer ones by their own units.
    return current_platform.is_cuda() and tuple(capability) == (9, 0)


@cache
def _log_takeover(kind: str) -> None:
    logger.info(
        "NVFP4 checkpoint (%s): %s serves it; %s=0 or --quantization modelopt_fp4 leaves it to vLLM",
        kind,
        NAME,
        _SWITCH,
    )


def _describe(config: dict[str, Any]) -> str:
    settings = modelopt_settings(config)
    return (
        f"{config.get('quant_method') or 'nameless'} ({settings['quant_algo'] if settings else config.get('format')})"
    )
