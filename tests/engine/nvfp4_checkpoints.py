# SPDX-License-Identifier: Apache-2.0
"""Small NVFP4 checkpoints in each layout that the plugin takes over, and their values in BF16.

The codes and scales are compressed-tensors' own, the layouts are written here: nothing of this project takes part. The
shards of a layer that vLLM fuses have global scales that differ by factors of 2 to 8. Being powers of two, they keep
the BF16 values exact, so a checkpoint and its values are the same function.
"""

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

# One global scale a shard, relative to that of the whole range: unequal within q, k, v and within gate, up.
_SHARE = {"q_proj": 1, "k_proj": 8, "v_proj": 2, "o_proj": 1, "gate_proj": 4, "up_proj": 1, "down_proj": 2}
_QUANTIZED = re.compile(r"(\w+_proj|lm_head)\.weight$")

_SHARED_DIVISOR = 2048.0

# Scales of an FP8 KV cache.
KV_SCALES = {"k": 0.03125, "v": 0.0625}

# 2688 over the largest input that is kept.
INPUT_DIVISOR = 2688 / 16


@dataclass(frozen=True)
class Layer:
    """One layer's tensors by the names of compressed-tensors; `divisor` is its weight_global_scale."""

    packed: torch.Tensor
    scale: torch.Tensor
    divisor: torch.Tensor

    def modelopt(self, name: str, *, activations: bool) -> dict[str, torch.Tensor]:
        """Its tensors in ModelOpt's layout, with or without a scale for activations."""
        tensors = {
            f"{name}.weight": self.packed,
            f"{name}.weight_scale": self.scale,
            f"{name}.weight_scale_2": self.divisor.reciprocal().reshape(()),
        }
        return tensors | ({f"{name}.input_scale": torch.tensor(1 / INPUT_DIVISOR)} if activations else {})

    def values(self) -> torch.Tensor:
        """In BF16."""
        rows, columns = self.packed.shape
        codes = unpack_fp4_from_uint8(self.packed, rows, columns * 2, torch.float32)
        return (codes.unflatten(1, (-1, 16)) * (self.scale.float() / self.divisor).unsqueeze(-1)).flatten(1).bfloat16()


class Quantized:
    """The BF16 checkpoint `source` with every projection and the output head in NVFP4.

    `shared_scale` makes all global scales equal, `calibrated` makes each that of its weight's largest magnitude (which
    BF16 values then approximate).

    Attributes:
        layers: the quantized ones by name, without ".weight".
        rest: all other tensors.
    """

    def __init__(self, source: Path, *, shared_scale: bool = False, calibrated: bool = False) -> None:
        self.source = source
        self.layers: dict[str, Layer] = {}
        self.rest: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(source / "model.safetensors").items():
            if found := _QUANTIZED.search(name):
                divisor = 2688 / tensor.abs().max().item() if calibrated else _divisor(tensor, _SHARE.get(found[1], 1))
                self.layers[name.removesuffix(".weight")] = _quantize(
                    tensor, _SHARED_DIVISOR if shared_scale else divisor
                )
            else:
                self.rest[name] = tensor

    def write_values(self, folder: Path) -> Path:
        """The same function in BF16."""
        return self._write(folder, {f"{name}.weight": layer.values() for name, layer in self.layers.items()}, None)

    def write_modelopt(
        self,
        folder: Path,
        algorithm: str = "NVFP4",
        *,
        ignore: tuple[str, ...] = ("lm_head",),
        legacy: bool = False,
        **settings: Any,
    ) -> Path:
        """ModelOpt's layout; `legacy` puts its configuration into hf_quant_config.json. `settings` are added to it.

        Layers whose names end like an entry of `ignore` stay in BF16.
        """
        tensors = {}
        for name, layer in self.layers.items():
            if name.endswith(ignore):
                tensors[f"{name}.weight"] = layer.values()
                continue
            tensors |= layer.modelopt(name, activations=algorithm == "NVFP4")
        excluded = ["*" + name for name in ignore]
        if legacy:
            quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16}
            quantization |= {"exclude_modules": excluded, **settings}
            self._write(folder, tensors, None)
            (folder / "hf_quant_config.json").write_text(
                json.dumps({"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization})
            )
            return folder
        flat = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": excluded, "group_size": 16}
        return self._write(folder, tensors, {**flat, **settings})

    def write_mixed(self, folder: Path, head: str | None = None) -> Path:
        """ModelOpt's MIXED_PRECISION: attention in FP8, the rest in NVFP4, and scales for an FP8 KV cache. `head` is
        what it calls an output head quantized by, of which it has no tensor.

        FP8 has a scale a tensor, other for q, k and v; it takes over the values of NVFP4.
        """
        tensors, recipes = {}, {}
        for name, layer in self.layers.items():
            if name == "lm_head":
                tensors["lm_head.weight"] = layer.values()
            elif "self_attn" in name:
                values = layer.values().float()
                scale = values.abs().max() / 448
                tensors[f"{name}.weight"] = (values / scale).to(torch.float8_e4m3fn)
                tensors[f"{name}.weight_scale"] = scale
                tensors[f"{name}.input_scale"] = torch.tensor(0.05)
                recipes[name] = {"quant_algo": "FP8"}
            else:
                tensors |= layer.modelopt(name, activations=False)
                recipes[name] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
            for letter, value in KV_SCALES.items():
                if name.endswith(f"{letter}_proj"):
                    tensors[f"{name}.{letter}_scale"] = torch.tensor(value)
        config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": recipes}
        if head:
            recipes["lm_head"] = {"quant_algo": head}
        config |= {
            "ignore": [] if head else ["lm_head"],
            "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
        }
        return self._write(folder, tensors, config)

    def write_compressed_tensors(
        self, folder: Path, *, activations: bool, ignore: tuple[str, ...] = ("lm_head",), **settings: Any
    ) -> Path:
        """The layout of compressed-tensors, with or without scales for activations. `settings` are added.

        Layers whose names end like an entry of `ignore` stay in BF16; the configuration names them by expressions.
        """
        tensors = {}
        for name, layer in self.layers.items():
            if name.endswith(ignore):
                tensors[f"{name}.weight"] = layer.values()
                continue
            tensors[f"{name}.weight_packed"] = layer.packed
            tensors[f"{name}.weight_scale"] = layer.scale
            tensors[f"{name}.weight_global_scale"] = layer.divisor
            if activations:
                tensors[f"{name}.input_global_scale"] = torch.tensor([INPUT_DIVISOR])
        scheme = QuantizationScheme(targets=["Linear"], **(NVFP4 if activations else NVFP4A16))
        config = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
            "ignore": [f"re:.*{re.escape(name)}$" for name in ignore],
        }
        return self._write(folder, tensors, {**config, **settings})

    def _write(self, folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None) -> Path:
        shutil.copytree(self.source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file({**self.rest, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
        if config is not None:
            file = folder / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
        return folder


def _divisor(weight: torch.Tensor, share: int) -> float:
    return 2.0 ** math.floor(math.log2(2688 / weight.abs().max().item())) / share


def _quantize(weight: torch.Tensor, divisor_value: float) -> Layer:
    weight, divisor = weight.float(), torch.tensor([divisor_value])
    blocks = weight.unflatten(1, (-1, 16))
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), NVFP4A16["weights"], divisor)
    tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point, "weight_global_scale": divisor}
    tensors = NVFP4PackedCompressor.compress(tensors, QuantizationScheme(targets=["Linear"], **NVFP4A16))
    return Layer(tensors["weight_packed"], tensors["weight_scale"], divisor)
