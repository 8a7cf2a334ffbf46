# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's files: which they are, what their headers say of tensors, and whether they are whole."""

import json
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from llm_quant_rocm.json_files import json_object, parsed

INDEX = "model.safetensors.index.json"
# Of a value, by safetensors' name of its dtype; of those that are left out nothing is checked.
BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip

# AWQ's scale of a layer's inputs, and what is wrong with it.
SCALE_OF_INPUTS = "pre_quant_scale"
IS_OF_AWQ = (
    "is in the checkpoint, AWQ's scale of the layer's inputs, which engines do not multiply by it: export the model "
    "without AWQ"
)

_MISTRALS = "params.json"
_CURE = "copy or download the file again"
# What git leaves in the place of a large file where git-lfs was not there.
_POINTER = b"version https://git-lfs"
_NUMBERED = re.compile(r"(.*-)(\d{5})(-of-(\d{5})\.safetensors)")


@dataclass(frozen=True)
class Tensor:
    """What a header says of one tensor: safetensors' name of its dtype ("BF16", "F8_E4M3", "U8"), shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name, from its header alone; the file is compared with it in length.

    A header is 8 bytes of length and a JSON text that gives the bytes of every tensor, counted from its end.

    Raises:
        ValueError: the file is shorter or longer than its header says, or has none, or stands for one that Git LFS
            keeps, or a tensor's bytes are not as many as its shape takes or not behind those of another; the message
            names the file, and the first such tensor.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(len(_POINTER))
        if first == _POINTER:
            raise ValueError(
                f"{file} is a Git LFS pointer and not the weights: run `git lfs pull` in its folder, or download the "
                "file"
            )
        length = int.from_bytes(first[:8], "little")
        start = 8 + length
        if size < start:
            raise ValueError(f"{file} is truncated in its header, after {size} bytes: {_CURE}")
        stream.seek(8)
        text = stream.read(length)
    try:
        header = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        places = {name: tuple(map(int, entry["data_offsets"])) for name, entry in header.items()}
        tensors = {
            name: Tensor(str(header[name]["dtype"]), tuple(map(operator.index, header[name]["shape"])), end - begin)
            for name, (begin, end) in places.items()
        }
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is broken, its header is no JSON of tensors: {_CURE}") from error
    cut = sorted((start + end, name) for name, (_, end) in places.items() if start + end > size)
    if cut:
        raise ValueError(
            f"{file} is truncated: it has {size} of {cut[-1][0]} bytes, and {cut[0][1]} is the first of "
            f"{len(cut)} tensors that are cut off: {_CURE}"
        )
    whole = start + max((end for _, end in places.values()), default=0)
    if size > whole:  # which safetensors refuses
        raise ValueError(f"{file} is too long: it has {size} bytes, and its tensors end after {whole}: {_CURE}")
    reached = 0
    for name, (begin, end) in sorted(places.items(), key=lambda item: item[1]):
        tensor = tensors[name]
        bits = BITS.get(tensor.dtype)
        if not reached == begin <= end or (bits and tensor.nbytes * 8 != prod(tensor.shape) * bits):
            raise ValueError(f"{file} is broken, the bytes of {name} are not where or as many as they must be: {_CURE}")
        reached = end
    return tensors


def refuse_broken_files(folder: Path) -> None:
    """Look at the safetensors files of the checkpoint in `folder`, which may not exist: those that its index names, or
    all where there is none. With none of them there, nor a link to one, the weights come from elsewhere, or are not
    wanted.

    A tensor may be in two of them (`refuse_twice`): engines take the last, which may be a copy, and files that each
    rank has of its own (--load-format sharded_state) hold the same names.

    Raises:
        ValueError: the index or a file is broken, as `read_header` says, or some files are missing, or gone behind a
            link.
    """
    index = folder / INDEX
    if index.is_file():
        files = sorted({folder / name for name in read_index(index).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
        refuse_missing_parts(files)
    absent = [file for file in files if not file.is_file()]
    refuse_dead_links(absent)
    if len(absent) == len(files):
        return
    if absent:
        raise ValueError(f"{absent[0]} is missing, but {INDEX} names it: download it")
    for file in files:
        read_header(file)


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says.

    Raises:
        ValueError: there is none, or it is broken.
    """
    file = folder / "config.json"
    if not file.is_file():
        missing = f"{folder} has no config.json: name the folder of a Hugging Face checkpoint"
        raise ValueError(_of_mistral(folder) if (folder / _MISTRALS).is_file() else missing)
    config = json_object(file)
    for part in (config, config.get("text_config") or {}):
        for key in ("text_config", "quantization_config", "compression_config"):
            if not isinstance(part.get(key) or {}, dict):
                raise ValueError(f"{key} in {file} is no JSON object: download the checkpoint again")
    return config


