# SPDX-License-Identifier: Apache-2.0
"""Counts how often the row kernels write each byte of their results, in Triton's interpreter: once, whatever the width.

Rows go through one rank's inboxes, which it sends to itself; programs run one after another, so that what a flag would
announce is there. Draws widths and launch configurations from a seed, beside the hidden sizes of models, and prints
what was not written once, by case, as JSON. With "planted" it does so of one width, with the last block of a row not
stored. A program of its own, since interpreted or not is decided for a whole process.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Result, ScaleLayout, Target
from llm_quant_rocm.formats.wire import CODECS, GROUP
from llm_quant_rocm.kernels import norm_row, quick_reduce
from llm_quant_rocm.kernels import reduce_norm_quant as kernels
from llm_quant_rocm.kernels.quick_reduce import Mailbox
from tests.kernels.interpreter import make_fast

HIDDEN = (2880, 3072, 4096, 5120, 6144, 7168, 8192, 12800)
THREADS = (64, 128, 256, 512, 1024)
TARGETS = [
    Target(Quantization.NONE),
    Target(Quantization.FP8_PER_TOKEN, normed=False),
    Target(Quantization.FP8_STATIC),
    *(Target(Quantization.NVFP4, layout=layout, normed=False) for layout in ScaleLayout),
]
PHASE_BYTES, MAX_TILES, ROWS, LAMPORT_BYTES = 1 << 18, 16, 3, 3 * max(HIDDEN) * 2


@triton.jit
def set_no_flags(
    to, peers_ptr, PHASE: tl.constexpr, tile, rank, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr,
    only=-1
):  # fmt: skip
    pass


@triton.jit
def await_no_flags(
    mine, state_ptr, report_ptr, PHASE: tl.constexpr, tile, call, patience, phase_bytes, max_tiles,
    WORLD: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    return patience


@triton.jit
def await_no_sum(
    peers_ptr, mine, owner, state_ptr, report_ptr, tile, call, patience, phase_bytes, max_tiles, WORLD: tl.constexpr
):  # fmt: skip
    return patience


@triton.jit
def store_whole_blocks(row_ptr, value, i: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    if (i + 1) * BLOCK <= COLUMNS:
        tl.store(row_ptr + i * BLOCK + tl.arange(0, BLOCK), value)


class Writes:
    """How often each byte of some tensors was written."""

    def __init__(self, **tensors: torch.Tensor | None) -> None:
        self.tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.counts = {name: np.zeros(t.numel() * t.element_size(), np.int32) for name, t in self.tensors.items()}

    def store(self, _: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        """In place of the interpreter's: counts, and stores."""
        size = value.data.dtype.itemsize
        written = mask.data.astype(bool)  # one that was made of a scalar is of another type
        addresses = np.broadcast_to(pointers.data, written.shape)[written].astype(np.int64)
        for name, tensor in self.tensors.items():
            offsets = addresses - tensor.data_ptr()
            inside = offsets[(offsets >= 0) & (offsets < self.counts[name].size)]
            np.add.at(self.counts[name], (inside[:, None] + np.arange(size)).ravel(), 1)
        interpreter._interpreter.store(pointers.data, value.data, written)

    @contextmanager
    def counted(self) -> Iterator[None]:
        with patch.object(interpreter.InterpreterBuilder, "create_masked_store", self._as_method()):
            yield

    def _as_method(self) -> Callable[..., None]:
        return lambda builder, *arguments: self.store(builder, *arguments)


def not_once(counts: np.ndarray, expected: np.ndarray | int, what: str) -> list[str]:
    wrong = np.flatnonzero(counts != expected)
    if not wrong.size:
        return []
    return [f"{what}: {wrong.size} bytes, the first is byte {wrong[0]}, written {counts.flat[wrong[0]]} times"]


def row_bytes(columns: int, codec: str) -> np.ndarray:
    """How often each byte of a row's buffer must be written: those of groups beyond the columns never."""
    groups, sent = kernels.piece_bytes(columns, CODECS["FP"]) // 64, -(-columns // GROUP)
    sizes = [4 * bits for bits in CODECS[codec].planes] + [2] if CODECS[codec].quantizes else [64]
    return np.concatenate([np.repeat(np.arange(groups) < sent, size) for size in sizes]).astype(np.int32)


