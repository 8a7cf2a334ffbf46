# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual, norm and quantization in one kernel: several ranks end with the reference's bits."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton

from llm_quant_rocm import reference
from llm_quant_rocm.comm.quick_reduce import LAMPORT_BYTES
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Result, ScaleLayout, Target
from llm_quant_rocm.formats.wire import CODECS, Codec
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import quick_reduce, reduce_norm_quant
from llm_quant_rocm.kernels.quick_reduce import CALL, Mailbox
from llm_quant_rocm.kernels.reduce_norm_quant import Config
from tests.amd import isa, kernels, tritons
from tests.amd.budget import ACQUIRE, FP8_CAST, Budget
from tests.amd.operators import shared_out
from tests.amd.operators.quick_reduce import addresses_in_lanes, looks_at_a_flag, wrong_stores
from tests.inputs import assert_same, nasty_rows, random_rows

PATIENCE = 1_000_000
SMALL = Config(threads=128, programs=2)
FEW = Config(threads=128, programs=8)  # for as many rows, of more than 512 columns, without flags
FP4_CAST = {"gfx950": "v_cvt_scalef32_pk_fp4_f32"}
KERNELS = {"one_shot": reduce_norm_quant.one_shot, "two_shot": reduce_norm_quant.two_shot}
TARGETS = {
    "norm": Target(),
    "per token": Target(Quantization.FP8_PER_TOKEN, normed=False),
    "per token and norm": Target(Quantization.FP8_PER_TOKEN),
    "static": Target(Quantization.FP8_STATIC, normed=False),
    "NVFP4": Target(Quantization.NVFP4, normed=False),
    "NVFP4 128x4": Target(Quantization.NVFP4, layout=ScaleLayout.SWIZZLED_128X4, normed=False),
    "NVFP4 8x4": Target(Quantization.NVFP4, layout=ScaleLayout.SWIZZLED_8X4),
}


def targets(hardware: Hardware) -> dict[str, Target]:
    """TARGETS with codes of the GPU's flavour."""
    fmt = fp8.of_dtype(hardware.fp8_dtype)
    return {name: Target(t.quantization, fmt, t.layout, t.normed) for name, t in TARGETS.items()}


