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
    are zero, as Triton's scratch pointers at the end are. `lds_bytes` is Triton's metadata.shared.
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

    def __init__(self, launch: Launch, memory: Memory, kernarg: int, workgroups: list[tuple[int, int, int]]):
        self.launch = launch
        self.memory = memory
        self.workgroups = workgroups
        self.waves_per_workgroup = launch.num_warps
        self.lds = Lds(len(workgroups), launch.lds_bytes)
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
        place = program.descriptor.get("user_sgpr_count", place)
        ids = np.array(self.workgroups, U32)[workgroup]
        for axis, letter in enumerate("xyz"):
            if program.descriptor.get(f"system_sgpr_workgroup_id_{letter}"):
                scalars[:, place] = ids[:, axis]
                place += 1
        return cohort


def pack_arguments(launch: Launch) -> bytes:
    """The kernarg segment, padded by what wide scalar loads may read behind it."""
    arguments = launch.program.metadata.arguments
    if len(launch.kernel_args) > len(arguments):
        raise ValueError(f"{launch.name} has {len(arguments)} arguments, {len(launch.kernel_args)} were given")
    segment = bytearray(launch.program.metadata.kernarg_size + KERNARG_PADDING)
    for argument, value in zip(arguments, launch.kernel_args, strict=False):
        raw = _bytes(argument, value)
        segment[argument.offset : argument.offset + len(raw)] = raw
    return bytes(segment)


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
