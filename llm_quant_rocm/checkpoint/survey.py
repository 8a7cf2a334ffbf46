# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's folder holds, by its JSON files and the headers of its weights, and what is wrong with it.

No weight is read, so a model of any size takes seconds.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_quant_rocm.checkpoint.expert_tensors import one_for_all
from llm_quant_rocm.checkpoint.files import (
    INDEX,
    IS_OF_AWQ,
    SCALE_OF_INPUTS,
    Tensor,
    files_without_index,
    read_config,
    read_header,
    read_index,
    refuse_dead_links,
    refuse_missing_parts,
    refuse_twice,
    several,
)
from llm_quant_rocm.checkpoint.linear_tensors import OTHER_BLOCK_SCALES, SIGNED_CODES
from llm_quant_rocm.checkpoint.nvfp4_kinds import checkpoint_kind, modelopt_settings
from llm_quant_rocm.checkpoint.online_layers import is_embedding, is_head, is_router
from llm_quant_rocm.formats.nvfp4 import BLOCK
from llm_quant_rocm.json_files import json_object

NVFP4, MXFP4, FP8, OTHER = "NVFP4", "MXFP4", "FP8", "other"
_FLOATS = {"BF16", "F16", "F32"}
# Of the last parts of names: modules that multiply nothing, and output heads, which engines keep.
_NO_LINEAR = ("embed", "lm_head", "wte", "wpe", "norm", "conv")
# An NVFP4 weight's tensors by its codes' name: ModelOpt's and compressed-tensors'.
_NVFP4_PARTS = {
    "weight": ("weight_scale", "weight_scale_2"),
    "weight_packed": ("weight_scale", "weight_global_scale"),
}
# gpt-oss has MXFP4 codes [E, N, K / 32, 16] and exponents [E, N, K / 32] beside each other, without a module.
_MXFP4_PARTS = ("_blocks", "_scales")
# Llama 4 has NVFP4 codes of all experts in one tensor, experts.down_proj, and its scales beside it like this.
_SCALES_OF_EXPERTS = re.compile(r"_((weight|input)_scale(_2)?|(weight|input)_global_scale)$")
_EXPONENTS = {"U8", "F8_E8M0"}
_EXPERT_BIASES = (".bias", "_proj_bias")
_FETCH = "fetch or export the checkpoint again"


@dataclass(frozen=True)
class Module:
    """A module with a weight.

    Attributes:
        kind: NVFP4, MXFP4, FP8, OTHER (another quantization), or safetensors' name of a dtype ("BF16").
        shape: of the weight's values, [N, K] for a linear layer.
        nbytes: of all tensors of the module.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def is_quantized(self) -> bool:
        return self.kind in (NVFP4, MXFP4, FP8, OTHER)

    @property
    def is_linear(self) -> bool:
        """Whether it multiplies activations, and is none that engines keep in 16 bits."""
        leaf = self.name.rpartition(".")[2]
        stays = is_router(self.name) or is_head(self.name) or is_embedding(self.name)
        return len(self.shape) > 1 and not stays and not any(part in leaf for part in _NO_LINEAR)


@dataclass(frozen=True)
class Survey:
    """A folder's contents.

    Attributes:
        config: config.json.
        quantization: how the checkpoint says that it is quantized, from config.json or hf_quant_config.json; None
            where neither does.
        modules: those with a weight, in the order of their names.
        has_expert_biases: whether routed experts add biases.
        faults: what is broken or missing, one sentence each, with the cure.
    """

    config: dict[str, Any]
    quantization: dict[str, Any] | None
    modules: list[Module]
    has_expert_biases: bool
    faults: list[str]


def survey(folder: Path) -> Survey:
    """Read what `folder` says of itself.

    Raises:
        ValueError: it holds no checkpoint at all, or links to files that are gone.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder here: download the model first (hf download MODEL --local-dir FOLDER)")
    faults: list[str] = []
    config = read_config(folder)
    refuse_dead_links(folder.iterdir())
    tensors = _tensors(folder, faults)
    quantization = quantization_of(folder, config)
    # Another description's tensors need not be whole by NVFP4's names.
    promised = quantization is None or checkpoint_kind(quantization) is not None
    return Survey(config, quantization, _modules(tensors, promised, faults), has_expert_biases(tensors), faults)


def has_expert_biases(tensors: Iterable[str]) -> bool:
    """Whether routed experts' biases are among tensors of these names."""
    return any(".experts." in name and name.endswith(_EXPERT_BIASES) for name in tensors)


