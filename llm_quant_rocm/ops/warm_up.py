# SPDX-License-Identifier: Apache-2.0
"""Compiling what operators will launch, whatever the number of rows, before a server's first request."""

import logging
from collections.abc import Callable, Hashable

import torch

from llm_quant_rocm import hardware
from llm_quant_rocm.backends import missing

# Which kernel serves, and how it is cut, changes with the number of rows: of few at any, of more than these at
# multiples of the second number and one more, or at any with many alike around it.
_FEW, _STEP = 64, 16

logger = logging.getLogger("llm_quant_rocm")
_warm: set[Hashable] = set()


def warm_up(call: Callable[[int], object], most_rows: int, device: torch.device, kind: Hashable, name: str) -> None:
    """Has Triton compile all that `call` launches on `device` with any number of rows up to `most_rows`.

    Our kernels are compiled in the background, some at once, and not launched; nor do torch's products compute, but
    aiter's do, which builds and loads kernels by the number of rows. The first launch of any of ours waits for all,
    whichever call had them compiled. Compiled code is kept on disk by Triton, so the next process only reads it.
    Without a GPU, or where the reference serves, there is nothing to do.

    Args:
        call: given a number of rows, calls operators with inputs of so many, whose values do not matter.
        kind: what else the call depends on. A second call of a kind does nothing.
        name: what users know it by, for the log.
    """
    if not hardware.detect(device).gpu or missing("triton") or (kind, most_rows) in _warm:
        return
    from llm_quant_rocm.kernels.compile_ahead import compile_ahead

    _warm.add((kind, most_rows))
    served = 0
    with torch.cuda.device(device), torch.no_grad(), compile_ahead() as ahead:
        # From the most on: torch then has the memory for all from the first. But vLLM forbids it to cut large pieces of
        # memory while weights load. Then each of a thousand sizes would have pieces of its own, and together all there
        # is.
        limit = 0
        for rows in (1, *reversed(_row_counts(most_rows))):
            try:
                call(rows)
            except torch.OutOfMemoryError:
                continue  # nor will so many be served in this memory
            if rows > 1:
                reserved = torch.cuda.memory_reserved(device)
                limit = limit or reserved
                if reserved > limit:
                    torch.cuda.empty_cache()
            if not ahead.launches:
                return  # the reference computes, which takes long
            served = max(served, rows)
        torch.cuda.empty_cache()  # what is loaded next takes other sizes
    if ahead.kernels:
        logger.info("%s: compiling %d kernels for up to %d rows", name, ahead.kernels, served)


def _row_counts(most: int) -> list[int]:
    """Numbers of rows, but for 1, among which is one of each kind that is served differently."""
    return sorted({*range(2, min(_FEW, most) + 1), *range(_FEW + 1, most + 1, _STEP), most} - {1})
