# SPDX-License-Identifier: Apache-2.0
"""gcnsim runs Triton's AMDGPU assembly (gfx90a, gfx942, gfx950) on a CPU. See README.md beside this file."""

from gcnsim.errors import (
    AssemblyError,
    Deadlock,
    GcnSimError,
    LdsOverflow,
    LdsRace,
    MemoryFault,
    Trap,
    UninitializedRead,
    UnknownInstruction,
)
from gcnsim.launch import Launch
from gcnsim.memory import Memory
from gcnsim.program import Instruction, Metadata, Program, parse
from gcnsim.scheduler import run

__all__ = [
    "AssemblyError",
    "Deadlock",
    "GcnSimError",
    "Instruction",
    "Launch",
    "LdsOverflow",
    "LdsRace",
    "Memory",
    "MemoryFault",
    "Metadata",
    "Program",
    "Trap",
    "UninitializedRead",
    "UnknownInstruction",
    "parse",
    "run",
]