def check(columns: int, threads: int, programs: int, target: Target, shot: str, codec: str) -> list[str]:
    x = torch.randn(ROWS, columns).half()
    norm = Norm(torch.ones(columns), scale=torch.ones(1))
    out: Result = target.empty(x)
    region = torch.zeros(quick_reduce.region_bytes(1, PHASE_BYTES, MAX_TILES, LAMPORT_BYTES), dtype=torch.uint8)
    state = torch.zeros(quick_reduce.STATE_WORDS, dtype=torch.int32)
    report = torch.zeros(1, dtype=torch.int64)
    box = Mailbox(torch.tensor([region.data_ptr()]), state, report, 0, PHASE_BYTES, MAX_TILES, LAMPORT_BYTES)
    config = kernels.Config(threads, programs)
    writes = Writes(inboxes=region[: 4 * PHASE_BYTES], words=region[box.lamport_at :], **out._asdict())
    with (
        writes.counted(),
        patch.object(kernels, "set_flags", set_no_flags),
        patch.object(kernels, "await_flags", await_no_flags),
        patch.object(kernels, "await_sum", await_no_sum),
    ):
        if shot == "alone":
            kernels.norm_quant(x, x, norm, target, out)
        else:
            getattr(kernels, shot)(x, x, norm, target, out, box, CODECS[codec], config, 1000)
    found = []
    for name, counts in writes.counts.items():
        if name not in ("inboxes", "words"):
            found += not_once(counts, 1, name)
    # The first call is number 1. There is one rank, so slots are pieces.
    phases = writes.counts["inboxes"].reshape(2, 2, PHASE_BYTES)
    expected = np.zeros((2, 2, PHASE_BYTES), np.int32)
    shots = {"alone": 0, "one_shot": 1, "two_shot": 2}[shot]
    # Without flags, words are written, and zeros over them.
    words = np.zeros((2, LAMPORT_BYTES), np.int32)
    if shots and kernels.without_flags(ROWS, columns, CODECS[codec], 1, LAMPORT_BYTES, config):
        words[1, : ROWS * columns * 2], shots = 2, 0
    found += not_once(writes.counts["words"].reshape(2, LAMPORT_BYTES), words, "words")
    for phase in range(shots):
        cut = kernels.cut(ROWS, columns, CODECS[codec], box, config, shots)
        for row in range(ROWS):
            slot = row % cut.programs * cut.ring + row // cut.programs % cut.ring
            size = kernels.piece_bytes(columns, CODECS[codec])
            expected[1, phase, slot * size : (slot + 1) * size] = row_bytes(columns, codec)
    return found + not_once(phases, expected, "inboxes")


def main() -> None:
    assert triton.knobs.runtime.interpret
    make_fast()
    if "planted" in sys.argv:
        norm_row.store_block = store_whole_blocks
    draw = random.Random(0)
    widths = [*HIDDEN, 16, 32, 48, 240, 256, 272, 1024, 1040, *(16 * draw.randint(1, 300) for _ in range(16))]
    cases = []
    for index, columns in enumerate(widths[:1] if "planted" in sys.argv else widths):
        case: dict[str, Any] = {
            "columns": columns,
            "threads": draw.choice(THREADS),
            "programs": draw.randint(1, 4),
            "target": TARGETS[index % len(TARGETS)],
            "shot": ("one_shot", "two_shot", "alone")[index % 3],
            "codec": draw.choice(list(CODECS)),
        }
        cases.append(case)
        few = case | {"programs": ROWS, "shot": ("one_shot", "two_shot")[index // 4 % 2], "codec": "FP"}
        if index % 4 == 0 and kernels.without_flags(
            ROWS, columns, CODECS["FP"], 1, LAMPORT_BYTES, kernels.Config(few["threads"], ROWS)
        ):
            cases.append(few)
    failures = {str(case): found for case in cases if (found := check(**case))}
    json.dump({"cases": len(cases), "failures": failures}, sys.stdout)


if __name__ == "__main__":
    main()
