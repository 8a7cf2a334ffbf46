# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints made of 16-bit Hugging Face checkpoints, one file at a time.

Every two-dimensional weight becomes NVFP4 but for those of modules that `ignore` names. Three layouts, for the same
values:

    compressed-tensors   `nvfp4-pack-quantized`, described in config.json, as llm-compressor writes it
    modelopt             ModelOpt's tensors, described in config.json (ModelOpt 0.31 and later)
    modelopt-legacy      ModelOpt's tensors, described in hf_quant_config.json (before)
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from llm_quant_rocm.formats import nvfp4

# Embeddings, the output layer and routers stay: engines read them as they are.
IGNORE = ("lm_head", "*embed*", "*.gate", "*.router")
# Layers that engines fuse into one. Upstream takes one global scale for all of a fused layer's rows.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class Report:
    """What `quantize_checkpoint` did: the modules that are NVFP4 now, those that stayed, and all tensors' bytes."""

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Layout:
    """How a layout names a weight's tensors, and where it describes them.

    Attributes:
        tensors: the tensors of module NAME of a weight with one global scale.
        describe: writes the description of a checkpoint: its folder, its config, the modules that were kept.
    """

    tensors: Callable[[str, nvfp4.NvFp4Weight], dict[str, torch.Tensor]]
    describe: Callable[[Path, dict[str, Any], Sequence[str]], None]


def quantize_checkpoint(
    source: Path,
    target: Path,
    layout: str = "compressed-tensors",
    ignore: Sequence[str] = IGNORE,
    share_global_scales: bool = True,
) -> Report:
    """Write `source` (a folder with config.json and safetensors files in bf16, fp16 or fp32) as NVFP4 to `target`.

    Memory holds the NVFP4 tensors of one file and one 16-bit weight. The tokenizer and all other files are copied.
    config.json is written last, so a folder that has it is whole.

    Args:
        target: a folder that is empty or does not exist.
        layout: one of `LAYOUTS`.
        ignore: patterns (`*` matches anything) of modules that stay in 16 bits.
        share_global_scales: layers that engines fuse (q, k, v; gate, up) share the largest of their global scales.
            This project reads each shard with its own, other engines with one for all.

    Raises:
        ValueError: an unknown layout, a target that is not empty, a source that is no such checkpoint, is truncated or
            quantized already, a weight that cannot be NVFP4, or an `ignore` that parts layers that engines fuse.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not an empty folder: name another, or remove it")
    reader = _Reader(source)
    config = reader.config
    chosen = [name for name in reader.files if _is_weight(reader, name) and not _matches(name, ignore)]
    _check_fused(chosen, reader)
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    before = after = 0
    for file in sorted(set(reader.files.values())):
        tensors: dict[str, torch.Tensor] = {}
        for name in (name for name, place in reader.files.items() if place == file):
            tensor = reader.read(name)
            before += tensor.nbytes
            if name not in chosen:
                tensors[name] = tensor
                continue
            shared = _shared_global_scale(reader, name) if share_global_scales else None
            tensors |= LAYOUTS[layout].tensors(_module(name), nvfp4.quantize(tensor, shared, name))
        after += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, file)
        _save(tensors, target / file)
    _copy_other_files(source, target)
    if len(set(weight_map.values())) > 1:
        _write_json(
            target / _INDEX, {"metadata": {"total_size": after}, "weight_map": dict(sorted(weight_map.items()))}
        )
    quantized = tuple(_module(name) for name in chosen)
    kept = tuple(_module(name) for name in reader.files if _is_weight(reader, name) and name not in chosen)
    # A tied output layer has no tensor, but engines build one, and it is not quantized.
    LAYOUTS[layout].describe(target, config, sorted({*kept, *(name for name in ignore if "*" not in name)}))
    return Report(quantized, kept, before, after)


class _Reader:
    """A checkpoint's config and tensors, read one by one."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder, self._open, self._error = folder, safe_open, SafetensorError
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json: name the folder of a Hugging Face checkpoint")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if "quantization_config" in self.config or (folder / "hf_quant_config.json").exists():
            raise ValueError(f"{folder} is quantized already: start from the 16-bit checkpoint it was made of")
        self.files: dict[str, str] = {}
        self._dims: dict[str, int] = {}
        for file in self._file_names():
            with self._opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118, safe_open is no mapping
                    self.files[name], self._dims[name] = file, len(tensors.get_slice(name).get_shape())

    def dims(self, name: str) -> int:
        """How many dimensions a tensor has."""
        return self._dims[name]

    def read(self, name: str) -> torch.Tensor:
        with self._opened(self.files[name]) as tensors:
            return tensors.get_tensor(name)

    def _file_names(self) -> list[str]:
        """The weight files: those of the index where there is one (a folder may hold the weights twice)."""
        index = self._folder / _INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = sorted(file.name for file in self._folder.glob("*.safetensors"))
        if not names:
            raise ValueError(f"{self._folder} has no safetensors files: convert the checkpoint first")
        return names

    def _opened(self, file: str) -> Any:
        path = self._folder / file
        if not path.is_file():
            raise ValueError(f"{path} is missing, but {_INDEX} names it: download the checkpoint again")
        try:
            return self._open(path, framework="pt")
        except self._error as error:
            raise ValueError(f"{path} is not a whole safetensors file ({error}): download it again") from error


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _is_weight(reader: _Reader, name: str) -> bool:
    return name.endswith(".weight") and reader.dims(name) == 2


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(_module(name), pattern) for pattern in patterns)


