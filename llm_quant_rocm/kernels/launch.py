# SPDX-License-Identifier: Apache-2.0
"""Launches that cost the host little.

Triton asks at every launch what each argument means for compilation, and looks the kernel up by a string of all the
answers: that took longer than the launch itself, compared by hand on an H100's host. Where no CUDA graph has the
launches, in prefill above all, a GPU may have to wait for the host then. What Triton found for a kind of arguments is
kept here.
"""

from typing import Any, NamedTuple

import torch
from triton import FutureKernel, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

# Whether Triton compiles for shorter addresses where a tensor's memory allows it: for AMD.
ADDRESSES_BY_SIZE = torch.version.hip is not None
# So many plans of launches (`Launch`) are kept, the last ones: there is one for each number of rows of each kind of
# layer, and a server meets tens of thousands.
PLANS = 1024


class _Kept(NamedTuple):
    """What is kept of a kind of arguments: what Triton compiled, the values of its constants, and objects whose
    identity is part of the key, which nothing else may come to have."""

    compiled: CompiledKernel
    constants: list[Any]
    identities: tuple[Any, ...]


_kept: dict[tuple[Any, ...], _Kept] = {}


def launch(kernel: Any, grid: tuple[int, ...], /, *args: Any, cluster: int = 1, **options: Any) -> None:
    """`kernel[grid](*args, **options)`. With a `cluster` (Hopper on) each program of the grid is so many, numbered on,
    that run at the same time and reach each other's shared memory; `options` must tell such a kernel from others.

    Tensors, their descriptors and numbers that a kernel is not compiled for are arguments by position, constants and
    Triton's options by name; none is left to a default. Triton launches what is new, what is not its own kernel (an
    interpreted one), and everything while somebody has replaced its `run`.
    """
    _launch(kernel, grid, args, cluster, options)


class Launch:
    """`launch` but for the tensors: `Launch(kernel, grid, *numbers, **options)(*tensors)` is
    `launch(kernel, grid, *tensors, *numbers, **options)`.

    What a call needs beside tensors follows from its sizes, and all layers of a kind have the same ones. So it is
    worked out for the first of them (functions called `_plan`), and of the others only the tensors are looked at.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], /, *numbers: Any, cluster: int = 1, **options: Any) -> None:
        self._kernel, self._grid, self._numbers = kernel, grid, numbers
        self._cluster, self._options = cluster, options
        self._is_tritons = isinstance(kernel, JITFunction)
        self._kept: dict[tuple[Any, ...], _Kept] = {}

    def __call__(self, *tensors: Any) -> None:
        """Tensors, their descriptors, or None."""
        args = (*tensors, *self._numbers)
        if not self._is_tritons or _is_replaced():
            _launch(self._kernel, self._grid, args, self._cluster, self._options)
            return
        device = driver.active.get_current_device()
        kind = (device, *_kinds(tensors))
        kept = self._kept.get(kind)
        if kept is not None:
            _launch_kept(kept, self._grid, device, args)
            return
        kept = _launch(self._kernel, self._grid, args, self._cluster, self._options)
        if kept is not None:
            self._kept[kind] = kept


def _is_replaced() -> bool:
    """Whether somebody has replaced Triton's `run`."""
    return JITFunction.run.__module__ != JITFunction.__module__


def _launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], cluster: int, options: dict[str, Any]
) -> _Kept | None:
    """`launch`; what is kept of it, if anything."""
    if not isinstance(kernel, JITFunction):
        kernel[grid](*args, **options)
        return None
    if _is_replaced():
        if cluster == 1 or _in_clusters(cluster, kernel, grid, args, options):
            kernel[grid](*args, **options)
        return None
    device = driver.active.get_current_device()
    kind = (id(kernel), device, *_kinds(args), *options, *options.values())
    kept = _kept.get(kind)
    if kept is not None:
        _launch_kept(kept, grid, device, args)
        return kept
    if cluster > 1 and not _in_clusters(cluster, kernel, grid, args, options):
        return None
    compiled = kernel[grid](*args, **options)
    if not isinstance(compiled, CompiledKernel):
        return None
    layouts = (getattr(value, "layout", None) for value in args)
    constants = [options[name] for name in kernel.arg_names[len(args) :]]
    kept = _kept[kind] = _Kept(compiled, constants, (kernel, *layouts))
    return kept


def _launch_kept(kept: _Kept, grid: tuple[int, ...], device: int, args: tuple[Any, ...]) -> None:
    compiled, constants, _ = kept
    if _calls(knobs.runtime.launch_enter_hook) or _calls(knobs.runtime.launch_exit_hook):
        compiled[(*grid, 1, 1)](*args, *constants)
        return
    x, y, z, *_ = *grid, 1, 1
    stream = driver.active.get_current_stream(device)
    # What the call above comes to without hooks: it makes a function, and asks for the device again.
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants)


def _calls(hook: Any) -> Any:
    """Whether a hook of Triton's calls anything: it is a chain, or what somebody has put in its place."""
    return getattr(hook, "calls", hook)


def _in_clusters(
    cluster: int, kernel: JITFunction, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> bool:
    """Has all launches of a kernel be in clusters; False where this thread only compiles. Triton tells the driver of
    clusters as of several multiprocessors that run one program, and would compile a kernel for that."""
    compiled = kernel.warmup(*args, grid=grid, **options)
    if isinstance(compiled, FutureKernel) and active_mode.get() is None:
        compiled = compiled.result()
    if compiled is None or isinstance(compiled, FutureKernel):
        return False
    warps, _, shared_bytes = compiled.packed_metadata
    compiled.packed_metadata = warps, cluster, shared_bytes
    return True


def _kinds(args: tuple[Any, ...]) -> list[Any]:
    """What arguments are to a compiler, with no fewer distinctions than Triton's own, to which
    tests/kernels/test_launch.py compares them. Once a launch: what costs least is asked for first."""
    kinds: list[Any] = []
    add = kinds.append
    for value in args:
        kind = type(value)
        if kind is int:
            add(1 if value == 1 else 16 if value & 15 == 0 else 0)
            add(value >> 31)
        elif value is None or kind is float:
            add(kind)
        elif isinstance(value, torch.Tensor):
            add(value.dtype)
            add(value.data_ptr() & 15 == 0)
            if ADDRESSES_BY_SIZE:
                add(value.untyped_storage().nbytes() < 2**31)
        else:
            add(value.base.dtype)
            kinds += value.block_shape
            add(id(getattr(value, "layout", None)))  # the same object for the same layout, as `hopper` has it
            add(value.padding)
    return kinds
