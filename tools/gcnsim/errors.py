# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in a simulated kernel. Every error names the instruction, its assembly line and its Triton line."""


class GcnSimError(Exception):
    """Base of all errors of the simulator.

    `instruction` is the instruction's text, `line` its line in the assembly, `source` the Triton line it was compiled
    from ("file.py:27:9"); each is None where no instruction is to blame or the assembly does not say.
    """

    def __init__(self, what: str, instruction: str | None = None, line: int | None = None, source: str | None = None):
        super().__init__(what)
        self.what = what
        self.instruction = instruction
        self.line = line
        self.source = source

    def __str__(self) -> str:
        text = self.what
        if self.instruction is not None:
            text += f"\n  at assembly line {self.line}: {self.instruction}"
        if self.source is not None:
            text += f"\n  compiled from {self.source}"
        return text


class AssemblyError(GcnSimError):
    """The text is not an AMDGPU kernel as Triton writes it, or is for a chip that is not simulated."""


class UnknownInstruction(GcnSimError):
    """An opcode, operand or modifier that the simulator does not implement."""


class MemoryFault(GcnSimError):
    """An access outside every allocation, or outside a workgroup's LDS or a lane's scratch."""


class UninitializedRead(GcnSimError):
    """A read of memory that nobody wrote."""


class LdsOverflow(GcnSimError):
    """A launch that asks for more LDS than the chip gives one workgroup."""


class LdsRace(GcnSimError):
    """Two waves touched the same LDS bytes between two barriers, and one of them wrote."""


class Deadlock(GcnSimError):
    """Nothing moves any more: the message says which wave waits where."""


class Trap(GcnSimError):
    """The kernel executed s_trap: a failed device assertion."""