def _siblings(name: str) -> Iterator[str]:
    """The names of the weights that engines fuse with weight `name`, itself included."""
    parent, _, last = _module(name).rpartition(".")
    for group in FUSED:
        if last in group:
            yield from (f"{parent}.{member}.weight" for member in group)
            return
    yield name


def _check_fused(chosen: Sequence[str], reader: _Reader) -> None:
    for name in chosen:
        for sibling in _siblings(name):
            if sibling in reader.files and sibling not in chosen:
                raise ValueError(
                    f"ignore keeps {_module(sibling)} but not {_module(name)}, and engines make one layer of both: "
                    "ignore both or neither"
                )


def _shared_global_scale(reader: _Reader, name: str) -> torch.Tensor | None:
    """The global scale that serves all layers fused with this one; None where it is alone."""
    others = [sibling for sibling in _siblings(name) if sibling in reader.files]
    if len(others) == 1:
        return None
    return torch.stack([nvfp4.global_scale_of(reader.read(other), other) for other in others]).amax(0)


def _modelopt_tensors(module: str, weight: nvfp4.NvFp4Weight) -> dict[str, torch.Tensor]:
    return {
        f"{module}.weight": weight.codes,
        f"{module}.weight_scale": weight.scales,
        f"{module}.weight_scale_2": weight.global_scale[0].clone(),
    }


def _compressed_tensors_tensors(module: str, weight: nvfp4.NvFp4Weight) -> dict[str, torch.Tensor]:
    return {
        f"{module}.weight_packed": weight.codes,
        f"{module}.weight_scale": weight.scales,
        f"{module}.weight_global_scale": weight.global_scale[:1].reciprocal(),
    }


def _describe_compressed_tensors(folder: Path, config: dict[str, Any], kept: Sequence[str]) -> None:
    import compressed_tensors
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    packed = CompressionFormat.nvfp4_pack_quantized.value
    scheme = QuantizationScheme(targets=["Linear"], format=packed, **NVFP4A16)
    description = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=packed,
        ignore=list(kept),
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    fields = {**description.model_dump(), "version": compressed_tensors.__version__}
    _write_json(folder / "config.json", {**config, "quantization_config": fields})


def _describe_modelopt(folder: Path, config: dict[str, Any], kept: Sequence[str]) -> None:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    description = {
        "config_groups": {"group_0": {"weights": weights, "input_activations": None, "targets": ["Linear"]}},
        "ignore": list(kept),
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_scheme": None,
        "group_size": nvfp4.BLOCK,
        "quant_method": "modelopt",
    }
    _write_json(folder / "config.json", {**config, "quantization_config": description})


def _describe_modelopt_legacy(folder: Path, config: dict[str, Any], kept: Sequence[str]) -> None:
    description = {
        # Engines know the file by this name.
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": nvfp4.BLOCK,
            "exclude_modules": list(kept),
        },
    }
    _write_json(folder / "hf_quant_config.json", description)
    _write_json(folder / "config.json", config)


LAYOUTS = {
    "compressed-tensors": Layout(_compressed_tensors_tensors, _describe_compressed_tensors),
    "modelopt": Layout(_modelopt_tensors, _describe_modelopt),
    "modelopt-legacy": Layout(_modelopt_tensors, _describe_modelopt_legacy),
}


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _copy_other_files(source: Path, target: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_OTHER_WEIGHTS):
            shutil.copy2(file, target / file.name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
