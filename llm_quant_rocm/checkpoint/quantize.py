# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints made of 16-bit Hugging Face checkpoints, one file at a time.

Every two-dimensional weight is quantized but for those of modules that `ignore` names and of Mamba's first kind, by one
of two schemes:

    ptpc_fp8   FP8 with a scale an output channel, for activations quantized per token while serving
    nvfp4      4 bits, for 16-bit activations (W4A16), or, with the largest magnitudes that the layers' inputs reached,
               for hardware that quantizes those to NVFP4 too (W4A4)

in one of these layouts, which hold the same values:

    compressed-tensors   `float-quantized` and `nvfp4-pack-quantized`, described in config.json as by llm-compressor
    modelopt             ModelOpt's tensors, described in config.json (ModelOpt 0.31 and later)
    modelopt-legacy      ModelOpt's NVFP4, described in hf_quant_config.json (before)
"""

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open

from llm_quant_rocm import __version__
from llm_quant_rocm.checkpoint.files import INDEX
from llm_quant_rocm.checkpoint.kept import ENCODERS, IGNORE, TRANSPOSED, fused_with, holds_all_experts, in_mixers
from llm_quant_rocm.checkpoint.layouts import LAYOUTS, PTPC_LAYOUTS, Layout
from llm_quant_rocm.checkpoint.output import REPORT, Output
from llm_quant_rocm.checkpoint.reader import Reader
from llm_quant_rocm.checkpoint.schemes import NvFp4, Ptpc, Scheme
from llm_quant_rocm.checkpoint.survey import has_expert_biases
from llm_quant_rocm.json_files import parsed

SCHEMES: Mapping[str, Mapping[str, Layout]] = {"ptpc_fp8": PTPC_LAYOUTS, "nvfp4": LAYOUTS}

_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")

# Of folders in a checkpoint: chat templates and descriptions, and not the same weights in other formats.
_SMALL = (".json", ".jinja", ".txt", ".py")


@dataclass(frozen=True)
class Report:
    """What `quantize_checkpoint` did.

    Attributes:
        quantized: the modules that are quantized now.
        kept: those that stayed.
        bytes_before, bytes_after: of all tensors.
        errors: by quantized module, ||quantized - weight|| / ||weight||.
        found: whether an earlier call had made all of it already.
    """

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    errors: Mapping[str, float]
    found: bool = field(default=False, compare=False)


def quantize_checkpoint(
    source: Path,
    target: Path,
    layout: str = "compressed-tensors",
    ignore: Sequence[str] = IGNORE,
    share_global_scales: bool = True,
    input_amax: Mapping[str, float] | None = None,
    *,
    scheme: str = "nvfp4",
    search: bool = False,
    device: str = "cpu",
    on_progress: Callable[[int, int], None] = lambda done, whole: None,
) -> Report:
    """Write `source` (a folder with config.json and safetensors files in bf16, fp16 or fp32) quantized to `target`.

    Memory holds the quantized tensors of one file and one 16-bit weight. The tokenizer and all other files are copied.
    config.json is written last, so a folder that has it is whole. A call that was interrupted goes on when it is made
    again; what it makes is the same, byte by byte.

    Args:
        target: a folder that is empty, does not exist, or is of the same call.
        layout: one of `SCHEMES[scheme]`.
        ignore: patterns (`*` matches anything) of the names of modules that stay in 16 bits.
        share_global_scales: in NVFP4, layers that engines fuse (q, k, v; gate, up) share the global scale of their
            largest value. This project reads each shard with its own, other engines with one for all.
        input_amax: by module, the largest magnitude of its input over some text; makes a W4A4 checkpoint.
        scheme: "nvfp4" or "ptpc_fp8".
        search: in NVFP4, take of a few block scales the one that leaves the least squared error.
        device: where to compute: a GPU is faster, and where two block scales of `search` are as good as each other
            within its rounding, it may take the other one.
        on_progress: called with the bytes done and the bytes of all, of `source`'s tensors.

    Raises:
        ValueError, TypeError: an unknown scheme or layout, a target of something else, a source that is no such
            checkpoint, is truncated or quantized already, a weight that cannot be quantized, an `ignore` that matches
            nothing or parts layers that engines fuse, an `input_amax` that lacks a module or is not positive, or none
            where the layout has no W4A16.
        OSError: the disk is too small, or a file or folder of the source may not be read.
    """
    _check_options(scheme, layout, input_amax, search)
    reader = Reader(source)
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the model itself: name another folder")
    others = _others(source, target)
    chosen = _chosen(reader, source, scheme, layout, ignore)
    if input_amax is not None:
        _check_inputs(chosen, input_amax)
    form = SCHEMES[scheme][layout]
    method: Scheme = Ptpc(form)
    if scheme == "nvfp4":
        method = _nvfp4(form, reader, search, share_global_scales, device, input_amax)
    for name in sorted(chosen):
        method.check(name, reader.tensors[name])
    settings = {
        "package": __version__, "scheme": scheme, "layout": layout, "ignore": list(ignore),
        "share_global_scales": share_global_scales, "search": search, "device": device.partition(":")[0],
        "input_amax": input_amax and hashlib.sha256(json.dumps(input_amax, sort_keys=True).encode()).hexdigest(),
        "source": reader.identity(),
    }  # fmt: skip
    output = Output(target, settings)
    if not output.complete:
        _check_room(reader, chosen, method, target, set(output.files))
    with output.written():
        found = output.complete and output.files.keys() >= set(reader.files)
        _write_weights(reader, chosen, method, output, device, on_progress)
        if not output.complete:
            _write_others(source, target, others, reader, chosen, ignore, form, output, input_amax is not None)
    errors = {module: error for record in output.files.values() for module, error in record["errors"].items()}
    return Report(
        tuple(sorted(map(_module, chosen))),
        tuple(sorted(_module(name) for name in reader.weights if name not in chosen)),
        sum(tensor.nbytes for tensor in reader.tensors.values()),
        sum(record["tensor_bytes"] for record in output.files.values()),
        dict(sorted(errors.items())),
        found,
    )


def _check_options(scheme: str, layout: str, input_amax: Mapping[str, float] | None, search: bool) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
    if layout not in SCHEMES[scheme]:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(SCHEMES[scheme])}")
    if scheme != "nvfp4" and (input_amax is not None or search):
        raise ValueError("input_amax and search are for the scheme nvfp4")
    if layout == "modelopt-legacy" and input_amax is None:
        raise ValueError("hf_quant_config.json describes W4A4 only: give input_amax, or take the layout modelopt")


def _chosen(reader: Reader, source: Path, scheme: str, layout: str, ignore: Sequence[str]) -> set[str]:
    """The names of the weights to quantize."""
    _check_ignored(reader, ignore, source)
    if reader.config.get("model_type") in TRANSPOSED:
        raise ValueError(
            f"{source} is a {reader.config['model_type']}, whose weights are transposed in the checkpoint: it cannot "
            "be quantized"
        )
    stay = in_mixers(map(_module, reader.weights))
    chosen = {name for name in reader.weights if not _matches(_module(name), ignore) and _module(name) not in stay}
    if not chosen:
        raise ValueError(f"{source} has no two-dimensional weight that ignore leaves: there is nothing to quantize")
    _check_experts(reader)
    if (scheme, layout) == ("ptpc_fp8", "modelopt") and any(".experts." in name for name in chosen):
        raise ValueError(
            "engines read FP8 experts in ModelOpt's layout with one scale a tensor, not one a channel: take "
            "compressed-tensors, or keep the experts with ignore"
        )
    _check_fused(chosen, reader)
    return chosen


def _nvfp4(
    form: Layout,
    reader: Reader,
    search: bool,
    share_global_scales: bool,
    device: str,
    input_amax: Mapping[str, float] | None,
) -> NvFp4:
    def siblings(name: str) -> list[str]:
        if not share_global_scales:
            return [name]
        others = (f"{module}.weight" for module in fused_with(_module(name)))
        return [other for other in others if other in reader.tensors]

    return NvFp4(form, search, siblings, lambda name: reader.read(name).to(device), input_amax)


def _write_weights(
    reader: Reader,
    chosen: set[str],
    method: Scheme,
    output: Output,
    device: str,
    on_progress: Callable[[int, int], None],
) -> None:
    """Every weight file that is not there yet."""
    done, whole = 0, sum(tensor.nbytes for tensor in reader.tensors.values())
    for file in reader.files:
        names = [name for name, tensor in reader.tensors.items() if tensor.file == file]
        if file in output.files:
            done += sum(reader.tensors[name].nbytes for name in names)
            on_progress(done, whole)
            continue
        tensors: dict[str, torch.Tensor] = {}
        errors: dict[str, float] = {}
        for name in names:
            if name in chosen:
                parts, errors[_module(name)] = _quantized(reader, name, method, device)
                tensors |= parts
                del parts
            else:
                tensors[name] = reader.read(name)
            done += reader.tensors[name].nbytes
            on_progress(done, whole)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        output.save(file, tensors, {"tensor_bytes": nbytes, "errors": errors})
        del tensors  # before the next file is read


def _quantized(reader: Reader, name: str, method: Scheme, device: str) -> tuple[dict[str, torch.Tensor], float]:
    """A weight's new tensors by name, and its relative error; the weight itself is gone on return."""
    parts, error = method.quantize(name, reader.read(name).to(device))
    return {f"{_module(name)}.{part}": value.cpu() for part, value in parts.items()}, float(f"{error:.6g}")


