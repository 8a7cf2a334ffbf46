# SPDX-License-Identifier: Apache-2.0
"""What becomes of an error in which the set-up of a group ended: the engine's own all-reduce serves, and the log says
why. And what its ranks tell each other before they rely on it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("llm_quant_rocm")

# Why ranks that would not make the same calls step aside.
DISAGREEMENT = "the ranks have different settings or measured crossovers"


class NoPeerMemory(RuntimeError):
    """Torch's symmetric memory gave a group's GPUs none, as where they do not reach each other's memory."""


class Disagreement(ValueError):
    """The ranks of a group would not make the same calls, which each of them says."""


def refusal_of(error: Exception) -> str:
    """`error` as a refusal of one line, in its own words.

    A NoPeerMemory and a ValueError are answers about the machine and the group, and speak for themselves. Nobody
    expects another one from a group that was found to be served: its type is said too, and its traceback is logged as a
    warning.
    """
    if isinstance(error, NoPeerMemory | ValueError):
        return first_line(error)
    reason = f"setting it up failed with {type(error).__name__}: {first_line(error)}"
    logger.warning("%s. This is not expected: please report it", reason, exc_info=error)
    return reason


def answers(answer: Any, group: dist.ProcessGroup) -> list[Any]:
    """Those of all ranks of `group`, each of which gives its own."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, answer, group)
    return everyone


def first_refusal(refusal: str | None, group: dist.ProcessGroup) -> str | None:
    """The first rank's refusal, which all ranks ask for: who steps aside does so with all others."""
    return next((said for said in answers(refusal, group) if said is not None), None)


@contextmanager
def raised_by_all(group: dist.ProcessGroup) -> Iterator[None]:
    """Around what every rank of `group` does by itself: a ValueError of one is raised by all, who would wait for it."""
    own = None
    try:
        yield
    except ValueError as error:
        own = error
    everyone = answers(own and str(own), group)
    if own is not None:
        raise own
    for rank, said in enumerate(everyone):
        if said is not None:
            raise ValueError(f"rank {rank}: {said}")


def first_line(error: BaseException) -> str:
    """The first line of the error's text; without a text, that it has none."""
    return next(iter(str(error).strip().splitlines()), "no reason given")
