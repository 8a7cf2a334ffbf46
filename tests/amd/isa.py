# SPDX-License-Identifier: Apache-2.0
"""Reads what can be known of a kernel's AMDGPU assembly without executing it: resources, loops, kinds of instructions.

A loop is a natural loop: the blocks that reach a branch back to a block which dominates it (Aho, Lam, Sethi, Ullman,
"Compilers", 9.6).
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

RESOURCES = (
    "vgpr_count",  # all vector registers of a lane, accumulators included
    "agpr_count",
    "sgpr_count",
    "vgpr_spill_count",
    "sgpr_spill_count",
    "private_segment_fixed_size",  # scratch, bytes a lane
)
_INSTRUCTION = re.compile(r"^(?:v|s|ds|global|buffer|flat|scratch)_\w+")
_ENDS = ("s_endpgm", "s_trap", "s_setpc_b64")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its text without comments, its line in the assembly, the source line it comes from, and whether
    it is inline assembly."""

    text: str
    line: int
    source: str
    inline: bool = False

    @property
    def opcode(self) -> str:
        """The mnemonic without the suffix that names an encoding."""
        return re.sub(r"_(e32|e64|sdwa|dpp|e64_dpp)$", "", self.text.split()[0])

    @property
    def operands(self) -> list[str]:
        """As written, the result first, without what follows them and names no register: op_sel and others."""
        return re.sub(r"\s+\w+:.*", "", self.text).split(maxsplit=1)[-1].split(", ")

    @property
    def kind(self) -> str:
        """matrix, move (to or from accumulators), vector, scalar, lds, memory, scratch, wait or barrier."""
        opcode = self.opcode
        if "mfma" in opcode:
            return "matrix"
        if opcode.startswith("v_accvgpr"):
            return "move"
        for prefix, kind in (("v_", "vector"), ("ds_", "lds"), ("scratch_", "scratch")):
            if opcode.startswith(prefix):
                return kind
        if opcode.startswith(("global_", "buffer_", "flat_")):
            return "memory"
        if opcode.startswith("s_waitcnt"):
            return "wait"
        return "barrier" if opcode.startswith("s_barrier") else "scalar"

    @property
    def loaded_bytes(self) -> int:
        """Bytes a lane that a load from global memory brings; 0 for everything else."""
        found = re.match(
            r"(?:global|buffer|flat)_load_(?:lds_)?(dword|ubyte|sbyte|ushort|sshort|short)(?:x(\d))?", self.opcode
        )
        if not found:
            return 0
        return {"d": 4, "u": 1, "s": 1}[found[1][0]] * int(found[2] or 1) * (2 if "short" in found[1] else 1)


@dataclass
class Block:
    """Instructions that run one after another. `targets`: the places in the list of blocks where it may go on."""

    label: str
    comment: str
    instructions: list[Instruction]
    targets: list[int]


@dataclass(frozen=True)
class Loop:
    """A natural loop: its blocks in the order of the text, and how many loops are around it."""

    blocks: tuple[Block, ...]
    depth: int

    @cached_property
    def instructions(self) -> list[Instruction]:
        return [instruction for block in self.blocks for instruction in block.instructions]

    def listing(self) -> str:
        """The loop's text with the line numbers of the assembly and the source lines it comes from."""
        lines = []
        for block in self.blocks:
            lines.append(f"{block.label}:")
            lines += [f"{i.line:6} {i.text:70} {i.source}" for i in block.instructions]
        return "\n".join(lines)


@dataclass(frozen=True)
class Assembly:
    """One kernel's assembly.

    Attributes:
        resources: the numbers of `RESOURCES` by name.
        blocks: its basic blocks, the entry first.
        loops: its natural loops, inner ones before those around them.
    """

    resources: dict[str, int]
    blocks: list[Block]
    loops: list[Loop]

    @property
    def instructions(self) -> list[Instruction]:
        return [instruction for block in self.blocks for instruction in block.instructions]

    @property
    def hot_loop(self) -> Loop | None:
        """The loop where the time goes: of the innermost ones that with most matrix instructions, then most loads."""
        innermost = [loop for loop in self.loops if not any(_inside(other, loop) for other in self.loops)]

        def work(loop: Loop) -> tuple[int, int]:
            kinds = count(loop.instructions)
            return kinds["matrix"], kinds["memory"]

        return max(innermost, key=work, default=None)


def _inside(inner: Loop, outer: Loop) -> bool:
    """Whether `inner` is a loop within `outer`."""
    around = {id(block) for block in outer.blocks}
    return inner is not outer and all(id(block) in around for block in inner.blocks)


def registers(operand: str) -> set[str]:
    """The vector registers of an operand: v7, v[8:11], a3."""
    found = re.match(r"\W*([va])(?:(\d+)|\[(\d+):(\d+)\])", operand)
    if not found:
        return set()
    first, last = (int(found[2]), int(found[2])) if found[2] else (int(found[3]), int(found[4]))
    return {f"{found[1]}{number}" for number in range(first, last + 1)}