def conversions(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    """What is wrong with the conversions: codes must be made by the instruction that the architecture has for it."""
    quantization = list(Quantization)[constants["QUANTIZATION"]]
    opcode = {Quantization.NVFP4: FP4_CAST, Quantization.NONE: {}}.get(quantization, FP8_CAST).get(arch)
    found = any(opcode and re.fullmatch(opcode, instruction.opcode) for instruction in assembly.instructions)
    return [f"{quantization} without {opcode}"] * (opcode is not None and not found)


def accesses(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    """What is wrong with rows that travel in 16 bits: they are read and sent 16 bytes at a time."""
    if constants["LOW"] != 0:
        return []
    narrow = [i for i in assembly.instructions if i.loaded_bytes not in (0, 16) and not looks_at_a_flag(i)]
    loaded = Counter(i.loaded_bytes for i in narrow)
    sent = Counter(i.opcode for i in assembly.instructions if re.match(r"(global|flat)_store_(short|dword$)", i.opcode))
    found = [f"it loads {dict(loaded)} bytes a lane beside its scale"] * (loaded.total() > NARROW_LOADS)
    return found + [f"it stores {dict(sent)} beside scales and calls"] * (sent.total() > NARROW_STORES)


def words_in_order(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    """What is wrong with rows that travel without flags: nobody would see what stays in a cache, and waits add up."""
    found = []
    world, two_shot = constants["WORLD"], constants["SHOTS"] == 2
    blocks = -(-constants["COLUMNS"] // constants["BLOCK"])  # each 16 bytes of a lane
    texts = [" ".join(instruction.text.split()) for instruction in assembly.instructions]
    looks = [loop for loop in assembly.loops if any(ACQUIRE[arch] in i.text for i in loop.instructions)]
    # The row's of all ranks; and the sum's, of who does not own it.
    looked_at = sorted([world * blocks, blocks] if two_shot else [world * blocks])
    loaded = []
    for loop in looks:
        looking = [" ".join(instruction.text.split()) for instruction in loop.instructions]
        loads = [place for place, text in enumerate(looking) if re.match(r"(global|flat|buffer)_load", text)]
        loaded.append(len(loads))
        if {looking[place].split()[0].split("_")[-1] for place in loads} != {"dwordx4"}:
            found.append(f"a look loads {[looking[place] for place in loads]}, not 16 bytes each time")
        if loads and looking.index(ACQUIRE[arch]) > loads[0]:
            found.append("a look loads before it invalidates")
        if loads and any("vmcnt(0)" in text for text in looking[loads[0] : loads[-1]]):
            found.append("a look waits for all it asked for between its loads")
        if any(re.match(r"(global|flat|buffer)_(store|atomic)", text) for text in looking):
            found.append("a look stores")
    if sorted(loaded) != looked_at:
        found.append(f"looks for words ({ACQUIRE[arch]}) load {loaded} times, not {looked_at}")
    first_look = min((loop.instructions[0].line for loop in looks), default=0)
    first_sent = blocks if two_shot else world * blocks
    stores = [i for i in assembly.instructions if re.match(SENT, i.text)]
    if arch == "gfx90a":
        written = [i.line for i in assembly.instructions if i.text.startswith("buffer_wbl2")]
        sent = [i.line for i in stores if i.line < first_look]
        if len(sent) != first_sent or len(written) != 1 + two_shot or not sent[-1] < written[0] < first_look:
            found.append("the L2 is not written back behind the stores")
    else:
        through = [i.line for i in stores if i.text.endswith("sc0 sc1")]
        sent = [line for line in through if line < first_look]
        # Besides, the zeros of what was received and the sums for all others.
        every = first_sent + sum(looked_at) + (world - 1) * blocks * two_shot
        if len(sent) != first_sent or len(through) != every:
            found.append(f"{len(sent)} stores before the looks and {len(through)} in all are written through")
    behind = [text for i, text in zip(assembly.instructions, texts, strict=True) if sent and i.line > sent[-1]]
    counts = next((n for n, text in enumerate(behind) if re.match(r"(global|flat)_atomic_add", text)), 0)
    if sent and "s_barrier" not in behind[:counts]:
        found.append("a call is counted before all waves have read its number")
    if not any(asks_for_the_row_first(block) for block in assembly.blocks):
        found.append("a row is asked for when the state has come, not before")
    lines = {instruction.line: text for instruction, text in zip(assembly.instructions, texts, strict=True)}
    if sent and any("vmcnt(0)" in lines.get(line, "") for line in range(sent[0], sent[-1])):
        found.append("it waits between the stores to ranks")
    return found


def asks_for_the_row_first(block: isa.Block) -> bool:
    """Whether a load of 16 bytes a lane stands before the state's in a block."""
    row = next((i.line for i in block.instructions if i.loaded_bytes == 16), None)
    read = quick_reduce.READ_STATE.value.splitlines()[1].split()
    state = [i.line for i in block.instructions if i.opcode == read[0] and i.operands[-1] == read[-1]]
    return row is not None and any(row < line for line in state)


def reduces(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    return [wrong for look in (wrong_stores, conversions, accesses) for wrong in look(assembly, arch, constants)]


def sends_words(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    return [
        wrong for look in (words_in_order, addresses_in_lanes, conversions) for wrong in look(assembly, arch, constants)
    ]


SENT = r"(global|flat|buffer)_store_dwordx4"
# The scale that is given.
NARROW_LOADS = 1
# Scales of a row and of padding, the call's number and the count of programs that are done.
NARROW_STORES = 16
_REDUCES = Budget(wide=False, peer_flags=True, scalar_spills=100, more=reduces)
BUDGETS = {
    "reduce_norm_one_shot_kernel": _REDUCES,
    "reduce_norm_two_shot_kernel": _REDUCES,
    "reduce_norm_lamport_kernel": Budget(wide=False, scalar_spills=100, more=sends_words),
    "norm_quant_kernel": Budget(more=conversions),
}
# With flags: shot, ranks, hidden size, target, codec. Blocks of a power of two do not fill most of these sizes.
SHIPPED = (
    ("one_shot", 8, 8192, "per token", "FP"),
    ("one_shot", 2, 7168, "NVFP4 128x4", "FP"),
    ("one_shot", 4, 2880, "static", "FP"),
    ("two_shot", 8, 8192, "per token", "FP4"),
    ("two_shot", 2, 5120, "per token and norm", "INT6"),
    ("two_shot", 4, 12800, "NVFP4", "FP"),
)


class Ranks:
    """The memory of several ranks, and their calls on the virtual GPU."""

    def __init__(
        self, world: int, phase_bytes: int = 1 << 18, max_tiles: int = 32, lamport_bytes: int = 1 << 17
    ) -> None:
        self.gpu = triton.runtime.driver.active
        self.regions = [
            torch.zeros(quick_reduce.region_bytes(world, phase_bytes, max_tiles, lamport_bytes), dtype=torch.uint8)
            for _ in range(world)
        ]
        peers = self.gpu.addresses(self.regions)
        self.boxes = [
            Mailbox(peers, torch.zeros(quick_reduce.STATE_WORDS, dtype=torch.int32), torch.zeros(1, dtype=torch.int64),
                    rank, phase_bytes, max_tiles, lamport_bytes)
            for rank in range(world)
        ]  # fmt: skip

    def launch(
        self, shot: str, inputs: Sequence[torch.Tensor], residual: torch.Tensor | None, norm: Norm, target: Target,
        codec: Codec, config: Config = SMALL, patience: int = PATIENCE,
    ) -> list[Result]:  # fmt: skip
        """One call on every rank that has an input, on a stream of its own; the outputs, written when it is over."""
        outs = []
        for rank, (x, box) in enumerate(zip(inputs, self.boxes, strict=False)):
            assert x.shape[0] <= box.max_tiles
            outs.append(poisoned(target, x))
            self.gpu.stream = rank
            KERNELS[shot](x, residual, norm, target, outs[-1], box, codec, config, patience)
        return outs

    def call(
        self, shot: str, inputs: Sequence[torch.Tensor], residual: torch.Tensor | None, norm: Norm, target: Target,
        codec: Codec, config: Config = SMALL,
    ) -> None:  # fmt: skip
        """One call, whose results must be the reference's. What earlier calls left in the inboxes is made NaN."""
        for region, box in zip(self.regions, self.boxes, strict=True):
            region[: 4 * box.phase_bytes] = 0xFF
        before = int(self.boxes[0].state[CALL.value])
        with self.gpu.together():
            outs = self.launch(shot, inputs, residual, norm, target, codec, config)
        check(shot, inputs, residual, norm, target, codec, outs)
        for box in self.boxes:
            assert box.state.tolist() == [before + 1, *[0] * 3]
        self.check_words()

    def check_words(self) -> None:
        """Nothing is left where words are awaited."""
        for region, box in zip(self.regions, self.boxes, strict=True):
            assert not region[box.lamport_at :].any()


def poisoned(target: Target, x: torch.Tensor) -> Result:
    """Memory for results in which no byte is what it should become: memory of torch.empty is often zeros, which is what
    padding should be."""
    out = target.empty(x)
    for part in out:
        if part is not None:
            part.view(torch.uint8).fill_(0xA5)
    return out


def check(
    shot: str, inputs: Sequence[torch.Tensor], residual: torch.Tensor | None, norm: Norm, target: Target, codec: Codec,
    outs: Sequence[Result],
) -> None:  # fmt: skip
    """Every rank has every bit of the reference."""
    expected = reference.reduce_norm_quant(inputs, residual, norm, target, codec, 1 + (shot == "two_shot"))
    for out in outs:
        assert_results(out, expected)


def assert_results(found: Result, expected: Result) -> None:
    for name, part, whole in zip(Result._fields, found, expected, strict=True):
        assert (part is None) == (whole is None), name
        if part is not None and whole is not None:
            try:
                assert_same(part, whole)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def norm_of(width: int, dtype: torch.dtype, quantization: Quantization, seed: int = 0, bias: float = 0.0) -> Norm:
    weight = 1 - bias + random_rows(1, width, torch.float32, seed + 1)[0].clamp(-4, 4) / 8
    weight[3:6] = -0.0  # the zeros of codes have its sign where there is no bias
    scale = {Quantization.FP8_STATIC: 0.0137, Quantization.NVFP4: 321.7}.get(quantization)
    given = None if scale is None else torch.tensor([scale])
    return Norm(weight.to(dtype), 1e-5, bias, given)


def draw(world: int, rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """x of every rank: nasty rows, other ones beside each other, and random ones."""
    pool = [torch.cat([nasty_rows(width, dtype).roll(5 * r + seed, 0), random_rows(4, width, dtype, seed * 10 + r)])
            for r in range(world)]  # fmt: skip
    return [x.repeat(-(-rows // x.shape[0]), 1)[:rows].contiguous() for x in pool]


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def reduce(shot: str, world: int, width: int, target: Target, codec: str, lamport_bytes: int = 0) -> None:
        ranks = Ranks(world, 1 << 22, lamport_bytes=lamport_bytes)
        x = torch.empty(4, width, dtype=torch.bfloat16)
        norm = norm_of(width, torch.bfloat16, target.quantization)
        config = reduce_norm_quant.default_config(*x.shape, CODECS[codec], hardware)
        ranks.launch(shot, [x], torch.empty_like(x), norm, target, CODECS[codec], config)

    def alone(width: int, target: Target) -> None:
        x = torch.empty(8, width, dtype=torch.bfloat16)
        norm = norm_of(width, torch.bfloat16, target.quantization)
        reduce_norm_quant.norm_quant(x, torch.empty_like(x), norm, target, target.empty(x))

    every = targets(hardware)
    cases: dict[str, Callable[[], object]] = {}
    for shot, world, width, name, codec in SHIPPED:
        cases[f"{shot} of {world}, {codec}, {width} columns, {name}"] = partial(
            reduce, shot, world, width, every[name], codec
        )
    for world, width, name in ((8, 8192, "per token"), (2, 7168, "NVFP4 128x4"), (4, 2880, "static")):
        cases[f"without flags, {world} ranks, {width} columns, {name}"] = partial(
            reduce, "one_shot", world, width, every[name], "FP", LAMPORT_BYTES
        )
    for world, width, name in ((8, 8192, "per token"), (4, 7168, "static")):
        cases[f"two shots without flags, {world} ranks, {width} columns, {name}"] = partial(
            reduce, "two_shot", world, width, every[name], "FP", LAMPORT_BYTES
        )
    for width, name in ((8192, "NVFP4"), (8192, "static"), (7168, "per token and norm"), (16384, "norm")):
        cases[f"alone, {width} columns, {name}"] = partial(alone, width, every[name])
    return cases


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    every = targets(hardware)

    def reduce(
        world: int, width: int, target: Target, codec: str, dtype: torch.dtype, has_residual: bool, bias: float = 0.0
    ) -> None:
        """Ragged rows, fewer rows than ranks; by both shots."""
        ranks = Ranks(world)
        norm = norm_of(width, dtype, target.quantization, bias=bias)
        for seed, (shot, rows) in enumerate((("one_shot", 5), ("two_shot", 2 * world + 1), ("two_shot", 1))):
            inputs = draw(world, rows, width, dtype, seed)
            residual = random_rows(rows, width, dtype, seed + 50) if has_residual else None
            ranks.call(shot, inputs, residual, norm, target, CODECS[codec])

    def without_flags(world: int, width: int, target: Target, dtype: torch.dtype, bias: float = 0.0) -> None:
        """Calls of one row and of as many as there are programs; rows of zeros of either sign on all ranks; and words
        of two NaNs of all bits, which would be zero once they are inverted."""
        ranks = Ranks(world)
        norm = norm_of(width, dtype, target.quantization, bias=bias)
        norm = replace(norm, eps=1e-12)  # shows the least that is not zero beyond a row of zeros
        calls = itertools.product(("one_shot", "two_shot"), (5, 1, 8, 3))
        for seed, (shot, rows) in enumerate(calls):
            inputs = draw(world, rows, width, dtype, seed)
            for x in inputs:
                x[-1, ::2], x[-1, 1::2], x[-1, :8] = 0.0, -0.0, 0.0
            inputs[0][-1] = -0.0
            if rows > 1:
                for x in inputs:
                    x[0].view(torch.int16)[64:66] = -1
            residual = None if seed == 2 else random_rows(rows, width, dtype, seed + 50)
            ranks.call(shot, inputs, residual, norm, target, CODECS["FP"], FEW)

    # Of three ranks, the kernels that are compiled for a case of `reduce` as well: width, target, WEIGHT_BIAS, codec.
    quantized, exact = (272, every["static"], 1.0, CODECS["INT4"]), (784, every["NVFP4 128x4"], 0.0, CODECS["FP"])

    def ahead() -> None:
        """Ranks begin at different times and run ahead as far as they may; numbers of rows and columns change, and
        calls by flags are between."""
        ranks, calls = Ranks(3), []
        wide, narrow = ((width, Target(), 0.0, CODECS["FP"]) for width in (784, 528))
        for seed, (shot, rows, (width, target, bias, codec)) in enumerate(
            (("one_shot", 8, wide), ("two_shot", 2, wide), ("two_shot", 4, quantized), ("one_shot", 7, wide),
             ("two_shot", 1, narrow), ("one_shot", 3, quantized), ("two_shot", 8, narrow), ("one_shot", 8, wide))
        ):  # fmt: skip
            norm = norm_of(width, torch.bfloat16, target.quantization, seed, bias)
            calls.append((shot, draw(3, rows, width, torch.bfloat16, seed), None, norm, target, codec))
        with ranks.gpu.together():
            for rank, turns in enumerate((300, 1500, 0)):
                ranks.gpu.stream = rank
                kernels.count_to[(1,)](torch.zeros(1, dtype=torch.int32), turns)
            found = [ranks.launch(*call, FEW) for call in calls]
        for call, outs in zip(calls, found, strict=True):
            check(*call, outs)
        ranks.check_words()

    def missing(shot: str) -> None:
        """Rank 2 does not come, in the second call: the others say so and end, later calls end at once and send
        nothing; when it comes to a one-shot it finds what was sent to it."""
        norm, ranks = norm_of(784, torch.bfloat16, Quantization.NONE), Ranks(3)
        ranks.call(shot, draw(3, 4, 784, torch.bfloat16), None, norm, Target(), CODECS["FP"], FEW)
        inputs = draw(3, 5, 784, torch.bfloat16, 1)
        sent = []
        for patience in (100, 2**31 - 1):
            with ranks.gpu.together():
                ranks.launch(shot, inputs[:2], None, norm, Target(), CODECS["FP"], FEW, patience)
            for box in ranks.boxes[:2]:
                assert box.lost() == (2, 2, 0)
            sent.append(torch.cat(ranks.regions))
        assert torch.equal(*sent)
        if shot == "one_shot":
            out = Target().empty(inputs[2])
            ranks.gpu.stream = None
            KERNELS[shot](inputs[2], None, norm, Target(), out, ranks.boxes[2], CODECS["FP"], FEW, PATIENCE)
            check(shot, inputs, None, norm, Target(), CODECS["FP"], [out])

    def owner_dies(has_read: bool) -> None:
        """Rank 2 has sent its rows and then ends, before it has read the others' or before it sends their sum: those
        who await the sum of the row it owns find it lost itself."""
        norm, ranks = norm_of(784, torch.bfloat16, Quantization.NONE), Ranks(3)
        for row, (region, box) in enumerate(zip(ranks.regions, ranks.boxes, strict=True)):
            begin = box.lamport_at + (1 * 3 + 2) * box.lamport_bytes + row * 784 * 2  # of call 1, from rank 2
            region[begin : begin + 784 * 2] = 1
        if has_read:
            nowhere = [torch.zeros_like(region) for region in ranks.regions[:2]]
            peers = ranks.gpu.addresses([*nowhere, ranks.regions[2]])
            ranks.boxes[2] = replace(ranks.boxes[2], peers=peers)
        inputs = draw(3, 3, 784, torch.bfloat16, 1)
        with ranks.gpu.together():
            ranks.launch("two_shot", inputs[: 2 + has_read], None, norm, Target(), CODECS["FP"], FEW, 100)
        for box in ranks.boxes[:2]:
            assert box.lost() == (1, 2, 1)

    def in_turn() -> None:
        """Rank 0 ends before rank 1 comes, and rank 2 does not. Rank 0 names the first that it misses, and rank 1, who
        awaits a sum of rank 0's, finds in its memory whom else that waits for."""
        norm, ranks = norm_of(784, torch.bfloat16, Quantization.NONE), Ranks(3)
        inputs = draw(3, 1, 784, torch.bfloat16, 1)
        for rank, missing in ((0, 1), (1, 2)):
            out = Target().empty(inputs[rank])
            KERNELS["two_shot"](
                inputs[rank], None, norm, Target(), out, ranks.boxes[rank], CODECS["FP"], FEW, 100
            )  # fmt: skip
            assert ranks.boxes[rank].lost() == (1, missing, 0)

    def alone(width: int, target: Target, dtype: torch.dtype, bias: float) -> None:
        norm = norm_of(width, torch.float32, target.quantization, bias=bias)
        wide = nasty_rows(width + 16, dtype)[::2]
        x, residual = wide[:, :width], wide.flip(0)[:, 16:]
        norms = [norm]
        if target.quantization == Quantization.NVFP4:  # a negative scale, and one so large that it is clamped
            norms += [replace(norm, scale=torch.tensor([scale])) for scale in (-2.0, -5000.0)]
        for added, norm in itertools.product((None, residual), norms):
            out = poisoned(target, x)
            reduce_norm_quant.norm_quant(x, added, norm, target, out)
            assert_results(out, reference.norm_quant(x, added, norm, target))

    def beyond_fp16() -> None:
        """The largest number that is rounded to a finite one, and the least that is not: then the scale is infinite."""
        x, target = torch.ones(2, 48, dtype=fp16), every["per token and norm"]
        weight = torch.linspace(-2, 2, 48)
        weight[5] = 65520.0
        for eps in (1e-6, 1e-12):  # the root of 1 + 1e-6 makes it 65519.97
            norm, out = Norm(weight, eps), poisoned(target, x)
            reduce_norm_quant.norm_quant(x, None, norm, target, out)
            assert_results(out, reference.norm_quant(x, None, norm, target))

    def late() -> None:
        """Ranks begin at different times and run ahead; tiles take every slot more than once; QuickReduce's calls are
        between on the same memory."""
        ranks, calls = Ranks(3), []
        for seed, (shot, rows, (width, target, bias, codec)) in enumerate(
            (("two_shot", 18, quantized), ("one_shot", 9, exact), ("two_shot", 4, exact))
        ):
            norm = norm_of(width, torch.bfloat16, target.quantization, seed, bias)
            calls.append((shot, draw(3, rows, width, torch.bfloat16, seed), None, norm, target, codec))
        found, sums = [], []
        with ranks.gpu.together():
            for rank, turns in enumerate((300, 1500, 0)):
                ranks.gpu.stream = rank
                kernels.count_to[(1,)](torch.zeros(1, dtype=torch.int32), turns)
            for call in calls:
                found.append(ranks.launch(*call, Config(threads=128, programs=1)))
                inputs = call[1]
                sums.append([torch.empty_like(x) for x in inputs])
                for rank, (x, out) in enumerate(zip(inputs, sums[-1], strict=True)):
                    ranks.gpu.stream = rank
                    plain = quick_reduce.Config(blocks=2, programs=2, num_warps=2)
                    quick_reduce.two_shot(x.view(-1), out.view(-1), ranks.boxes[rank], CODECS["FP"], plain, PATIENCE)
        for call, outs, plain_sums in zip(calls, found, sums, strict=True):
            check(*call, outs)
            for total in plain_sums:
                assert_same(total, reference.reduce_rows(call[1], CODECS["FP"], 2))

    def lost(shot: str) -> None:
        """Rank 2 does not come: the others say so and end, and later calls end at once. Of one row rank 1 owns nothing,
        and rank 0 is the one that it waits for."""
        width, target, bias, codec = exact
        norm = norm_of(width, torch.bfloat16, target.quantization, bias=bias)
        for rows in (5, 1):
            ranks, inputs = Ranks(3, lamport_bytes=0), draw(3, rows, width, torch.bfloat16)
            for patience in (100, 2**31 - 1):
                with ranks.gpu.together():
                    ranks.launch(shot, inputs[:2], None, norm, target, codec, patience=patience)
                for box in ranks.boxes[:2]:
                    assert box.lost() == (1, 2, 0)

    def as_shipped(shot: str, world: int, width: int, name: str, codec: str) -> None:
        """A shipped kernel, which is not compiled again, with fewer programs."""
        rows, target = 3, every[name]
        config = reduce_norm_quant.default_config(rows, width, CODECS[codec], hardware)
        residual = random_rows(rows, width, torch.bfloat16, world)
        inputs = draw(world, rows, width, torch.bfloat16, world)
        norm = norm_of(width, torch.bfloat16, target.quantization)
        ranks = Ranks(world, 1 << 20, lamport_bytes=0)
        ranks.call(shot, inputs, residual, norm, target, CODECS[codec], replace(config, programs=2))

    bf16, fp16 = torch.bfloat16, torch.float16
    # A kernel takes seconds to compile. With a residual and without are two, and the sum of ranks, which is all that
    # codecs have to do with, comes before it: either is tested with codecs of every kind, but not with every codec.
    # Each of the first three launches the kernel without flags, so that `shared_out` leaves every architecture one.
    cases: dict[str, Callable[[], object]] = {
        "without flags, 2 ranks, 784 columns, per token": partial(without_flags, 2, 784, every["per token"], fp16, 1.0),
        "3 ranks, 784 columns, NVFP4 128x4": partial(reduce, 3, 784, every["NVFP4 128x4"], "FP", bf16, False),
        "without flags, 4 ranks, 1040 columns, NVFP4": partial(without_flags, 4, 1040, every["NVFP4"], bf16),
        "2 ranks, 272 columns, per token": partial(reduce, 2, 272, every["per token"], "FP", bf16, True),
        "2 ranks, 528 columns, static": partial(reduce, 2, 528, every["static"], "INT6", fp16, True),
    }
    cases |= {
        f"as shipped, {shot} of {world}, {codec}, {width} columns, {name}": partial(
            as_shipped, shot, world, width, name, codec
        )
        for shot, world, width, name, codec in SHIPPED
    }
    for index, (name, target) in enumerate(every.items()):
        width, dtype = (48, 2880, 528)[index % 3], (bf16, fp16)[index % 2]
        cases[f"alone, {width} columns, {name}"] = partial(alone, width, target, dtype, float(index % 2))
    cases["alone, beyond fp16"] = beyond_fp16
    cases = shared_out(cases, hardware)
    if hardware.arch == "gfx942":
        cases |= {"late ranks": late}
        cases |= {"ranks ahead, without flags": ahead}
        cases |= {
            "an owner lost that did not read, no flags": partial(owner_dies, False),
            "an owner lost that read, no flags": partial(owner_dies, True),
        }
        cases |= {"lost ranks one after another, no flags": in_turn}
        cases |= {f"a lost rank, {shot}, no flags": partial(missing, shot) for shot in ("one_shot", "two_shot")}
        cases |= {f"a lost rank, {shot}": partial(lost, shot) for shot in KERNELS}
    if hardware.arch == "gfx942" and triton.__version__ != tritons.OLDEST:
        # But INT6, which has a case above, and with "per token and norm" a shipped one.
        for index, codec in enumerate(CODECS):
            world, width, name = 2 + (index == 3), (512, 16, 784, 272)[index % 4], list(every)[index]
            if codec != "INT6":
                cases[f"{codec} of {world} ranks, {width} columns, {name}"] = partial(
                    reduce, world, width, every[name], codec, (fp16, bf16)[index % 2], index // 2 % 2 == 0,
                    float(index % 2),
                )  # fmt: skip
    return cases
