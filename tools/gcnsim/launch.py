# SPDX-License-Identifier: Apache-2.0
"""A launch: the kernel arguments, the registers a wave starts with, and the workgroups that are resident at a time."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gcnsim.decode import LDS_LIMIT, Code, decode
from gcnsim.errors import LdsOverflow
from gcnsim.lds import Lds, Private
from gcnsim.memory import Memory
from gcnsim.operands import FLOAT_MODE, FP16_OVFL, MODE
from gcnsim.program import Argument, Program
from gcnsim.registers import LANE, LANES, U32, Cohort, initial_cohort

# The user registers of the ABI in their order: descriptor name, number of registers.
USER_SGPRS = (
    ("private_segment_buffer", 4),
    ("dispatch_ptr", 2),
    ("queue_ptr", 2),
    ("kernarg_segment_ptr", 2),
    ("dispatch_id", 2),
    ("flat_scratch_init", 2),
    ("private_segment_size", 1),
)
# The scratch resource of gfx90a: swizzled, its base is of no account, since scratch is addressed by lane.
SCRATCH_RESOURCE = (0, 1 << 31, 0xFFFFFFFF, 0)
KERNARG_PADDING = 256
KernelArgument = int | float | bytes | np.generic


@dataclass
class Launch:
    """One kernel over a grid of workgroups.

    `kernel_args` are the values of the kernel's arguments in order, without those the compiler removed: addresses and
    integers as int, floats as float (or numpy scalars, or bytes, copied as they are). Arguments that are not given
    are zero, as Triton's scratch pointers at the end are, but for those the runtime fills in (`hidden_arguments`).
    `lds_bytes` is Triton's metadata.shared.
    """

    program: Program
    grid: tuple[int, int, int]
    num_warps: int
    kernel_args: Sequence[KernelArgument]
    lds_bytes: int = 0
    name: str = ""
    code: Code = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.name = self.name or self.program.kernel
        self.lds_bytes = max(self.lds_bytes, self.program.metadata.lds)
        self.code = decode(self.program)
        lanes = self.num_warps * LANES
        most = self.program.metadata.max_workgroup
        if not 0 < lanes <= most:
            raise ValueError(f"{self.name}: a workgroup of {lanes} lanes, but the kernel was compiled for {most}")
        limit = LDS_LIMIT[self.program.arch]
        if self.lds_bytes > limit:
            raise LdsOverflow(
                f"{self.name} asks for {self.lds_bytes} bytes of LDS a workgroup; {self.program.arch} has {limit}"
            )

    def workgroups(self) -> Iterator[tuple[int, int, int]]:
        x, y, z = self.grid
        return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))


class Residents:
    """The workgroups of a launch that run at a time, and what they share: memory, LDS, scratch."""

    def __init__(
        self,
        launch: Launch,
        memory: Memory,
        kernarg: int,
        workgroups: list[tuple[int, int, int]],
        detect_races: bool,
    ):
        self.launch = launch
        self.memory = memory
        self.workgroups = workgroups
        self.waves_per_workgroup = launch.num_warps
        self.lds = Lds(len(workgroups), launch.lds_bytes, detect_races and launch.num_warps > 1)
        lanes = len(workgroups) * launch.num_warps * LANES
        self.scratch = Private(lanes, launch.program.metadata.scratch, "the scratch of resident lane")
        self.clock = 0
        self._kernarg = kernarg

    def start(self) -> Cohort:
        """All waves of the resident workgroups, at the kernel's first instruction."""
        launch, program = self.launch, self.launch.program
        count = len(self.workgroups)
        workgroup = np.repeat(np.arange(count), launch.num_warps)
        wave = np.tile(np.arange(launch.num_warps), count)
        entry = program.labels[program.kernel]
        cohort = initial_cohort(program.vector_registers, workgroup, wave, entry, self)
        cohort.scalar[:, MODE] = FLOAT_MODE | (FP16_OVFL if program.descriptor.get("fp16_overflow") else 0)
        cohort.vector[0] = (wave[:, None] * LANES + LANE).astype(U32)
        scalars, place = cohort.scalar, 0
        values = {
            "private_segment_buffer": SCRATCH_RESOURCE,
            "kernarg_segment_ptr": (self._kernarg & 0xFFFFFFFF, self._kernarg >> 32),
        }
        for name, registers in USER_SGPRS:
            if program.descriptor.get(f"user_sgpr_{name}"):
                scalars[:, place : place + registers] = values.get(name, (0,) * registers)
                place += registers
        # The first arguments may come in registers as well; kernels begin with loading the same ones themselves.
        first = program.descriptor.get("user_sgpr_kernarg_preload_offset", 0)
        preloaded = program.descriptor.get("user_sgpr_kernarg_preload_length", 0)
        arguments = self.memory.read(self._kernarg + 4 * first, U32, preloaded)
        scalars[:, place : place + preloaded] = arguments
        place = program.descriptor.get("user_sgpr_count", place + preloaded)
        ids = np.array(self.workgroups, U32)[workgroup]
        for axis, letter in enumerate("xyz"):
            if program.descriptor.get(f"system_sgpr_workgroup_id_{letter}"):
                scalars[:, place] = ids[:, axis]
                place += 1
        place += program.descriptor.get("system_sgpr_workgroup_info", 0)
        if program.descriptor.get("system_sgpr_private_segment_wavefront_offset"):
            scalars[:, place] = 0  # where the wave's scratch begins
        return cohort


def pack_arguments(launch: Launch) -> bytes:
    """The kernarg segment, padded by what wide scalar loads may read behind it."""
    arguments = launch.program.metadata.arguments
    if len(launch.kernel_args) > len(arguments):
        raise ValueError(f"{launch.name} has {len(arguments)} arguments, {len(launch.kernel_args)} were given")
    segment = bytearray(launch.program.metadata.kernarg_size + KERNARG_PADDING)
    hidden = hidden_arguments(launch)
    given: list[KernelArgument] = [hidden.get(argument.kind, 0) for argument in arguments]
    given[: len(launch.kernel_args)] = launch.kernel_args
    for argument, value in zip(arguments, given, strict=True):
        raw = _bytes(argument, value)
        segment[argument.offset : argument.offset + len(raw)] = raw
    return bytes(segment)


def hidden_arguments(launch: Launch) -> dict[str, int]:
    """What the runtime passes behind the kernel's own arguments, by value_kind, where it is not 0: grid and workgroup.

    tl.num_programs reads the grid from here."""
    sizes = {"block_count": launch.grid, "group_size": (launch.num_warps * LANES, 1, 1)}
    by_axis = {f"hidden_{name}_{axis}": n for name, size in sizes.items() for axis, n in zip("xyz", size, strict=True)}
    return by_axis | {"hidden_grid_dims": max(n for n, size in enumerate(launch.grid, 1) if size > 1 or n == 1)}


def _bytes(argument: Argument, value: KernelArgument) -> bytes:
    if isinstance(value, np.generic):
        value = value.tobytes()
    if isinstance(value, bytes):
        raw = value
    elif isinstance(value, float):
        raw = struct.pack({2: "<e", 4: "<f", 8: "<d"}[argument.size], value)
    else:
        raw = (int(value) & (1 << 8 * argument.size) - 1).to_bytes(argument.size, "little")
    if len(raw) != argument.size:
        raise ValueError(f"an argument of {argument.size} bytes was given {len(raw)} bytes")
    return raw