def _write_others(
    source: Path,
    target: Path,
    others: Sequence[Path],
    reader: Reader,
    chosen: set[str],
    ignore: Sequence[str],
    form: Layout,
    output: Output,
    w4a4: bool,
) -> None:
    """All that is no weight file, what describes the checkpoint last."""
    for file in others:
        output.copy(file, str(file.relative_to(source)))
    if (source / INDEX).exists():
        output.write_json(INDEX, _index(target, output))
    kept = {_module(name) for name in reader.weights if name not in chosen}
    # Engines fuse layers of encoders, too, and not all of vLLM's models say by which names of the checkpoint.
    found = {pattern for pattern in ENCODERS if any(fnmatchcase(name, pattern) for name in kept)}
    # A tied output layer has no tensor, but engines build one, and it is not quantized.
    listed = sorted(kept | found.union({"lm_head"}).intersection(ignore))
    for name, content in form.describe(reader.config, listed, w4a4).items():
        output.write_json(name, content)


def _others(source: Path, target: Path) -> list[Path]:
    """The files that are copied as they are.

    Raises:
        OSError: a folder may not be read, so that nobody knows what of it is wanted.
    """
    modules = _modules_folders(source)
    found = []
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in ("config.json", REPORT) and not file.name.endswith(_OTHER_WEIGHTS):
            found.append(file)
    # What only root may read at the root of a disk is none of the checkpoint's.
    folders = [folder for folder in source.glob("[!.]*/") if folder.name != "lost+found"]
    walks = (os.walk(folder, onerror=_raise) for folder in folders)
    for file in sorted(Path(folder, name) for walk in walks for folder, _, names in walk for name in names):
        place = file.relative_to(source)
        wanted = place.parts[0] in modules or place.suffix in _SMALL
        of_another_run = any((source / folder / REPORT).is_file() for folder in place.parents[:-1])
        if file.is_file() and wanted and not of_another_run and not file.resolve().is_relative_to(target.resolve()):
            found.append(file)
    return found


