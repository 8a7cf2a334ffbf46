# SPDX-License-Identifier: Apache-2.0
"""Quantizes a checkpoint again and again, killed each time one write later, then goes on with what was left.

Run as `python kill_process.py SOURCE FOLDER`: FOLDER/N is what came of the run that was killed at its Nth point. Prints
the number of points. A write has three points: half of the file is there, it is whole but has no name, it has one.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import compressed_tensors.quantization.quant_scheme  # noqa: F401  # once, for all forks
import torch
from safetensors import safe_open

from llm_quant_rocm.checkpoint import output
from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint


def quantize(source: Path, target: Path) -> None:
    quantize_checkpoint(source, target, scheme="nvfp4", search=True)


def killed_at(point: int, source: Path, target: Path) -> None:
    """`quantize`, killed at its `point`th point if it has so many."""
    passed = 0

    def pass_point() -> None:
        nonlocal passed
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    def place(self: output.Output, file: str, write: Any) -> None:
        part = self._folder / f"{file}{output._PART}"
        write(part)
        whole = part.read_bytes()
        part.write_bytes(whole[: len(whole) // 2])
        pass_point()
        part.write_bytes(whole)
        pass_point()
        original_place(self, file, write)
        pass_point()

    original_place = output.Output._place
    output.Output._place = place  # type: ignore[method-assign]
    quantize(source, target)


def in_a_child(function: Any, *arguments: Any) -> int:
    """The wait status of `function` in a fork of this process."""
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(source: Path, folder: Path) -> None:
    torch.set_num_threads(1)  # a fork has no other threads
    point = 0
    while True:
        target = folder / str(point)
        status = in_a_child(killed_at, point, source, target)
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        for file in target.glob("*.safetensors"):
            safe_open(file, framework="pt")
        if (target / "config.json").exists():
            assert "quantization_config" in json.loads((target / "config.json").read_text())
            index = json.loads((target / "model.safetensors.index.json").read_text())
            assert all((target / file).exists() for file in index["weight_map"].values())
        assert in_a_child(quantize, source, target) == 0
        point += 1
    print(point)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
