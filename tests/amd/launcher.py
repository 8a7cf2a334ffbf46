# SPDX-License-Identifier: Apache-2.0
"""Runs one Triton kernel, or a function of the library, on a virtual AMD GPU in a process of its own."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.amd import isolated, tritons
from tests.amd.virtual_gpu import Launch, activate, storage_bytes


@dataclass(frozen=True)
class _View:
    """A tensor as a view of one of several storages, so that storage, alignment and strides survive the journey."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def run_on(
    arch: str, kernel: Any, grid: tuple[int, ...], *args: Any, triton: str | None = None, **options: Any
) -> Launch:
    """kernel[grid](*args, **options) in the machine code of `arch`; results are in the given CPU tensors afterwards.

    `kernel` is a @triton.jit function of a module; `options` are its constexprs and num_warps, num_stages and so on,
    as in a real launch; `triton` is one of tritons.VERSIONS, without it the newest.

    Raises:
        isolated.Crashed: the compiler aborted.
        gcnsim's errors: the machine code read or wrote where it must not, or never ended.
    """
    return _launch(arch, kernel, grid, args, triton, options, execute=True)


def compile_on(arch: str, kernel: Any, *args: Any, triton: str | None = None, **options: Any) -> Launch:
    """What `run_on` would run, not executed."""
    return _launch(arch, kernel, (1,), args, triton, options, execute=False)


def _launch(
    arch: str,
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    triton: str | None,
    options: dict[str, Any],
    execute: bool,
) -> Launch:
    storages: dict[int, tuple[int, torch.Tensor]] = {}

    def packed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        start = value.untyped_storage().data_ptr()
        index, _ = storages.setdefault(start, (len(storages), storage_bytes(value)))
        return _View(index, value.dtype, value.storage_offset(), tuple(value.shape), value.stride())

    arguments = [packed(value) for value in args]
    contents = [content for _, content in storages.values()]
    name = (kernel.fn.__module__, kernel.fn.__code__.co_filename, kernel.fn.__name__)
    version = triton or tritons.NEWEST or tritons.OLDEST
    results, launch = isolated.call(version, _run, arch, name, grid, contents, arguments, options, execute)
    for content, result in zip(contents, results, strict=True):
        content.copy_(result)
    return launch


def _run(
    arch: str,
    name: tuple[str, str, str],
    grid: tuple[int, ...],
    contents: list[torch.Tensor],
    arguments: list[Any],
    options: dict[str, Any],
    execute: bool,
) -> tuple[list[torch.Tensor], Launch]:
    def unpacked(value: Any) -> Any:
        if not isinstance(value, _View):
            return value
        storage = contents[value.storage].untyped_storage()
        return torch.empty(0, dtype=value.dtype).set_(storage, value.offset, value.shape, value.strides)

    kernel = _kernel(*name)
    values = [unpacked(value) for value in arguments]
    gpu = activate(arch, execute)
    kernel[grid](*values, **options)
    return contents, gpu.launches[-1]


def _kernel(module: str, file: str, name: str) -> Callable[..., Any]:
    """The kernel by its module's name, or where that names another file here, by its file."""
    found = importlib.util.find_spec(module) if module != "__main__" else None
    if not found or not found.origin or not Path(found.origin).samefile(file):
        module = f"kernels_of_{Path(file).stem}"
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec and spec.loader
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return getattr(importlib.import_module(module), name)
