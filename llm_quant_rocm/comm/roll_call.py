# SPDX-License-Identifier: Apache-2.0
"""Who is missing where the ranks of a process group begin, or when a call of it fails: its backend says what broke, and
not by whom."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

# For ranks that are only late to arrive, or to find the call broken too: a dead peer breaks a call at once.
GRACE_SECONDS = 3.0
# Between ranks that have just made their group together.
ARRIVAL_SECONDS = 120.0
_POLL_SECONDS = 0.1

_made: Counter[str] = Counter()


def await_everyone(group: dist.ProcessGroup, name: str, operator: str) -> None:
    """Waits for the ranks of a group, which all call: a collective would wait in silence, and for as long as the group
    does, for a rank whose environment asks for nothing.

    Args:
        name: the engine's of the group, for errors.
        operator: what is set up, for errors.

    Raises:
        RuntimeError: names the ranks that did not come.
    """
    store, ranks = _store(group, f"{operator}/arrivals"), range(dist.get_world_size(group))
    store.set(str(dist.get_rank(group)), "")
    try:
        store.wait(list(map(str, ranks)), timedelta(seconds=ARRIVAL_SECONDS))
    except RuntimeError as error:
        late = [rank for rank in ranks if not store.check([str(rank)])]
        if late:
            raise RuntimeError(
                f"{operator}: rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} of the group {name} did not come "
                f"within {ARRIVAL_SECONDS:g} seconds: set the same environment variables on all hosts"
            ) from error


def _store(group: dist.ProcessGroup, purpose: str) -> dist.Store:
    """Of the default group's store a part that is this group's and purpose's, and another one at every call."""
    name = f"llm_quant_rocm/{purpose}/{group.group_name}"
    _made[name] += 1
    return dist.PrefixStore(f"{name}/{_made[name]}", _get_default_store())


class RollCall:
    """Counts, in the default group's store, the calls that each rank of a group begins, and those that broke.

    All ranks make it, and the same calls, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, operator: str) -> None:
        """
        Args:
            operator: what is called, for errors.
        """
        self._operator, self._rank, self._world = operator, dist.get_rank(group), dist.get_world_size(group)
        self._store = _store(group, operator)
        self._calls = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call of the group.

        Raises:
            RuntimeError: the call broke; names the call, and the ranks that did not arrive or did not get out of it.
        """
        self._calls += 1
        try:
            self._store.set(f"begun {self._rank}", str(self._calls))
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(f"{self._operator}: {self._missing()} in call {self._calls}: {error}") from error

    def _missing(self) -> str:
        answers: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(self._ask())

        # Whoever keeps the store may be the one that is lost, and then it may answer never.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * GRACE_SECONDS)
        return next(iter(answers), "rank 0 of the default group, which keeps its store, does not answer")

    def _ask(self) -> str:
        self._store.set(f"broken {self._rank}", str(self._calls))
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            others = [rank for rank in range(self._world) if rank != self._rank]
            begun = {rank: self._count(f"begun {rank}") for rank in others}
            late = [rank for rank in others if begun[rank] < self._calls]
            # They died in the call, or it did not break for them and they are busy elsewhere.
            silent = [
                rank for rank in others if begun[rank] == self._calls and self._count(f"broken {rank}") < self._calls
            ]
            if not late and not silent or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        if late:
            return f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} of the group did not arrive"
        if silent:
            return f"rank {' or '.join(map(str, silent))} of the group ended"
        return "no rank of the group is missing"

    def _count(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else 0