def quantization_of(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """What the checkpoint says of its quantization, None where that is nothing; an empty description is none, as to
    vLLM. Older ModelOpts say all of it, or of a mixed one the layers, in a file of its own. Older compressed-tensors
    have another key, which engines read where the others are not there."""
    inside = config.get("text_config") or {}
    named = config.get("quantization_config") or inside.get("quantization_config")
    found = named or config.get("compression_config") or None
    if not (folder / "hf_quant_config.json").is_file():
        return found
    older = json_object(folder / "hf_quant_config.json")
    if found is None:
        return older
    settings, older_settings = modelopt_settings(found) or {}, modelopt_settings(older) or {}
    settings.setdefault("quantized_layers", older_settings.get("quantized_layers"))
    return found


def _tensors(folder: Path, faults: list[str]) -> dict[str, Tensor]:
    """All tensors of the files that the index names, or of all files where there is no index."""
    index = folder / INDEX
    promised: dict[str, str] = {}
    if index.is_file():
        try:
            promised = read_index(index)
        except ValueError as error:
            faults.append(str(error))
    names = sorted(set(promised.values()))
    if not names:
        try:
            names = files_without_index(folder)
            refuse_missing_parts(folder / name for name in names)
        except ValueError as error:
            faults.append(str(error))
    read: dict[Path, dict[str, Tensor]] = {}
    for name in names:
        if not (folder / name).is_file():
            faults.append(f"{folder / name} is missing, but {INDEX} names it: download it")
            continue
        try:
            read[folder / name] = read_header(folder / name)
        except ValueError as error:
            faults.append(str(error))
    try:
        refuse_twice(read)
    except ValueError as error:
        faults.append(str(error))
    tensors = {name: tensor for found in read.values() for name, tensor in found.items()}
    absent = sorted(tensor for tensor, file in promised.items() if folder / file in read and tensor not in tensors)
    if absent:
        faults.append(f"{several(absent)} in {INDEX} and in no file: {_FETCH}")
    return tensors


def _modules(tensors: dict[str, Tensor], promised: bool, faults: list[str]) -> list[Module]:
    """The modules of all tensors; `promised` says whether codes in bytes have to be NVFP4's."""
    parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        scale = _SCALES_OF_EXPERTS.search(name)
        # Experts in one tensor have no parts: experts.gate_up_proj is a module of its own.
        if scale and name[: scale.start()] in tensors:
            module, part = name[: scale.start()], scale[1]
        elif tensor.dtype == "U8" and len(tensor.shape) > 2 and part.endswith(_MXFP4_PARTS):
            module, _, part = name.rpartition("_")
        elif len(tensor.shape) == 3 and ".experts." in name and not part.startswith("weight"):
            module, part = name, "weight"
        parts[module][part] = tensor
    if promised:
        _find_signed_codes(parts, faults)
    of_modules: list[str] = []
    found = [_module(name, parts[name], promised, of_modules) for name in sorted(parts)]
    faults += one_of_each(of_modules)
    return [module for module in found if module]


def one_of_each(faults: Iterable[str]) -> Iterator[str]:
    """Of the faults ("what: cure") that differ in numbers alone, as those of a model's layers do, the first, and how
    many more there are."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for fault in faults:
        alike[re.sub(r"\d+", "*", fault)].append(fault)
    for first, *more in alike.values():
        what, _, cure = first.rpartition(": ")
        yield f"{what}, and {len(more)} more such: {cure}" if more else first


def _find_signed_codes(parts: dict[str, dict[str, Tensor]], faults: list[str]) -> None:
    """A fault where NVFP4's codes are int8, which `linear_tensors` and `expert_tensors` refuse as they arrive."""
    signed = [f"{name}.{codes}" for name in sorted(parts) for codes in _NVFP4_PARTS if _are_signed(parts[name], codes)]
    if signed:
        faults.append(f"{several(signed)} {SIGNED_CODES}")


def _are_signed(parts: dict[str, Tensor], codes: str) -> bool:
    """Whether `codes` are int8 beside a global scale. Weights in INT8, 8 bits each, have none."""
    return codes in parts and parts[codes].dtype == "I8" and _NVFP4_PARTS[codes][-1] in parts


def _module(name: str, parts: dict[str, Tensor], promised: bool, faults: list[str]) -> Module | None:
    nbytes = sum(tensor.nbytes for tensor in parts.values())
    if "blocks" in parts:
        *leading, blocks, size = parts["blocks"].shape
        return Module(name, MXFP4, (*leading, 2 * blocks * size), nbytes)
    for codes, others in _NVFP4_PARTS.items():
        weight = parts.get(codes)
        if weight is None or len(weight.shape) < 2:
            continue
        if weight.dtype != "U8" and not (promised and _are_signed(parts, codes)):
            continue
        shape = (*weight.shape[:-1], 2 * weight.shape[-1])
        scales = parts.get("weight_scale")
        if scales and scales.dtype in _EXPONENTS and others[-1] not in parts:  # MXFP4 has no global scale
            return Module(name, MXFP4, shape, nbytes)
        absent = [part for part in others if part not in parts]
        if absent and not promised:
            return Module(name, OTHER, weight.shape, nbytes)
        if len(shape) > 2:
            faults.append(one_for_all(name, weight.shape))
            return Module(name, NVFP4, shape, nbytes)
        if absent:
            faults.append(f"{name}.{absent[0]} is missing from the checkpoint: {_FETCH}")
        if scales and scales.dtype != "F8_E4M3":
            faults.append(f"{name}.weight_scale is {scales.dtype} {OTHER_BLOCK_SCALES}")
        if SCALE_OF_INPUTS in parts:
            faults.append(f"{name}.{SCALE_OF_INPUTS} {IS_OF_AWQ}")
        expected = (*shape[:-1], shape[-1] // BLOCK)
        if scales and scales.shape != expected:
            faults.append(
                f"{name}.weight_scale has shape {list(scales.shape)}, and {list(shape)} values in NVFP4 need "
                f"{list(expected)}: padded or swizzled scales are not read; export the checkpoint without"
            )
        return Module(name, NVFP4, shape, nbytes)
    weight = parts.get("weight")
    if weight is None:
        packed = next((parts[part] for part in ("weight_packed", "qweight", "w_q") if part in parts), None)
        absent = [f"{name}.{codes}" for codes, others in _NVFP4_PARTS.items() if others[-1] in parts]
        if promised and absent and not packed:
            faults.append(f"{absent[0]} is missing from the checkpoint, which has its scales: {_FETCH}")
        return Module(name, OTHER, packed.shape, nbytes) if packed else None
    if weight.dtype in _FLOATS:
        return Module(name, weight.dtype, weight.shape, nbytes)
    return Module(name, FP8 if weight.dtype.startswith("F8_") else OTHER, weight.shape, nbytes)