def _raise(error: OSError) -> NoReturn:
    raise error


def _modules_folders(source: Path) -> set[str]:
    """The folders of sentence-transformers' modules, which may have weights of their own."""
    file = source / "modules.json"
    try:
        modules = parsed(file) if file.is_file() else []
        # The first module's path is often "", or ".": the checkpoint's own folder.
        return {first for module in modules for first in Path(module.get("path") or "").parts[:1]}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no list of modules ({error}): download the checkpoint again") from error


def _index(target: Path, output: Output) -> dict[str, Any]:
    """The file of every tensor that was written."""
    weight_map: dict[str, str] = {}
    for file in output.files:
        with safe_open(target / file, framework="pt") as tensors:
            weight_map |= dict.fromkeys(tensors.keys(), file)
    total = sum(record["tensor_bytes"] for record in output.files.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _matches(module: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def _check_ignored(reader: Reader, ignore: Sequence[str], source: Path) -> None:
    """A user's pattern that matches nothing is a mistake, and engines may find something in it."""
    modules = [_module(name) for name in reader.tensors]
    for pattern in ignore:
        if pattern not in IGNORE and not any(_matches(module, [pattern]) for module in modules):
            raise ValueError(
                f"ignore names {pattern!r}, which no module of {source} matches: it must match the whole name, as "
                "'*.o_proj' does"
            )


def _check_experts(reader: Reader) -> None:
    has_biases = has_expert_biases(reader.tensors)
    cure = "serve it in 16 bits" if has_biases else "save the checkpoint so, or serve it with --quantization ptpc_fp8"
    for name, tensor in reader.tensors.items():
        is_weight = ".experts." in name or name.endswith(".weight")
        if is_weight and holds_all_experts(_module(name), tensor.shape):
            raise ValueError(
                f"{name} holds all experts of a layer in one tensor {list(tensor.shape)}; experts are quantized from "
                f"one tensor for each of them{', without biases' * has_biases}: {cure}"
            )


def _check_fused(chosen: set[str], reader: Reader) -> None:
    """Of what engines make one layer of, the shards of a projection or all experts, nothing may be parted."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(reader.weights):
        before, experts, _ = name.partition(".experts.")
        layers[before if experts else fused_with(_module(name))[0]].append(name)
    for together in layers.values():
        kept = [name for name in together if name not in chosen]
        if kept and len(kept) < len(together):
            quantized = next(name for name in together if name in chosen)
            raise ValueError(
                f"ignore keeps {_module(kept[0])} but not {_module(quantized)}, and engines make one layer of both: "
                "ignore both or neither"
            )


def _check_inputs(chosen: set[str], input_amax: Mapping[str, float]) -> None:
    for module in sorted(map(_module, chosen)):
        amax = input_amax.get(module)
        if amax is None or not 0 < amax < float("inf"):
            raise ValueError(f"input_amax of {module} is {amax}; it must be positive: run the model over more text")


def _check_room(reader: Reader, chosen: set[str], method: Scheme, target: Path, whole: set[str]) -> None:
    """Raises OSError where the disk has no room for what is to be written."""
    needed = sum(
        method.nbytes(tensor) if name in chosen else tensor.nbytes
        for name, tensor in reader.tensors.items()
        if tensor.file not in whole
    )
    folder = next(folder for folder in (target, *target.absolute().parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"{folder} has {free // 2**20:,} MiB free, and {target} needs {-(-needed // 2**20):,} MiB")
