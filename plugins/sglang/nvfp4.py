# SPDX-License-Identifier: Apache-2.0
"""NVFP4 checkpoints, taken over from SGLang by themselves: which ones, where, and with what options.

Where SGLang would refuse NVFP4, or choose a kernel for other GPUs, these checkpoints are served with `nvfp4_triton` and
no flag: ModelOpt's (NVFP4, W4A16_NVFP4, and MIXED_PRECISION with NVFP4 layers) and compressed-tensors'
`nvfp4-pack-quantized`. GPUs with NVFP4 units of their own are left to SGLang.
"""

from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from llm_quant_rocm.checkpoint.files import read_scalars, refuse_broken_files, refuse_scales_of_inputs
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
from llm_quant_rocm.json_files import json_object, understood
from llm_quant_rocm_sglang.engine_layers import (
    JOINED,
    batch_invariant,
    cache_method,
    is_inherited,
    with_common_fused,
)
from llm_quant_rocm_sglang.names import ListedNames, Names

# ModelOpt's own name says nothing about who serves the checkpoint: SGLang too looks further when the user gives it.
_NO_CHOICE = ("", "modelopt")
_MODELOPT_FILE = "hf_quant_config.json"
# A layer's scales that may be one value: of NVFP4 in both layouts, and of FP8.
_SCALARS = ("weight_scale_2", "weight_global_scale", "weight_scale")
_OFTEN_ELSEWHERE = ("quantized_layers", "kv_cache_quant_algo")


def chosen(model_config: Any) -> str | None:
    """`nvfp4_triton` for a checkpoint that is taken over, else None. A draft model of another kind is then asked for
    nothing, where it was for its target's method.

    Raises:
        ValueError: the user asks for `nvfp4_triton` and the checkpoint is of another kind; or of a checkpoint that is
            taken over the configuration, an option or a file is wrong.
    """
    wish = (model_config.quantization or "").lower()
    asked = wish in (NAME, ALIAS)
    if not asked and (wish not in _NO_CHOICE or not switched_on(SWITCH) or not _serves_this_device()):
        return None
    config = _description(model_config)
    kind = None if config is None else checkpoint_kind(config)
    if config is None or kind is None:
        if asked and is_inherited(model_config):
            model_config.quantization = None
        elif asked:
            found = "not quantized" if config is None else f"quantized as {describe(config)}"
            raise ValueError(
                f"{NAME} serves NVFP4 checkpoints of ModelOpt and compressed-tensors, and this one is {found}: serve "
                "it without --quantization"
            )
        return None
    # Here, before SGLang starts a process: what is wrong is then the last thing that the user sees.
    check(config)
    Options.read(config)
    folder = Path(model_config.model_path)
    refuse_broken_files(folder)
    refuse_scales_of_inputs(folder)
    _refuse_lost_scales(folder)
    log_takeover(kind, "SGLang")
    return NAME


