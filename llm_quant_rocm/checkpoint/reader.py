# SPDX-License-Identifier: Apache-2.0
"""A 16-bit Hugging Face checkpoint, read tensor by tensor."""

import hashlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llm_quant_rocm.checkpoint.files import (
    BITS,
    INDEX,
    files_without_index,
    read_config,
    read_header,
    read_index,
    refuse_dead_links,
    refuse_missing_parts,
    refuse_twice,
)
from llm_quant_rocm.checkpoint.survey import quantization_of


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is and what it looks like; `dtype` is safetensors' name, for example BF16."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS.get(self.dtype, 8) // 8


class Reader:
    """The tensors and the config of a checkpoint's folder. Making one reads the files' headers alone.

    Attributes:
        config: what config.json says.
        tensors: every tensor, by name.
        weights: the names of the two-dimensional tensors called MODULE.weight.

    Raises:
        ValueError: the folder holds no such checkpoint, one that is quantized already, or a broken one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = read_config(folder)
        refuse_dead_links(folder.iterdir())
        if quantization_of(folder, self.config) is not None:
            raise ValueError(f"{folder} is quantized already: start from the 16-bit checkpoint it was made of")
        index = folder / INDEX
        # Where there is an index, what it names alone: a folder may hold the weights twice.
        expected = read_index(index) if index.is_file() else {}
        files = {folder / file: self._tensors(file) for file in sorted(set(expected.values())) or self._files()}
        refuse_twice(files)
        self.tensors = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
        absent = sorted(expected.keys() - self.tensors.keys())
        if absent:
            raise ValueError(f"{absent[0]} is not in {folder / expected[absent[0]]}, where {INDEX} says it is")
        self.weights = [
            name for name, tensor in self.tensors.items() if name.endswith(".weight") and len(tensor.shape) == 2
        ]

    @property
    def files(self) -> list[str]:
        """The names of the weight files."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    def read(self, name: str) -> torch.Tensor:
        with self._opened(self.tensors[name].file) as tensors:
            return tensors.get_tensor(name)

    def identity(self) -> dict[str, Any]:
        """What tells this checkpoint from another one: config.json's hash, and its files' sizes and times."""
        files = {file: (self._folder / file).stat() for file in self.files}
        return {
            "config": hashlib.sha256((self._folder / "config.json").read_bytes()).hexdigest(),
            "files": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in files.items()},
        }

    def _files(self) -> list[str]:
        names = files_without_index(self._folder)
        refuse_missing_parts(self._folder / name for name in names)
        return names

    def _tensors(self, file: str) -> dict[str, TensorInfo]:
        """Those of one file."""
        with self._opened(file) as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118, it is no mapping
            return {name: TensorInfo(file, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}

    def _opened(self, file: str) -> Any:
        path = self._folder / file
        if not path.is_file():
            raise ValueError(f"{path} is missing, but {INDEX} names it: download the checkpoint again")
        with path.open("rb"):  # of a file that may not be read safetensors says that it is not there
            pass
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            read_header(path)  # says what of it is broken, as `doctor` does, and which tensor is cut off
            raise ValueError(f"{path} is not a whole safetensors file ({error}): download it again") from error
