# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce: several ranks on one memory end with the reference's bits, call after call."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton

from llm_quant_rocm.formats.wire import CODECS, DTYPES, Codec
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import quick_reduce
from llm_quant_rocm.kernels.quick_reduce import CALL, Config, Mailbox
from llm_quant_rocm.reference import quick_reduce as reference
from tests.amd import isa, kernels, tritons
from tests.amd.budget import Budget
from tests.inputs import DTYPE_IDS, assert_same, nasty_rows, random_rows

PATIENCE = 1_000_000
# To the compiler the shipped configuration: what is executed is what is shipped, and compiled once.
SMALL = Config(blocks=16, programs=2, num_warps=2, buffers=1)
TWO_BUFFERS = replace(SMALL, programs=1, buffers=2)
ONE_PROGRAM = replace(SMALL, programs=1, buffers=8)
BUFFER = SMALL.buffer_values

STORED, WAITED, MET = range(3)


def stores_awaited(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    """What is wrong with the order of stores and flags: on every path from a store to the setting of a flag each wave
    must wait for its own stores, and then for the other waves at a barrier."""
    first = [MET] * len(assembly.blocks)  # the least that is so on any path to a block
    todo, found = set(range(len(first))), set()
    while todo:
        index = todo.pop()
        state = first[index]
        for instruction in assembly.blocks[index].instructions:
            if re.match(r"(global|flat|buffer)_store", instruction.text):
                state = STORED
            elif state == STORED and instruction.kind == "wait" and "vmcnt(0)" in instruction.text:
                state = WAITED
            elif state == WAITED and instruction.kind == "barrier":
                state = MET
            elif state != MET and re.match(r"(global|flat)_atomic_swap", instruction.text):
                found.add(f"line {instruction.line} sets a flag before the stores of all waves are done")
        for target in assembly.blocks[index].targets:
            if state < first[target]:
                first[target] = state
                todo.add(target)
    return sorted(found)


def addresses_in_lanes(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    """Accesses that are loops over the addresses that their lanes may have, though all have the same one, since it is
    not in scalar registers; and 64-bit words of memory that vector instructions load, as addresses and numbers of calls
    are, which then wait for the stores before them (`quick_reduce.address`, `quick_reduce.begin_call`). Flags, which
    Triton 3.6 loads, are no such words."""
    loops = [
        f"line {instruction.line} is a loop over addresses: {instruction.text}"
        for loop in assembly.loops
        if len(loop.blocks) == 1 and any(i.opcode == "v_readfirstlane_b32" for i in loop.instructions)
        for instruction in loop.instructions
        if instruction.opcode.startswith("buffer_")
    ]
    return loops + [
        f"line {instruction.line} loads an address or a call's number into lanes: {instruction.text}"
        for instruction in assembly.instructions
        if re.fullmatch(r"(global|flat)_load_dwordx2", instruction.opcode) and not looks_at_a_flag(instruction)
    ]


def looks_at_a_flag(instruction: isa.Instruction) -> bool:
    """Whether a load passes the caches by."""
    return re.search(r" (glc|sc1)\b", instruction.text) is not None


def wrong_stores(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    return stores_awaited(assembly, arch, constants) + addresses_in_lanes(assembly, arch, constants)


_BUDGET = Budget(wide=False, peer_flags=True, scalar_spills=80, more=wrong_stores)
BUDGETS = {
    "two_shot_kernel": _BUDGET,
    "one_shot_kernel": replace(_BUDGET, scalar_spills=176),  # 8 ranks in FP, gfx950, Triton 3.6; elsewhere up to 80
}


class Ranks:
    """The memory of several ranks, and their all-reduces on the virtual GPU."""

    def __init__(self, world: int, phase_bytes: int = 1 << 19, max_tiles: int = 16) -> None:
        self.gpu = triton.runtime.driver.active
        self.regions = [
            torch.zeros(quick_reduce.region_bytes(world, phase_bytes, max_tiles), dtype=torch.uint8)
            for _ in range(world)
        ]
        peers = self.gpu.addresses(self.regions)
        self.boxes = [
            Mailbox(peers, torch.zeros(quick_reduce.STATE_WORDS, dtype=torch.int32), torch.zeros(1, dtype=torch.int64),
                    rank, phase_bytes, max_tiles)
            for rank in range(world)
        ]  # fmt: skip

    def launch(
        self, shot: Callable[..., None], inputs: Sequence[torch.Tensor], codec: Codec, config: Config = SMALL,
        patience: int = PATIENCE, **options: Any,
    ) -> list[torch.Tensor]:  # fmt: skip
        """One call on every rank that has an input, on a stream of its own; the outputs, written when it is over."""
        outs = []
        for rank, (x, box) in enumerate(zip(inputs, self.boxes, strict=False)):
            outs.append(torch.empty_like(x))
            self.gpu.stream = rank
            shot(x, outs[-1], box, codec, config, patience, **options)
        return outs

    def call(self, shot: Callable[..., None], inputs: Sequence[torch.Tensor], codec: Codec, **options: Any) -> None:
        """One call, whose results must be the reference's. What earlier calls left in the inboxes is made NaN."""
        for region, box in zip(self.regions, self.boxes, strict=True):
            region[: 4 * box.phase_bytes] = 0xFF
        before = int(calls_of(self.boxes[0]))
        with self.gpu.together():
            outs = self.launch(shot, inputs, codec, **options)
        check(shot, inputs, outs, codec, **options)
        for box in self.boxes:
            assert int(calls_of(box)) == before + 1 and not box.state[CALL.value + 2 :].any()


def calls_of(box: Mailbox) -> torch.Tensor:
    """The number of the last call, to be read and set."""
    return box.state[CALL.value : CALL.value + 2].view(torch.int64)[0]


def check(
    shot: Callable[..., None], inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], codec: Codec,
    cast_bf16_to_fp16: bool = False, **_: Any,
) -> None:  # fmt: skip
    """All ranks have the same bits, and they are the reference's."""
    expected = getattr(reference, shot.__name__)(inputs, codec, cast_bf16_to_fp16)
    for out in outs:
        assert torch.equal(out.view(torch.int16), outs[0].view(torch.int16))
        assert_same(out, expected)


def draw(world: int, count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Inputs of every rank: nasty groups, beside other ones on every rank, and random ones."""
    nasty = nasty_rows(64, dtype)
    random = [random_rows(-(-count // 64), 64, dtype, seed * 10 + rank) for rank in range(world)]
    rows = [torch.cat([nasty.roll(3 * rank, 0), random[rank]]).flatten() for rank in range(world)]
    return [x[:count].contiguous() for x in rows]


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def launch(shot: str, world: int, codec: str) -> None:
        ranks = Ranks(world, 1 << 20)
        config = quick_reduce.default_config(hardware, world, 2 if shot == "two_shot" else 1)
        ranks.launch(getattr(quick_reduce, shot), draw(1, 3000, torch.bfloat16), CODECS[codec], config)

    cases = (("two_shot", 2, "FP4"), ("two_shot", 8, "FP4"), ("one_shot", 8, "FP"), ("one_shot", 2, "INT4"))
    return {f"{shot} of {world}, {codec}": partial(launch, shot, world, codec) for shot, world, codec in cases}


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def in_a_row(
        world: int, codec: Codec, dtype: torch.dtype, one_shot: Codec | None = None, cast: bool = False,
        config: Config = SMALL,
    ) -> None:  # fmt: skip
        """Ragged counts, a whole number of tiles, and one value, so that all owners but the first have none."""
        ranks, options = Ranks(world), {"cast_bf16_to_fp16": True} if cast else {}
        options["config"] = config
        ragged = 6 * BUFFER - 71
        calls = ((quick_reduce.two_shot, codec, ragged), (quick_reduce.one_shot, one_shot or codec, ragged),
                 (quick_reduce.two_shot, codec, 1), (quick_reduce.two_shot, codec, world * BUFFER))  # fmt: skip
        for seed, (shot, of_shot, count) in enumerate(calls):
            ranks.call(shot, draw(world, count, dtype, seed), of_shot, **options)
        # Finite values whose sums are not: these are the largest numbers.
        most = random_rows(BUFFER // 64, 64, dtype, world).flatten().sign() * torch.finfo(dtype).max
        for shot, of_shot in ((quick_reduce.two_shot, codec), (quick_reduce.one_shot, one_shot or codec)):
            ranks.call(shot, [most] * world, of_shot, **options)

    def once(world: int, codec: Codec, of_one_shot: Codec) -> None:
        """One call of each, as many ranks are slow to execute: some owners have nothing, one has a part of a group."""
        ranks = Ranks(world)
        ranks.call(quick_reduce.two_shot, draw(world, 2 * BUFFER + 696, torch.bfloat16), codec)
        ranks.call(quick_reduce.one_shot, draw(world, BUFFER // 2 + 613, torch.bfloat16, 1), of_one_shot)

    def late(codec: Codec) -> None:
        """Ranks begin at different times, and none waits for the others between its calls: the first ones run ahead as
        far as they may. Sizes, codecs, algorithms and grids change on the way."""
        ranks = Ranks(3)
        calls = [
            (quick_reduce.two_shot, draw(3, 4 * BUFFER - 384, torch.bfloat16), codec, SMALL),
            (quick_reduce.one_shot, draw(3, BUFFER - 96, torch.bfloat16, 1), CODECS["FP"], SMALL),
            (quick_reduce.two_shot, draw(3, 1, torch.bfloat16, 2), codec, SMALL),
            (quick_reduce.two_shot, draw(3, 6 * BUFFER - 576, torch.bfloat16, 3), codec, ONE_PROGRAM),
        ]
        with ranks.gpu.together():
            for rank, turns in enumerate((300, 1500, 0)):
                ranks.gpu.stream = rank
                kernels.count_to[(1,)](torch.zeros(1, dtype=torch.int32), turns)
            found = [ranks.launch(shot, inputs, codec, config) for shot, inputs, codec, config in calls]
        for (shot, inputs, codec, _), outs in zip(calls, found, strict=True):
            check(shot, inputs, outs, codec)

    def many_calls(codec: Codec) -> None:
        """The 2**31st call and the next one, with tiles that were not there before and are not taken for sent ones."""
        ranks = Ranks(2)
        for box in ranks.boxes:
            calls_of(box).fill_(2**31 - 1)
        for seed, count in enumerate((BUFFER - 96, 4 * BUFFER - 384)):
            ranks.call(quick_reduce.two_shot, draw(2, count, torch.bfloat16, seed), codec)

    def lost(codec: Codec) -> None:
        """Rank 2 does not come: the others say so, and later calls end at once and write to nobody."""
        ranks = Ranks(3)
        inputs = draw(3, 6 * BUFFER - 576, torch.bfloat16)
        ranks.call(quick_reduce.two_shot, inputs, codec)
        for patience in (100, 2**31 - 1):
            with ranks.gpu.together():
                ranks.launch(quick_reduce.two_shot, inputs[:2], codec, patience=patience)
            for box in ranks.boxes[:2]:
                assert box.lost() == (2, 2, 0)
            assert all(region[: 4 * box.phase_bytes].eq(0xFF).all() for region in ranks.regions) == (patience > 100)
            for region in ranks.regions:
                region[: 4 * box.phase_bytes] = 0xFF

    def lost_in_between(codec: Codec) -> None:
        """Rank 2 sends its pieces and ends before it sends sums: the others name it, and that they had its pieces."""
        ranks = Ranks(3)
        nowhere = torch.zeros_like(ranks.regions[2])
        peers = ranks.gpu.addresses([*ranks.regions[:2], nowhere])
        ranks.boxes[:2] = [replace(box, peers=peers) for box in ranks.boxes[:2]]
        with ranks.gpu.together():
            ranks.launch(quick_reduce.two_shot, draw(3, 6 * BUFFER - 576, torch.bfloat16), codec, patience=400)
        assert [box.lost() for box in ranks.boxes] == [(1, 2, 1), (1, 2, 1), (1, 0, 0)]

    fp4, names = CODECS["FP4"], dict(zip(DTYPES, DTYPE_IDS, strict=False))
    cases: dict[str, Callable[[], object]] = {
        "FP4 and INT4 of bf16, 2 ranks": partial(in_a_row, 2, fp4, torch.bfloat16, CODECS["INT4"])
    }
    if hardware.arch == "gfx942":
        cases |= {"late ranks": partial(late, CODECS["INT3"]), "a lost rank": partial(lost, CODECS["INT3"])}
        cases["a rank lost between its pieces and its sums"] = partial(lost_in_between, CODECS["INT3"])
    if hardware.arch == "gfx942" and triton.__version__ != tritons.OLDEST:
        # To compile a kernel takes seconds: every codec and every number of ranks, and of fp16 one codec of each kind.
        # Of 7 ranks it is the codec that compiles soonest, and of 8 what is shipped.
        cases |= {
            f"{codec} of {names[dtype]}, {world} ranks": partial(in_a_row, world, CODECS[codec], dtype)
            for world, codec, dtype in (
                (2, "FP", DTYPES[0]), (3, "INT3", DTYPES[0]), (4, "INT8", DTYPES[0]),
                (2, "INT8", DTYPES[1]), (3, "FP", DTYPES[1]), (4, "FP4", DTYPES[1]),
            )
        }  # fmt: skip
        cases["INT4 of bf16 as fp16, 2 ranks"] = partial(in_a_row, 2, CODECS["INT4"], torch.bfloat16, cast=True)
        cases["many calls"] = partial(many_calls, fp4)
        cases["pieces of two buffers"] = partial(in_a_row, 2, fp4, torch.bfloat16, config=TWO_BUFFERS)
        cases |= {
            f"{name} of bf16, {world} ranks, once": partial(once, world, CODECS[name], CODECS[one_shot])
            for world, name, one_shot in ((5, "INT6", "INT6"), (6, "FP8", "FP8"), (7, "FP", "FP"), (8, "FP4", "FP"))
        }
    return cases
