# SPDX-License-Identifier: Apache-2.0
"""What a kernel's machine code must be, and what of it is not so.

A kernel that spills, or takes a detour through the LDS one value at a time, is correct and slow: without a GPU nothing
but these rules would notice.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.amd import hazards, isa

LDS = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}  # bytes of a compute unit; Triton does not check
WIDE_SHARE = 0.75  # of the bytes that the hot loop loads, those that must come 16 at a time
SCRATCH = re.compile(r"scratch_|buffer_(load|store)_\S+ \S+ off,")  # without a lane's offset: gfx90a's
SCALAR_LDS = re.compile(r"ds_(read|write)_(u8|i8|u16|i16|b8|b16)")

# CDNA2 has no FP8: codes become FP16 in the kernel, and its conversion to FP8 is in software.
FP8_MATRIX = {
    "gfx90a": r"v_mfma_f32_\d+x\d+x\d+_?f16",
    "gfx942": r"v_mfma_f32_\d+x\d+x\d+_fp8_fp8",
    "gfx950": r"v_mfma_f32_\d+x\d+x\d+_(f8f6f4|fp8_fp8)",
}
FP8_CAST = {"gfx942": r"v_cvt_pk_fp8_f32", "gfx950": r"v_cvt_scalef32_pk_fp8_f32"}

# What makes writes visible to another GPU before a flag is set, what reads a flag past the caches, and what drops their
# stale lines once it is seen.
RELEASE = {"gfx90a": "buffer_wbl2", "gfx942": "buffer_wbl2 sc0 sc1", "gfx950": "buffer_wbl2 sc0 sc1"}
FRESH = {"gfx90a": "glc", "gfx942": "sc0 sc1", "gfx950": "sc0 sc1"}
ACQUIRE = {"gfx90a": "buffer_invl2", "gfx942": "buffer_inv sc0 sc1", "gfx950": "buffer_inv sc0 sc1"}


@dataclass(frozen=True)
class Budget:
    """What one kernel must be on each architecture, beyond the rules that hold for every kernel.

    Attributes:
        matrix: the opcode of its matrix instructions, a pattern; it must have some, and no other.
        uses: an opcode that it must use, a pattern.
        wide: whether its hot loop must move many values at a time, from memory and through the LDS.
        scalar_spills: how many scalar registers may spill, into lanes of a vector register; for kernels that wait for
            links and have many addresses.
        peer_flags: whether it sets and awaits flags of other GPUs.
        more: what else is wrong with the assembly of a variant with these constexprs (those of Triton's own options,
            such as num_warps, included) on an architecture.
        may_spill: executed cases that may spill, because no model has their shape.
    """

    matrix: Mapping[str, str] = field(default_factory=dict)
    uses: Mapping[str, str] = field(default_factory=dict)
    wide: bool = True
    scalar_spills: int = 0
    peer_flags: bool = False
    more: Callable[[isa.Assembly, str, Mapping[str, Any]], list[str]] | None = None
    may_spill: frozenset[str] = frozenset()


def resources(assembly: isa.Assembly, arch: str, lds: int) -> list[str]:
    """What is wrong with the registers, scratch and LDS of a kernel.

    Scalar registers that spill live in lanes of a vector register: small odd shapes, which need many masks, may do so.
    LLVM then may reserve scratch, to save that register, and use none of it.
    """
    found = spills(assembly, "vgpr_spill_count")
    if not assembly.resources["sgpr_spill_count"] or any(SCRATCH.match(i.text) for i in assembly.instructions):
        found += spills(assembly, "private_segment_fixed_size")
    if lds > LDS[arch]:
        found.append(f"it takes {lds} bytes of LDS, {arch} has {LDS[arch]}")
    return found + irreducible(assembly)


def spills(assembly: isa.Assembly, *names: str) -> list[str]:
    return [f"{name} is {assembly.resources[name]}" for name in names if assembly.resources[name]]


def irreducible(assembly: isa.Assembly) -> list[str]:
    """Lanes that wait for each other in a loop with two entries never meet; Triton 3.6 makes some spins such loops."""
    guarded = any("irr.guard" in block.comment for block in assembly.blocks)
    return ["it has a loop with two entries (irr.guard)"] * guarded


def peer_flags(assembly: isa.Assembly, arch: str) -> list[str]:
    """What is wrong with the order of memory around flags that other GPUs set and read."""
    found = []
    texts = [" ".join(instruction.text.split()) for instruction in assembly.instructions]
    sets = [place for place, text in enumerate(texts) if re.match(r"(global|flat)_atomic_swap", text)]
    if not sets:
        found.append("it sets no flag (global_atomic_swap)")
    for place in sets:
        if not released(texts[:place], arch):
            found.append(f"no {RELEASE[arch]} before the flag is set in line {assembly.instructions[place].line}")
    spins = 0
    for loop in assembly.loops:
        texts = [" ".join(instruction.text.split()) for instruction in loop.instructions]
        reads = [text for text in texts if re.match(r"(global|flat)_(atomic_(add|cmpswap|or)|load)", text)]
        stores = [text for text in texts if re.match(r"(global|flat|buffer)_(store|atomic_swap)", text)]
        adds = any(re.match(r"v_(pk_)?(add|fma|fmac)_f32", text) for text in texts)  # as what sums up pieces does
        if reads and not stores and not adds:
            spins += 1
            stale = [text for text in reads if not text.endswith(FRESH[arch])]
            found += [f"a flag is read without {FRESH[arch]}: {text}" for text in stale]
            if ACQUIRE[arch] not in texts:
                found.append(f"no {ACQUIRE[arch]} after a flag is read: {reads[0]}")
    if not spins:
        found.append("it awaits no flag (a loop that reads and does not write)")
    return found


def released(texts: Sequence[str], arch: str) -> bool:
    """Whether instructions end with a release that is done, but for flags behind it and what makes their addresses."""
    done = False
    for text in reversed(texts):
        if text == RELEASE[arch]:
            return done
        done |= text.startswith("s_waitcnt vmcnt(0)")
        if re.match(r"(global|flat|buffer)_(?!atomic_swap)|ds_|s_(c?branch|barrier|endpgm)", text):
            return False
    return False


def violations(
    assembly: isa.Assembly, arch: str, lds: int, budget: Budget, constants: Mapping[str, Any] | None = None
) -> list[str]:
    """Everything that is wrong with a kernel compiled for the shapes of real models."""
    found = resources(assembly, arch, lds) + hazards.around_inline(assembly.instructions, arch)
    if assembly.resources["sgpr_spill_count"] > budget.scalar_spills:
        found += spills(assembly, "sgpr_spill_count")
    opcodes = {instruction.opcode for instruction in assembly.instructions}
    matrix = {instruction.opcode for instruction in assembly.instructions if instruction.kind == "matrix"}
    meant = budget.matrix.get(arch)
    wrong = {opcode for opcode in matrix if not meant or not re.fullmatch(meant, opcode)}
    if wrong or bool(meant) != bool(matrix):
        found.append(f"its matrix instructions are {sorted(matrix) or 'none'}, {meant or 'none'} was meant")
    if arch in budget.uses and not any(re.fullmatch(budget.uses[arch], opcode) for opcode in opcodes):
        found.append(f"it has no {budget.uses[arch]}")
    loop = assembly.hot_loop
    hot = loop.instructions if loop else assembly.instructions
    loaded = [instruction.loaded_bytes for instruction in hot]
    if budget.wide and sum(size for size in loaded if size == 16) < WIDE_SHARE * sum(loaded):
        found.append(f"its loads bring {sorted(size for size in loaded if size)} bytes a lane, not 16 at a time")
    scalar = sorted({i.opcode for i in hot if SCALAR_LDS.match(i.opcode)})
    if budget.wide and scalar:
        found.append(f"values go through the LDS one at a time: {', '.join(scalar)}")
    if budget.peer_flags:
        found += peer_flags(assembly, arch)
    if budget.more:
        found += budget.more(assembly, arch, constants or {})
    return found


def explain(assembly: isa.Assembly, found: list[str]) -> str:
    """The violations, and the text of the loop they are about (of the whole kernel where there is no loop)."""
    loop = assembly.hot_loop
    listing = loop.listing() if loop else isa.Loop(tuple(assembly.blocks), 0).listing()
    return "\n".join([*(f"- {text}" for text in found), "The loop where the time goes:", listing])
