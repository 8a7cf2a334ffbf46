# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints made of 16-bit Hugging Face checkpoints, one file at a time.

Every two-dimensional weight becomes NVFP4 but for those of modules that `ignore` names. Three layouts, for the same
values:

    compressed-tensors   `nvfp4-pack-quantized`, described in config.json, as llm-compressor writes it
    modelopt             ModelOpt's tensors, described in config.json (ModelOpt 0.31 and later)
    modelopt-legacy      ModelOpt's tensors, described in hf_quant_config.json (before)

A checkpoint is for 16-bit activations (W4A16), or, with the largest magnitudes that the layers' inputs reached, for
hardware that quantizes those to NVFP4 too (W4A4).
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import save_file

from llm_quant_rocm.checkpoint.layouts import LAYOUTS, write_json
from llm_quant_rocm.checkpoint.reader import INDEX, Reader
from llm_quant_rocm.formats import nvfp4

# Embeddings, the output layer and routers stay: engines read them as they are.
IGNORE = ("lm_head", "*embed*", "*.gate", "*.router")
# Layers that engines fuse into one. Upstream takes one global scale for all of a fused layer's rows.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class Report:
    """What `quantize_checkpoint` did: the modules that are NVFP4 now, those that stayed, and all tensors' bytes."""

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def quantize_checkpoint(
    source: Path,
    target: Path,
    layout: str = "compressed-tensors",
    ignore: Sequence[str] = IGNORE,
    share_global_scales: bool = True,
    input_amax: Mapping[str, float] | None = None,
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
        input_amax: by module, the largest magnitude of its input over some text; makes a W4A4 checkpoint.

    Raises:
        ValueError: an unknown layout, a target that is not empty, a source that is no such checkpoint, is truncated or
            quantized already, a weight that cannot be NVFP4, an `ignore` that parts layers that engines fuse, an
            `input_amax` that lacks a module or is not positive, or none where the layout has no W4A16.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if layout == "modelopt-legacy" and input_amax is None:
        raise ValueError("hf_quant_config.json describes W4A4 only: give input_amax, or take the layout modelopt")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not an empty folder: name another, or remove it")
    reader = Reader(source)
    chosen = {name for name in reader.weights if not any(fnmatchcase(_module(name), pattern) for pattern in ignore)}
    _check_fused(chosen, reader)
    if input_amax is not None:
        _check_inputs(chosen, input_amax)
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
            parts = LAYOUTS[layout].weight(nvfp4.quantize(tensor, shared, name))
            if input_amax is not None:
                parts |= LAYOUTS[layout].input(torch.tensor(input_amax[_module(name)] / nvfp4.RANGE))
            tensors |= {f"{_module(name)}.{part}": value for part, value in parts.items()}
        after += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, file)
        save_file(tensors, target / file, metadata={"format": "pt"})
    _copy_other_files(source, target)
    if (source / INDEX).exists():
        write_json(target / INDEX, {"metadata": {"total_size": after}, "weight_map": dict(sorted(weight_map.items()))})
    kept = [_module(name) for name in reader.weights if name not in chosen]
    # A tied output layer has no tensor, but engines build one, and it is not quantized.
    listed = sorted({*kept, *(name for name in ignore if "*" not in name)})
    LAYOUTS[layout].describe(target, reader.config, listed, input_amax is not None)
    return Report(tuple(sorted(map(_module, chosen))), tuple(sorted(kept)), before, after)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _siblings(name: str) -> Iterator[str]:
    """The names of the weights that engines fuse with weight `name`, itself included."""
    parent, _, last = _module(name).rpartition(".")
    for group in FUSED:
        if last in group:
            yield from (f"{parent}.{member}.weight" for member in group)
            return
    yield name


def _check_fused(chosen: set[str], reader: Reader) -> None:
    for name in sorted(chosen):
        for sibling in _siblings(name):
            if sibling in reader.files and sibling not in chosen:
                raise ValueError(
                    f"ignore keeps {_module(sibling)} but not {_module(name)}, and engines make one layer of both: "
                    "ignore both or neither"
                )


def _check_inputs(chosen: set[str], input_amax: Mapping[str, float]) -> None:
    for module in sorted(map(_module, chosen)):
        amax = input_amax.get(module)
        if amax is None or not 0 < amax < float("inf"):
            raise ValueError(f"input_amax of {module} is {amax}; it must be positive: run the model over more text")


def _shared_global_scale(reader: Reader, name: str) -> torch.Tensor | None:
    """The global scale that serves all layers fused with this one; None where it is alone."""
    others = [sibling for sibling in _siblings(name) if sibling in reader.files]
    if len(others) == 1:
        return None
    return torch.stack([nvfp4.global_scale_of(reader.read(other), other) for other in others]).amax(0)


def _copy_other_files(source: Path, target: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_OTHER_WEIGHTS):
            shutil.copy2(file, target / file.name)