class NvFp4Config(QuantizationConfig):
    """What SGLang knows by the name `nvfp4_triton`. A checkpoint gets one of its subclasses (nvfp4_checkpoints.py),
    which are SGLang's own configurations of the format with another choice of method for NVFP4 layers."""

    options = Options()
    packed_modules_mapping: dict[str, list[str]]
    # SGLang's models ask for it where a layer is FP8, which has no blocks here.
    weight_block_size: list[int] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packed_modules_mapping = with_common_fused(self.packed_modules_mapping)
        self.layers = LayerChoice("SGLang")
        self.names = Names()

    def get_name(self) -> str:
        """SGLang's own name of the format: its models and loaders ask for it, to know the checkpoint."""
        return str(super().get_name())

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # where Triton compiles for an NVIDIA GPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The file that SGLang reads where config.json says nothing."""
        return [_MODELOPT_FILE]

    @classmethod
    @understood()
    def from_config(cls, config: dict[str, Any]) -> "NvFp4Config":
        """The configuration for a checkpoint's `quantization_config`.

        Raises:
            ValueError: an unknown algorithm, a group size other than 16, an unknown option, nonsense, or FP8 prefill
                where a row may not depend on the batch.
        """
        from llm_quant_rocm_sglang.nvfp4_checkpoints import CONFIGURATIONS

        kind = check(config)
        options = Options.read(config)
        if options.prefill == "fp8" and batch_invariant():
            raise ValueError(
                f"{SWITCH}_PREFILL=fp8 chooses between FP8 and exact products by batch size, so it cannot serve with "
                "--enable-deterministic-inference: drop one of them"
            )
        model = config.get("hf_config")
        if kind == "modelopt":
            config = _with_known_algorithm(config)
        result = super(NvFp4Config, CONFIGURATIONS[kind]).from_config(config)
        result.options = options
        result.names = Names(model)
        return result

    def get_scaled_act_names(self) -> list[str]:
        return []

    def update_packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        """Add what a model fuses."""
        self.packed_modules_mapping |= mapping

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Add SGLang's names to the checkpoint's in its lists."""
        super().apply_weight_name_mapper(ListedNames(hf_to_sglang_mapper))
        self.names.mapper = hf_to_sglang_mapper

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that serves `layer`, which SGLang calls `prefix`: ours for NVFP4 layers and FP8 linear layers,
        else the one that SGLang's configuration of the format gives it.

        Raises:
            ValueError: an algorithm that neither knows. SGLang would take the layer for one that is not quantized.
        """
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

        from llm_quant_rocm_sglang.fp8_linear import Fp8LinearMethod
        from llm_quant_rocm_sglang.nvfp4_linear import NvFp4LinearMethod
        from llm_quant_rocm_sglang.nvfp4_moe import NvFp4MoEMethod

        if isinstance(layer, ParallelLMHead):
            prefix = prefix.removeprefix(".") or "lm_head"  # some models (Solar, HunYuan, Ling's) give theirs no name
            if prefix.endswith("shared_head.head") or self.names.is_headless:  # a draft's: it is the target's
                return None
        else:
            prefix = self.names.in_checkpoint(prefix)
        listed = self.names.in_lists(prefix)
        if not isinstance(layer, LinearBase | ParallelLMHead | FusedMoE):
            method = super().get_quant_method(layer, listed)
            if isinstance(method, BaseKVCacheMethod):
                return cache_method(method, listed, getattr(self, "kv_cache_quant_algo", None))
            return method
        is_moe = isinstance(layer, FusedMoE)
        return self.layers.choose(
            prefix,
            self.algorithm(layer, listed),
            nvfp4=lambda: NvFp4MoEMethod(self, layer, prefix) if is_moe else NvFp4LinearMethod(self, prefix),
            fp8=None if is_moe else lambda: Fp8LinearMethod(self, prefix),
            engines=lambda: super(NvFp4Config, self).get_quant_method(layer, listed),
            unquantized=UnquantizedLinearMethod,
            fused=self.packed_modules_mapping,
        )

    def algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        """ModelOpt's name of the algorithm that `layer`, `prefix` in lists, is quantized with, None for one that we do
        not know."""
        raise NotImplementedError

    def report(self) -> None:
        """Log once what is served and what is not. Call it when the whole model exists."""
        self.layers.report(self.options)


def _with_known_algorithm(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with NVFP4 for W4A16_NVFP4: SGLang 0.5.17 knows that name alone, and to us they are one."""
    if "quantization" in config:
        return {**config, "quantization": {**config["quantization"], "quant_algo": "NVFP4"}}
    return {**config, "quant_algo": "NVFP4"}


def _description(model_config: Any) -> dict[str, Any] | None:
    """How the checkpoint says that it is quantized, or None.

    What ModelOpt says of a mixed checkpoint in hf_quant_config.json alone, of its layers or its KV cache, is added to
    what config.json says, of which SGLang makes the configuration.

    Raises:
        ValueError: that file is broken.
    """
    config = model_config._parse_quant_hf_config()
    if config is None:
        return None
    file = Path(model_config.model_path) / _MODELOPT_FILE
    settings = modelopt_settings(config)
    if settings is not None and str(settings["quant_algo"]).upper() == MIXED_PRECISION and file.is_file():
        described = modelopt_settings(json_object(file)) or {}
        missing = {key: described[key] for key in _OFTEN_ELSEWHERE if key in described and not settings.get(key)}
        # Where config.json names no layers, SGLang calls the method w4afp8.
        known = {**settings, **missing, "quant_method": "modelopt"}
        if checkpoint_kind(known) is not None:
            settings.update(known)
    return dict(config)


def _refuse_lost_scales(folder: Path) -> None:
    """Of q_a_proj and kv_a_proj_with_mqa SGLang's DeepSeek models make one layer, and give it the first one's scalars.

    Raises:
        ValueError: ModelOpt's scales of the two differ, NVFP4's global ones or FP8's, so that the second one's weights
            would be wrong.
    """
    first, second = JOINED
    scales = read_scalars(folder, tuple(f".{layer}.{scale}" for layer in (first, second) for scale in _SCALARS))
    for name, scale in scales.items():
        read = name.replace(f".{second}.", f".{first}.")
        if scales.get(read, scale) != scale:
            raise ValueError(
                f"{name} is {scale} and {read} is {scales[read]}, and SGLang takes the second for both: export the "
                "model with one scale for the two, or with self_attn in 16 bits, or serve it with vLLM"
            )


def _serves_this_device() -> bool:
    """Whether we serve NVFP4 on this platform better than SGLang does. Asks a driver for no more than a capability."""
    from sglang.srt.utils import is_cuda, is_hip

    if not (is_hip() or is_cuda()):
        return served_here("cpu" if not torch.cuda.is_available() else "other", None)
    return served_here("rocm" if is_hip() else "cuda", torch.cuda.get_device_capability())
