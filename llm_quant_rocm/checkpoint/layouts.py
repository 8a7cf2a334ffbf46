# SPDX-License-Identifier: Apache-2.0
"""How quantized checkpoints name a weight's tensors and describe themselves: compressed-tensors' way and ModelOpt's.

The two conventions hold the same bytes under other names; formats/nvfp4.py and formats/fp8.py say what they mean.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llm_quant_rocm.formats import nvfp4

Json = dict[str, Any]


@dataclass(frozen=True)
class PtpcWeight:
    """A weight in FP8: `codes` float8_e4m3fn [N, K] and `scale` fp32 [N, 1]."""

    codes: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """How a layout names a weight's tensors, and how it describes them.

    Attributes:
        weight: the tensors of a weight (`PtpcWeight`, or an `NvFp4Weight` whose rows share one global scale), by the
            last part of their names.
        describe: the JSON files that describe a checkpoint, by name, config.json last: of its config, the modules that
            were kept (names, and patterns with `*`), and whether activations are NVFP4 too.
        input: the tensors of a layer's input whose largest magnitude is 2688 times the given scale; None where the
            layout holds no such thing.
    """

    weight: Callable[[Any], dict[str, torch.Tensor]]
    describe: Callable[[Json, Sequence[str], bool], dict[str, Json]]
    input: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None


def _modelopt_weight(weight: nvfp4.NvFp4Weight) -> dict[str, torch.Tensor]:
    scale = weight.global_scale[0].clone()
    return {"weight": weight.codes, "weight_scale": weight.scales, "weight_scale_2": scale}


def _modelopt_input(scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_scale": scale}


def _compressed_tensors_weight(weight: nvfp4.NvFp4Weight) -> dict[str, torch.Tensor]:
    divisor = weight.global_scale[:1].reciprocal()
    return {"weight_packed": weight.codes, "weight_scale": weight.scales, "weight_global_scale": divisor}


def _compressed_tensors_input(scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_global_scale": scale.reciprocal().reshape(1)}


def _ptpc_compressed_tensors_weight(weight: PtpcWeight) -> dict[str, torch.Tensor]:
    return {"weight": weight.codes, "weight_scale": weight.scale}


def _ptpc_modelopt_weight(weight: PtpcWeight) -> dict[str, torch.Tensor]:
    return {"weight": weight.codes, "weight_scale": weight.scale.flatten()}


def _described(config: Json, description: Json) -> dict[str, Json]:
    return {"config.json": {**config, "quantization_config": description}}


def _compressed_tensors(config: Json, scheme: Json, format: Any, kept: Sequence[str]) -> dict[str, Json]:
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus

    group = QuantizationScheme(targets=["Linear"], format=format.value, **scheme)
    description = QuantizationConfig(
        config_groups={"group_0": group},
        format=format.value,
        ignore=[_expression(name) if "*" in name else name for name in kept],
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    return _described(config, {**description.model_dump(), "version": compressed_tensors.__version__})


def _expression(pattern: str) -> str:
    return "re:" + re.escape(pattern).replace(r"\*", ".*")


def _describe_compressed_tensors(config: Json, kept: Sequence[str], w4a4: bool) -> dict[str, Json]:
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16

    return _compressed_tensors(config, NVFP4 if w4a4 else NVFP4A16, CompressionFormat.nvfp4_pack_quantized, kept)


def _describe_ptpc_compressed_tensors(config: Json, kept: Sequence[str], w4a4: bool) -> dict[str, Json]:
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization.quant_scheme import FP8_DYNAMIC

    return _compressed_tensors(config, FP8_DYNAMIC, CompressionFormat.float_quantized, kept)


def _describe_modelopt(config: Json, kept: Sequence[str], w4a4: bool) -> dict[str, Json]:
    codes = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    group = {"weights": codes, "input_activations": codes if w4a4 else None, "targets": ["Linear"]}
    description = {
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        "quant_algo": "NVFP4" if w4a4 else "W4A16_NVFP4",
        "kv_cache_scheme": None,
        "group_size": nvfp4.BLOCK,
        "quant_method": "modelopt",
    }
    return _described(config, description)


def _describe_ptpc_modelopt(config: Json, kept: Sequence[str], w4a4: bool) -> dict[str, Json]:
    codes = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "channel"}
    inputs = {"dynamic": True, "num_bits": 8, "type": "float", "strategy": "token"}
    description = {
        "config_groups": {"group_0": {"weights": codes, "input_activations": inputs, "targets": ["Linear"]}},
        "ignore": list(kept),
        "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
        "kv_cache_scheme": None,
        "quant_method": "modelopt",
    }
    return _described(config, description)


def _describe_modelopt_legacy(config: Json, kept: Sequence[str], w4a4: bool) -> dict[str, Json]:
    description = {
        # Engines know the file by this name.
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": nvfp4.BLOCK,
            "exclude_modules": list(kept),
        },
    }
    return {"hf_quant_config.json": description, "config.json": config}


LAYOUTS = {
    "compressed-tensors": Layout(_compressed_tensors_weight, _describe_compressed_tensors, _compressed_tensors_input),
    "modelopt": Layout(_modelopt_weight, _describe_modelopt, _modelopt_input),
    "modelopt-legacy": Layout(_modelopt_weight, _describe_modelopt_legacy, _modelopt_input),
}
PTPC_LAYOUTS = {
    "compressed-tensors": Layout(_ptpc_compressed_tensors_weight, _describe_ptpc_compressed_tensors),
    "modelopt": Layout(_ptpc_modelopt_weight, _describe_ptpc_modelopt),
}
