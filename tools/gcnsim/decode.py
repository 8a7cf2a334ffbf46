# SPDX-License-Identifier: Apache-2.0
"""From instructions to steps: each is decoded once, into a closure that runs it for a cohort."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from gcnsim.atomics import global_atomic
from gcnsim.convert import CONVERSIONS, small_conversion
from gcnsim.dpp import DPP_MODIFIERS
from gcnsim.errors import AssemblyError, GcnSimError, Trap, UnknownInstruction
from gcnsim.floating import FLOATING
from gcnsim.integer import INTEGER, bit_operation
from gcnsim.lanes import cross_lane
from gcnsim.lds import lds
from gcnsim.matrix import matrix
from gcnsim.operands import EXEC, VCC, words
from gcnsim.packed import packed
from gcnsim.program import Instruction, Program
from gcnsim.registers import Array, Cohort, Step
from gcnsim.scalar import scalar
from gcnsim.vector import Alu, build
from gcnsim.vmem import vector_memory

# What a chip has: LDS a workgroup may use, in bytes.
LDS_LIMIT = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}

# What a kernel's descriptor must say, where it says anything: round to nearest even, keep denormals, clamp NaN to 0.
MODELLED = {
    "float_round_mode_32": 0,
    "float_round_mode_16_64": 0,
    "float_denorm_mode_32": 3,
    "float_denorm_mode_16_64": 3,
    "dx10_clamp": 1,
}

VECTOR: dict[str, Alu] = INTEGER | FLOATING | CONVERSIONS

# Time, caches and hazards are not modelled, so these do nothing.
WITHOUT_EFFECT = words(
    "s_waitcnt s_nop s_sleep s_setprio s_sethalt s_icache_inv s_dcache_wb s_dcache_inv s_ttracedata s_waitcnt_depctr "
    "v_nop buffer_inv buffer_wbl2 buffer_invl2 buffer_wbinvl1 buffer_wbinvl1_vol s_set_gpr_idx_off"
)

Condition = Callable[[Cohort], Array]


def _zero(index: int) -> Condition:
    return lambda cohort: (cohort.scalar[:, index] | cohort.scalar[:, index + 1]) == 0


def _nonzero(index: int) -> Condition:
    return lambda cohort: (cohort.scalar[:, index] | cohort.scalar[:, index + 1]) != 0


CONDITIONS: dict[str, Condition] = {
    "s_cbranch_scc0": lambda cohort: ~cohort.scc,
    "s_cbranch_scc1": lambda cohort: cohort.scc,
    "s_cbranch_vccz": _zero(VCC),
    "s_cbranch_vccnz": _nonzero(VCC),
    "s_cbranch_execz": _zero(EXEC),
    "s_cbranch_execnz": _nonzero(EXEC),
}


@dataclass(frozen=True)
class Branch:
    """To instruction `target`, for the waves that meet `condition` (all of them where it is None)."""

    target: int
    condition: Condition | None


@dataclass(frozen=True)
class Code:
    """A decoded program. `steps` has None for the instructions that end a straight run: `branches`, s_barrier and
    s_endpgm. `run_end[i]` is the first of these, or the first label, after instruction i."""

    program: Program
    steps: tuple[Step | None, ...]
    branches: dict[int, Branch]
    run_end: tuple[int, ...]


@lru_cache(maxsize=64)  # one kernel is launched on many inputs, and by every rank
def decode(program: Program) -> Code:
    """Decodes a whole program, so that what is not implemented is found before anything runs."""
    if program.arch not in LDS_LIMIT:
        raise AssemblyError(f"{program.arch} is not simulated; these are: {', '.join(LDS_LIMIT)}")
    for setting, modelled in MODELLED.items():
        if program.descriptor.get(setting, modelled) != modelled:
            raise AssemblyError(f"the kernel's {setting} is {program.descriptor[setting]}; {modelled} is simulated")
    steps: list[Step | None] = []
    branches: dict[int, Branch] = {}
    for number, instruction in enumerate(program.instructions):
        try:
            branch = _branch(instruction, program)
            if branch:
                branches[number] = branch
            ends = branch or instruction.op in ("s_barrier", "s_endpgm")
            steps.append(None if ends else _step(instruction, program.arch))
        except GcnSimError as error:
            raise locate_error(error, instruction) from None
    return Code(program, tuple(steps), branches, _run_ends(steps, set(program.labels.values())))


def locate_error(error: GcnSimError, instruction: Instruction) -> GcnSimError:
    """The error with the instruction it happened at."""
    return type(error)(error.what, instruction.text, instruction.line, instruction.source)


def _run_ends(steps: list[Step | None], labels: set[int]) -> tuple[int, ...]:
    ends, end = [0] * len(steps), len(steps)
    for number in range(len(steps) - 1, -1, -1):
        if steps[number] is None:
            end = number
        ends[number] = end
        if number in labels:
            end = number
    return tuple(ends)


def _branch(instruction: Instruction, program: Program) -> Branch | None:
    if instruction.op != "s_branch" and instruction.op not in CONDITIONS:
        return None
    label = instruction.operands[0].name
    if label not in program.labels:
        raise AssemblyError(f"there is no label {label}")
    return Branch(program.labels[label], CONDITIONS.get(instruction.op))


def _step(instruction: Instruction, arch: str) -> Step:
    if instruction.op in WITHOUT_EFFECT:
        return _nothing
    if instruction.op == "s_trap":
        return _trap
    for build_step, known in FAMILIES:
        if step := build_step(instruction, arch):
            if unknown := (instruction.flags | instruction.modifiers.keys()) - known:
                raise UnknownInstruction(f"{instruction.op} with {', '.join(sorted(unknown))} is not implemented")
            return step
    raise UnknownInstruction(f"the opcode {instruction.op} is not implemented")


def _vector(instruction: Instruction, arch: str) -> Step | None:
    if instruction.op in VECTOR:
        return build(instruction, VECTOR[instruction.op])
    if instruction.op in ("v_bitop3_b32", "v_bitop3_b16"):
        return build(instruction, bit_operation(instruction.integer("bitop3"), f"u{instruction.op[-2:]}"))
    return None


MEMORY_MODIFIERS = words("offset offen sc0 sc1 nt glc slc lds")
# Who builds the steps, and the modifiers that each of them heeds; any other is an error rather than ignored.
FAMILIES: tuple[tuple[Callable[[Instruction, str], Step | None], frozenset[str]], ...] = (
    (_vector, words("op_sel clamp mul div src0_sel src1_sel dst_sel dst_unused bitop3") | DPP_MODIFIERS),
    (lambda instruction, arch: scalar(instruction), frozenset({"offset", "glc"})),
    (lambda instruction, arch: vector_memory(instruction), MEMORY_MODIFIERS),
    (lambda instruction, arch: lds(instruction), frozenset({"offset", "offset0", "offset1"})),
    (lambda instruction, arch: cross_lane(instruction), frozenset({"offset"})),
    (packed, words("op_sel op_sel_hi neg_lo neg_hi clamp")),
    (matrix, frozenset({"cbsz", "abid", "blgp", "op_sel", "op_sel_hi"})),
    (small_conversion, frozenset({"op_sel", "src0_sel"})),
    (lambda instruction, arch: global_atomic(instruction), MEMORY_MODIFIERS),
)


def _nothing(cohort: Cohort) -> None:
    pass


def _trap(cohort: Cohort) -> None:
    raise Trap("the kernel trapped: an assertion on the device failed")