def files_without_index(folder: Path) -> list[str]:
    """The names of the safetensors files of a checkpoint that has no index; Mistral's own are none.

    Raises:
        ValueError: there are none.
    """
    theirs = mistrals_files(folder)
    names = sorted(file.name for file in folder.glob("*.safetensors") if file not in theirs and not file.is_dir())
    if not names:
        missing = f"{folder} has no safetensors files: convert the checkpoint first"
        raise ValueError(_of_mistral(folder) if theirs else missing)
    return names


def mistrals_files(folder: Path) -> list[Path]:
    """The weights in Mistral's own format, under names of its own: models come in that, or in both."""
    return sorted(folder.glob("consolidated*.safetensors")) if (folder / _MISTRALS).is_file() else []


def _of_mistral(folder: Path) -> str:
    return (
        f"{folder} is in Mistral's own format ({_MISTRALS}, consolidated.safetensors), which is not read here: "
        "download the model in Hugging Face's, with config.json and model.safetensors"
    )


def refuse_dead_links(files: Iterable[Path]) -> None:
    """A download's cache holds links, to files that may be gone.

    Raises:
        ValueError: one of the files of a checkpoint is such a link.
    """
    for file in sorted(files):
        if file.is_symlink() and not file.exists():
            raise ValueError(
                f"{file} is a link to {file.readlink()}, which is gone: download the checkpoint again, or remove it"
            )


def refuse_missing_parts(files: Iterable[Path]) -> None:
    """Files of a checkpoint without an index say by their names how many they are: model-00001-of-00002.safetensors.

    Raises:
        ValueError: one of them is missing.
    """
    there = {file.name: file for file in files}
    for name, file in there.items():
        numbered = _NUMBERED.fullmatch(name)
        if numbered is None:
            continue
        for number in range(1, int(numbered[4]) + 1):
            part = f"{numbered[1]}{number:05}{numbered[3]}"
            if part not in there:
                raise ValueError(f"{file.with_name(part)} is missing, by the name of {name}: download it")


def refuse_twice(files: Mapping[Path, Collection[str]]) -> None:
    """`files` has the names of the tensors in each file of a checkpoint.

    Raises:
        ValueError: a tensor is in two of them: which one is taken depends on the order in which they are read.
    """
    first: dict[str, Path] = {}
    again = [(name, file) for file, names in files.items() for name in names if first.setdefault(name, file) != file]
    if again:
        name, file = again[0]
        raise ValueError(
            f"{several([name for name, _ in again])} in two files, {first[name]} and {file}: keep the right one, or "
            "download the checkpoint again"
        )


def several(names: Sequence[str]) -> str:
    """The first name and how many more there are, with their verb."""
    return f"{names[0]} and {len(names) - 1} more are" if len(names) > 1 else f"{names[0]} is"


def refuse_scales_of_inputs(folder: Path) -> None:
    """Look at the names in the safetensors files of the checkpoint in `folder`, which may not exist.

    Raises:
        ValueError: AWQ's scale of a layer's inputs is among them, where an engine ends in an AttributeError, or goes on
            without it.
    """
    index = folder / INDEX
    if index.is_file():
        names: Iterable[str] = read_index(index)
    else:
        names = (name for file in sorted(folder.glob("*.safetensors")) for name in read_header(file))
    found = [name for name in names if name.endswith(f".{SCALE_OF_INPUTS}")]
    if found:
        raise ValueError(f"{found[0]} {IS_OF_AWQ}")


def read_scalars(folder: Path, endings: tuple[str, ...]) -> dict[str, float]:
    """The tensors with one value whose names end so, in the safetensors files of `folder`, which may not exist."""
    from safetensors import safe_open  # which whoever reads checkpoints has

    index = folder / INDEX
    if index.is_file():
        files = sorted({folder / file for name, file in read_index(index).items() if name.endswith(endings)})
    else:
        files = sorted(folder.glob("*.safetensors"))
    found: dict[str, float] = {}
    for file in filter(Path.is_file, files):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.endswith(endings)]  # noqa: SIM118, it is no mapping
            single = [name for name in names if prod(tensors.get_slice(name).get_shape()) == 1]
            found |= {name: tensors.get_tensor(name).item() for name in single}
    return found


def read_index(index: Path) -> dict[str, str]:
    """The file of every tensor, by the index of a checkpoint.

    Raises:
        ValueError: it is no such index, or names files out of its folder, which would be read, and written, there.
    """
    try:
        weight_map = parsed(index)["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{index} has no weight_map: download it again") from error
    outside = next((file for file in files.values() if Path(file).is_absolute() or ".." in Path(file).parts), None)
    if outside is not None:
        raise ValueError(f"{index} names {outside}, which is out of its folder: put the files, or links, beside it")
    return files
