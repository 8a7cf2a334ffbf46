# SPDX-License-Identifier: Apache-2.0
"""An AMD GPU that Triton and the library believe in: CPU tensors are its memory, gcnsim executes its kernels.

`activate` replaces Triton's driver, and makes the library's facts about the CPU those of the architecture. From then
on the library's own Python code (checks, choice of configuration, grid, strides) runs unchanged, Triton's own JIT
derives signature, alignment and pointer ranges from the arguments, and what executes is the machine code it makes.
Everything here is global to the process: use it in a child of the fork server.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gcnsim
import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from llm_quant_rocm import hardware
from tests import engine_habits
from tests.amd.budget import LDS

WAVE = 64
EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


@dataclass(frozen=True)
class Launch:
    """One launch of a compiled kernel.

    Attributes:
        kernel: its name. digest: hash of everything that its compilation depends on.
        constants: constexprs by name, those that specialization made of runtime arguments included.
        warps, stages, lds: Triton's num_warps and num_stages; LDS in bytes.
        grid: programs along x, y and z.
        assembly: the text of its machine code.
    """

    kernel: str
    digest: str
    constants: dict[str, Any]
    warps: int
    stages: int
    lds: int
    grid: tuple[int, int, int]
    assembly: str


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage that `tensor` views, as uint8 [bytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@lru_cache(maxsize=64)
def _program(assembly: str) -> gcnsim.Program:
    """One kernel is launched on many inputs, and by every rank."""
    return gcnsim.parse(assembly)


class _Unwritten(TorchDispatchMode):
    """Knows the storages that torch.empty made and no operator has written since. They are filled with 0xFF: NaN."""

    def __init__(self) -> None:
        super().__init__()
        # By address. Holding a tensor keeps its address from being given to another one.
        self.storages: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.is_write:
                self._wrote(value)
        for value in kwargs.values():  # out=
            self._wrote(value)
        result = function(*args, **kwargs)
        if function._schema.name in EMPTY and result.untyped_storage().nbytes():
            storage_bytes(result).fill_(0xFF)
            self.storages[result.untyped_storage().data_ptr()] = result
        return result

    def _wrote(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.storages.pop(value.untyped_storage().data_ptr(), None)


class _Launcher:
    """What Triton makes of a compiled kernel, once; called for every launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.metadata = metadata
        self.types = list(source.signature.values())
        names = list(source.signature)
        self.constants = {names[path[0]]: value for path, value in source.constants.items()}
        text = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.amdgcn")
        assert text, f"the cache has no assembly of {metadata.name}"
        self.assembly = Path(text).read_text()

    def __call__(self, x: int, y: int, z: int, stream: int, function: None, *rest: Any) -> None:
        values = rest[4:]  # after packed metadata, launch metadata and two hooks
        meta = self.metadata
        launch = Launch(
            meta.name, meta.hash, self.constants, meta.num_warps, meta.num_stages, meta.shared, (x, y, z), self.assembly
        )
        arguments = [value for value, kind in zip(values, self.types, strict=True) if kind != "constexpr"]
        triton.runtime.driver.active.launch(launch, arguments)


class VirtualGpu:
    """Triton's driver interface, as far as a launch uses it, for one architecture.

    Attributes:
        launches: everything launched so far, in order.
        stream: where kernels are launched now; None: each on a stream of its own.
    """

    launcher_cls = _Launcher

    def __init__(self, arch: str, execute: bool) -> None:
        self.arch = arch
        self.execute = execute
        self.utils = self
        self.launches: list[Launch] = []
        self.stream: int | None = None
        self._unwritten = _Unwritten()
        self._tables: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
        self._together: list[tuple[int | None, Launch, list[Any]]] | None = None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.arch, WAVE)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": LDS[self.arch]}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024  # module, function, registers, spills, threads a program may have

    def unload_module(self, module: None) -> None: ...

    def launch(self, launch: Launch, arguments: list[Any]) -> None:
        self.launches.append(launch)
        if self._together is not None:
            self._together.append((self.stream, launch, arguments))
        elif self.execute:
            self._run([(None, launch, arguments)])

    @contextmanager
    def together(self) -> Iterator[None]:
        """Launches inside wait until the end and then run at once, as those of several ranks do; those of one stream
        one after another."""
        self._together = []
        yield
        launches, self._together = self._together, None
        self._run(launches)

    def addresses(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64, for kernels that take addresses of other ranks' memory: in a launch it holds those of `tensors`."""
        table = torch.zeros(len(tensors), dtype=torch.int64)
        self._tables[table.data_ptr()] = table, tensors
        return table

    def _run(self, launches: list[tuple[int | None, Launch, list[Any]]]) -> None:
        memory = gcnsim.Memory()
        copies: dict[int, tuple[torch.Tensor, int]] = {}

        def address(tensor: torch.Tensor, name: str) -> int:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if start not in copies and start in self._tables:
                table, targets = self._tables[start]
                found = [address(target, f"{name}, {index}") for index, target in enumerate(targets)]
                copies[start] = (table.view(torch.uint8), memory.allocate(np.array(found, np.int64), name=name))
            elif start not in copies:
                content = storage_bytes(tensor)
                unwritten = self._unwritten.storages.pop(start, None) is not None
                allocated = (
                    memory.allocate_empty(content.numel(), name=name)
                    if unwritten
                    else memory.allocate(content.numpy(), name=name)
                )
                copies[start] = (content, allocated)
            return copies[start][1] + tensor.data_ptr() - start

        streams: dict[object, list[gcnsim.Launch]] = {}
        for number, (stream, launch, arguments) in enumerate(launches):
            values = [
                address(value, f"argument {index} of {launch.kernel}") if isinstance(value, torch.Tensor) else value
                for index, value in enumerate(arguments)
            ]
            streams.setdefault(("own", number) if stream is None else stream, []).append(
                gcnsim.Launch(
                    _program(launch.assembly),
                    grid=launch.grid,
                    num_warps=launch.warps,
                    kernel_args=values,
                    lds_bytes=launch.lds,
                )
            )
        gcnsim.run(list(streams.values()), memory)
        for content, allocated in copies.values():
            content.copy_(torch.from_numpy(memory.read(allocated, "uint8", tuple(content.shape))))


def activate(arch: str, execute: bool = True) -> VirtualGpu:
    """Makes this process's GPU a virtual one. Without `execute` kernels are compiled and launches only recorded."""
    gpu = VirtualGpu(arch, execute)
    triton.runtime.driver.set_active(gpu)
    engine_habits.take_on()
    hardware.CPU = hardware.amd(arch)
    if execute:
        gpu._unwritten.__enter__()
    return gpu
