# SPDX-License-Identifier: Apache-2.0
"""How NVFP4 checkpoints name a weight's tensors and describe themselves: compressed-tensors' way and ModelOpt's.

The two conventions hold the same bytes under other names; formats/nvfp4.py says what they mean.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llm_quant_rocm.formats import nvfp4


@dataclass(frozen=True)
class Layout:
    """How a layout names a weight's tensors, and where it describes them.

    Attributes:
        weight: the tensors of a weight whose rows share one global scale, by the last part of their names.
        input: the same of a layer's input, whose largest magnitude is 2688 times the given scale.
        describe: writes the description of a checkpoint: its folder, its config, the modules that were kept, and
            whether activations are quantized too.
    """

    weight: Callable[[nvfp4.NvFp4Weight], dict[str, torch.Tensor]]
    input: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    describe: Callable[[Path, dict[str, Any], Sequence[str], bool], None]


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


def _describe_compressed_tensors(folder: Path, config: dict[str, Any], kept: Sequence[str], w4a4: bool) -> None:
    import compressed_tensors
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
    from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16

    packed = CompressionFormat.nvfp4_pack_quantized.value
    scheme = QuantizationScheme(targets=["Linear"], format=packed, **(NVFP4 if w4a4 else NVFP4A16))
    description = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=packed,
        ignore=list(kept),
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    fields = {**description.model_dump(), "version": compressed_tensors.__version__}
    write_json(folder / "config.json", {**config, "quantization_config": fields})


def _describe_modelopt(folder: Path, config: dict[str, Any], kept: Sequence[str], w4a4: bool) -> None:
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
    write_json(folder / "config.json", {**config, "quantization_config": description})


def _describe_modelopt_legacy(folder: Path, config: dict[str, Any], kept: Sequence[str], w4a4: bool) -> None:
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
    write_json(folder / "hf_quant_config.json", description)
    write_json(folder / "config.json", config)


LAYOUTS = {
    "compressed-tensors": Layout(_compressed_tensors_weight, _compressed_tensors_input, _describe_compressed_tensors),
    "modelopt": Layout(_modelopt_weight, _modelopt_input, _describe_modelopt),
    "modelopt-legacy": Layout(_modelopt_weight, _modelopt_input, _describe_modelopt_legacy),
}


def write_json(path: Path, value: Any) -> None:
    """`value` as a JSON file that people can read."""
    path.write_text(json.dumps(value, indent=2) + "\n")