def count(instructions: Iterable[Instruction]) -> Counter[str]:
    """How many instructions there are of every kind and, as "matrix v_mfma_...", of every opcode."""
    found: Counter[str] = Counter()
    for instruction in instructions:
        found[instruction.kind] += 1
        found[f"{instruction.kind} {instruction.opcode}"] += 1
    return found


def vector_per_8_weights(loop: Loop, weights: int, warps: int) -> float:
    """Vector instructions of a loop, moves to and from accumulators included, for each 8 weights of a lane.

    `weights` are decoded in one turn of the loop by `warps` waves of 64 lanes together.
    """
    kinds = count(loop.instructions)
    return (kinds["vector"] + kinds["move"]) * 8 / (weights / (64 * warps))


def read(text: str) -> Assembly:
    """The assembly of one kernel as Triton keeps it (asm["amdgcn"])."""
    resources = {}
    for name in RESOURCES:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        if not found:
            raise ValueError(f"the assembly does not say {name}")
        resources[name] = int(found[1])
    blocks = _blocks(text)
    return Assembly(resources, blocks, _loops(blocks))


def _blocks(text: str) -> list[Block]:
    kernel = re.search(r"\.amdhsa_kernel\s+(\S+)", text)
    if not kernel:
        raise ValueError("the assembly defines no kernel")
    files = {number: name for number, name in re.findall(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"', text)}
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{kernel[1]}:"))
    blocks = [Block(kernel[1], "", [], [])]
    source, inline = "", False
    for number, line in enumerate(lines[start + 1 :], start + 2):
        code, _, comment = line.partition(";")
        code = code.strip()
        if code.startswith(".section"):
            break
        inline = "#ASMSTART" in comment or (inline and "#ASMEND" not in comment)
        place = re.match(r"\.loc\s+(\d+)\s+(\d+)", code)
        label = re.match(r"(\.LBB\w+):", code)
        if place:
            source = f"{files.get(place[1], '?')}:{place[2]}"
        elif label or line.startswith("; %bb."):
            name = label[1] if label else line.split()[1].rstrip(":")
            blocks.append(Block(name, comment.strip(), [], []))
        elif _INSTRUCTION.match(code):
            blocks[-1].instructions.append(Instruction(code, number, source, inline))
            if code.startswith(("s_branch", "s_cbranch", *_ENDS)):
                blocks.append(Block(f"line {number + 1}", "", [], []))
    places = {block.label: index for index, block in enumerate(blocks)}
    for index, block in enumerate(blocks):
        last = block.instructions[-1].text.split() if block.instructions else [""]
        if last[0].startswith(("s_branch", "s_cbranch")):
            block.targets.append(places[last[1]])
        if not last[0].startswith(("s_branch", *_ENDS)) and index + 1 < len(blocks):
            block.targets.append(index + 1)
    return blocks


def _loops(blocks: list[Block]) -> list[Loop]:
    sources: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for target in block.targets:
            sources[target].append(index)
    order = _reverse_postorder(blocks)
    dominators = _dominators(order, sources)
    members: dict[int, set[int]] = {}  # by header: loops that share one are one
    for index in order:
        for target in blocks[index].targets:
            if target in dominators[index]:
                members.setdefault(target, set()).update(_body(target, index, sources, set(order)))
    bodies = sorted(members.values(), key=len)
    return [
        Loop(tuple(blocks[index] for index in sorted(body)), sum(body < other for other in bodies)) for body in bodies
    ]


def _reverse_postorder(blocks: list[Block]) -> list[int]:
    """The blocks that can be reached, each before those it leads to but for branches back."""
    seen, done = {0}, []
    stack = [(0, iter(blocks[0].targets))]
    while stack:
        index, targets = stack[-1]
        target = next((target for target in targets if target not in seen), None)
        if target is None:
            done.append(index)
            stack.pop()
        else:
            seen.add(target)
            stack.append((target, iter(blocks[target].targets)))
    return done[::-1]


def _dominators(order: list[int], sources: list[list[int]]) -> dict[int, set[int]]:
    """For every block those that every path from the entry to it goes through, itself included."""
    everything = set(order)
    dominators = {index: everything for index in order} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            before = [dominators[source] for source in sources[index] if source in everything]
            new = set.intersection(*before) | {index}
            changed |= new != dominators[index]
            dominators[index] = new
    return dominators


def _body(header: int, end: int, sources: list[list[int]], reachable: set[int]) -> set[int]:
    body, stack = {header}, [end]
    while stack:
        index = stack.pop()
        if index not in body:
            body.add(index)
            stack += [source for source in sources[index] if source in reachable]
    return body
