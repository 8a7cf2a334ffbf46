# SPDX-License-Identifier: Apache-2.0
"""What `kernels.launch` keeps and launches, as tests/kernels/test_launch.py asks in a process of its own, since Triton
has one driver. No kernel runs: what a GPU's driver would be given is written down."""

import threading
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import LazyDict
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from llm_quant_rocm import hardware
from llm_quant_rocm.kernels import compile_ahead, nvfp4_hopper, nvfp4_wgmma
from llm_quant_rocm.kernels import launch as launches
from tests.kernels.compile_hopper import Driver, nvfp4

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
# Of what a launcher is given: what hooks are told, and the hooks.
HOOKS = slice(6, 9)
SIZES = (0, 1, 2, 8, 15, 16, 17, 48, -1, -16, -(2**31), 2**31 - 16, 2**31, 2**31 + 1, 2**63 - 16, 2**63, 2**63 + 1)


@triton.jit
def one_kernel(value):
    pass


@triton.jit
def add_kernel(x_ptr, y_ptr, n, stride, bias, BLOCK: tl.constexpr, SIGN: tl.constexpr, NOTE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    y = tl.load(x_ptr + at * stride, mask=at < n) * SIGN + bias
    if y_ptr is not None:
        tl.store(y_ptr + at, y, mask=at < n)


class Recorder(Driver):
    """A driver that runs nothing."""

    def __init__(self, arch: str) -> None:
        super().__init__(TARGETS[arch])
        self.launched: list[tuple[Any, ...]] = []
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, hash(binary), 0, 0, 1 << 20

    def launcher_cls(self, source: Any, metadata: Any) -> Any:  # type: ignore[override]
        return lambda *args: self.launched.append(args)


def use(recorder: Recorder) -> None:
    """Makes the launches those of the recorder's architecture."""
    driver.set_active(recorder)
    launches.ADDRESSES_BY_SIZE = recorder.get_current_target().backend == "hip"


def values(arch: str) -> dict[str, Any]:
    """Arguments of all kinds, some of which are the same to Triton."""
    found: dict[str, Any] = {f"number {size}": size for size in SIZES}
    found |= {"nothing": None, "half": 0.5, "one": 1.0, "other nothing": None}
    memory = torch.empty(2**31, dtype=torch.uint8)  # of which no page is touched
    for name, tensor in {
        "small": torch.empty(64, dtype=torch.uint8), "another": torch.empty(64, dtype=torch.uint8),
        "large": memory, "a part": memory[:64], "just small": torch.empty(2**31 - 1, dtype=torch.uint8),
    }.items():  # fmt: skip
        for dtype, begin in product((torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn), (0, 4, 16)):
            found[f"{name} {dtype} {begin}"] = tensor[begin : begin + 32].view(dtype)
    found["parameter"] = torch.nn.Parameter(torch.empty(64), requires_grad=False)
    if arch == "sm_90":
        layouts = {swizzle: gl.NVMMASharedLayout(swizzle, 16, 2) for swizzle in (64, 128)}
        for rows, swizzle, columns in product((8, 16), layouts, (64, 128)):
            tensor = torch.empty((64, 128), dtype=torch.bfloat16)
            for name in ("x", "y"):
                found[f"tiles of {name} {rows} {columns} {swizzle}"] = TensorDescriptor.from_tensor(
                    tensor, [rows, columns], layouts[swizzle]
                )
    return found


def coarser(arch: str) -> tuple[int, int, list[str]]:
    """How many kinds Triton has of `values`, how many the launches have, and what they take for one kind that Triton
    does not."""
    use(Recorder(arch))
    *_, binder = one_kernel.create_binder()
    triton_kinds: dict[str, str] = {}
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for name, value in values(arch).items():
        _, specialization, _ = binder(value)
        triton_kinds[name] = str(specialization)
        kinds.setdefault(tuple(launches._kinds((value,))), []).append(name)
    wrong = [f"{names[0]} and {name}" for names in kinds.values() for name in names
             if triton_kinds[name] != triton_kinds[names[0]]]  # fmt: skip
    return len(set(triton_kinds.values())), len(kinds), wrong


def plain(value: Any) -> Any:
    """A value of a launch that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.dtype
    if isinstance(value, LazyDict):  # what profilers are told
        return value.data
    if hasattr(value, "block_shape"):
        return plain(value.base), *map(tuple, (value.shape, value.strides, value.block_shape)), str(value.layout)
    return value


def without_hooks(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """A launch without what only hooks are told."""
    return given[: HOOKS.start] + given[HOOKS.stop :]


def twice(arch: str) -> tuple[list[Any], list[Any], int]:
    """What the driver is given by Triton's own launches and by ours, each the second of its kind, and how many kinds
    ours keep."""
    recorder = Recorder(arch)
    use(recorder)
    x, y = torch.zeros(64), torch.zeros(65)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, out, n, stride, bias), {"NOTE": "a", "BLOCK": block, "num_warps": warps, "SIGN": -1.0})
        for out, n, stride, bias, block, warps in (
            (y, 64, 1, 0.5, 64, 4), (y, 48, 1, 1.5, 64, 4), (None, 64, 1, 0.5, 64, 4), (y[1:], 64, 1, 0.5, 64, 4),
            (y, 63, 1, 0.5, 64, 4), (y, 64, 2, 0.5, 32, 4), (y, 64, 2, 0.5, 32, 2),
        )
    ]  # fmt: skip
    theirs, ours = [], []
    for args, options in calls:
        add_kernel[(3, 2)](*args, **options)
        theirs.append(list(map(plain, without_hooks(recorder.launched.pop()))))
    for kept, (args, options) in product((False, True), calls):
        launches.launch(add_kernel, (3, 2), *args, **options)
        (given,) = recorder.launched
        recorder.launched.clear()
        if kept:
            assert given[HOOKS] == (None, None, None)
            ours.append(list(map(plain, without_hooks(given))))
    return theirs, ours, len(launches._kept)


def planned(arch: str) -> tuple[list[Any], list[Any], list[str]]:
    """What the driver is given by Triton's own launches and by those of one plan, each first by the plan's and then as
    it was kept, and who launched while somebody had replaced Triton's `run`."""
    recorder = Recorder(arch)
    use(recorder)
    options: dict[str, Any] = {"NOTE": "a", "BLOCK": 64, "num_warps": 4, "SIGN": -1.0}
    x, y = torch.zeros(64), torch.zeros(65)
    given = [(x, y), (x, y[1:]), (x, None), (y, x), (x.bfloat16(), y)]
    theirs, ours = [], []
    for tensors in given:
        add_kernel[(3, 2)](*tensors, 48, 1, 0.5, **options)
        theirs.append(list(map(plain, without_hooks(recorder.launched.pop()))))
    plan = launches.Launch(add_kernel, (3, 2), 48, 1, 0.5, **options)
    for _ in range(2):
        ours.clear()
        for tensors in given:
            plan(*tensors)
            ours.append(list(map(plain, without_hooks(recorder.launched.pop()))))
    said: list[str] = []
    run: Any = JITFunction.run
    function: Any = JITFunction
    function.run = lambda kernel, *args, **options: said.append("somebody")
    plan(x, y)
    function.run = run
    plan(x, y)
    said.extend(["the driver"] * len(recorder.launched))
    return theirs, ours, said


def descriptors() -> tuple[list[Any], list[Any], int]:
    """`twice`, for a kernel that takes descriptors; its first launch is Triton's."""
    recorder = Recorder("sm_90")
    use(recorder)
    weight, config = nvfp4(512, 1024), nvfp4_wgmma.Config(8, 64, 128, stages=2)
    x, out = torch.zeros(8, 1024, dtype=torch.bfloat16), torch.zeros(8, 512, dtype=torch.bfloat16)
    for _ in range(2):
        nvfp4_wgmma.gemm(x, *weight, None, 512, hardware.nvidia(9, 0), config, nvfp4_hopper.nvfp4_wgmma.DENSE, out)
    theirs, ours = (list(map(plain, without_hooks(given))) for given in recorder.launched)
    return theirs, ours, len(launches._kept)


def hooked(arch: str) -> tuple[list[Any], list[Any]]:
    """What the driver is given, by Triton's own launch and by a kept one of ours, while a hook is called before each
    launch, then one after each, and then one that stands where Triton has its chain of hooks."""
    recorder = Recorder(arch)
    use(recorder)
    args, options = (torch.zeros(64), None, 64, 1, 0.5), {"BLOCK": 64, "SIGN": 1.0, "NOTE": "a"}
    launches.launch(add_kernel, (3,), *args, **options)
    recorder.launched.clear()

    def both() -> None:
        add_kernel[(3,)](*args, **options)
        launches.launch(add_kernel, (3,), *args, **options)

    runtime: Any = knobs.runtime
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hooks.add(print)
        both()
        hooks.remove(print)
    with runtime.scope():
        runtime.launch_enter_hook = print
        both()
    theirs, ours = ([list(map(plain, given)) for given in recorder.launched[first::2]] for first in (0, 1))
    return theirs, ours


def clusters() -> list[int]:
    """Programs in a cluster that the driver is told of: by the first launch of a kernel, the next, one of a kernel that
    was compiled ahead, one of either kind while somebody has replaced Triton's `run` with another that launches, and
    one in a thread while another compiles ahead; and by the first launch of a plan and the next."""
    recorder = Recorder("sm_90")
    use(recorder)
    run: Any = JITFunction.run
    function: Any = JITFunction

    def launch(block: int) -> None:
        args = torch.zeros(64), None, 64, 1, 0.5
        launches.launch(add_kernel, (5,), *args, cluster=3, BLOCK=block, SIGN=1.0, NOTE="a")

    plan = launches.Launch(add_kernel, (5,), 64, 1, 0.5, cluster=3, BLOCK=128, SIGN=1.0, NOTE="a")
    ahead: Any = compile_ahead
    ahead.job_of = lambda key, compile_fn: None  # in this process
    launch(64)
    launch(64)
    with compile_ahead.compile_ahead():
        launch(32)
    assert len(recorder.launched) == 2
    launch(32)
    with compile_ahead.compile_ahead():
        launch(8)
    function.run = lambda kernel, *args, **options: run(kernel, *args, **options)
    launch(16)
    launch(8)
    function.run = run
    with compile_ahead.compile_ahead():
        launch(4)
        other = threading.Thread(target=launch, args=(4,))
        other.start()
    other.join()
    plan(torch.zeros(64), None)
    plan(torch.zeros(64), None)
    assert {given[:3] for given in recorder.launched} == {(5, 1, 1)}
    return [given[5][1] for given in recorder.launched]


def replaced() -> list[str]:
    """Who launches, before, while and after somebody has replaced Triton's `run`."""
    recorder = Recorder("gfx942")
    use(recorder)
    said: list[str] = []
    run: Any = JITFunction.run

    def launch() -> None:
        launches.launch(add_kernel, (1,), torch.zeros(64), None, 64, 1, 0.5, BLOCK=64, SIGN=1.0, NOTE="a")
        said.extend(["the driver"] * len(recorder.launched))
        recorder.launched.clear()

    launch()
    function: Any = JITFunction
    function.run = lambda kernel, *args, **options: said.append("somebody")
    launch()
    function.run = run
    launch()
    return said
