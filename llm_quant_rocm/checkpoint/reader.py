# SPDX-License-Identifier: Apache-2.0
"""A 16-bit Hugging Face checkpoint, read tensor by tensor."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"


class Reader:
    """The tensors and the config of a checkpoint's folder.

    Attributes:
        config: what config.json says.
        files: the file of every tensor, by the tensor's name.
        weights: the names of the two-dimensional tensors called MODULE.weight.

    Raises:
        ValueError: the folder holds no such checkpoint, one that is quantized already, or a broken one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json: name the folder of a Hugging Face checkpoint")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if "quantization_config" in self.config or (folder / "hf_quant_config.json").exists():
            raise ValueError(f"{folder} is quantized already: start from the 16-bit checkpoint it was made of")
        self.files: dict[str, str] = {}
        self.weights: list[str] = []
        for file in self._file_names():
            with self._opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118, safe_open is no mapping
                    self.files[name] = file
                    if name.endswith(".weight") and len(tensors.get_slice(name).get_shape()) == 2:
                        self.weights.append(name)

    def read(self, name: str) -> torch.Tensor:
        with self._opened(self.files[name]) as tensors:
            return tensors.get_tensor(name)

    def _file_names(self) -> list[str]:
        """The weight files: those of the index where there is one (a folder may hold the weights twice)."""
        index = self._folder / INDEX
        if index.is_file():
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        names = sorted(file.name for file in self._folder.glob("*.safetensors"))
        if not names:
            raise ValueError(f"{self._folder} has no safetensors files: convert the checkpoint first")
        return names

    def _opened(self, file: str) -> Any:
        path = self._folder / file
        if not path.is_file():
            raise ValueError(f"{path} is missing, but {INDEX} names it: download the checkpoint again")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file ({error}): download it again") from error
