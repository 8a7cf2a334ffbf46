# SPDX-License-Identifier: Apache-2.0
"""How many clocks the LDS of a compute unit takes for what waves read and write, by the addresses that gcnsim sees.

Every clock each bank serves one word. Of the lanes that the hardware serves together nothing is assumed: the words that
all 64 lanes want of the busiest bank are a lower bound.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
from gcnsim.lds import Lds

BANKS = {"gfx90a": 32, "gfx942": 32, "gfx950": 64}


def clocks(arch: str, run: Callable[[], object]) -> tuple[int, int]:
    """The least clocks for all that `run` executes, and how many they were without conflicts."""
    taken = np.zeros(2, np.int64)

    def count(offsets: Any, lanes: Any, size: int) -> None:
        for places, active in zip(offsets, lanes, strict=True):
            words = np.unique(places[active][:, None] // 4 + np.arange(max(size // 4, 1)))
            if len(words):
                busiest = np.bincount(words % BANKS[arch]).max()
                taken[:] += busiest, -(-len(words) // BANKS[arch])

    read, write = Lds.read, Lds.write

    def counted_read(self: Lds, cohort: Any, offsets: Any, lanes: Any, size: int) -> Any:
        count(offsets, lanes, size)
        return read(self, cohort, offsets, lanes, size)

    def counted_write(self: Lds, cohort: Any, offsets: Any, lanes: Any, values: Any) -> None:
        count(offsets, lanes, values.shape[1])
        write(self, cohort, offsets, lanes, values)

    with patch.object(Lds, "read", counted_read), patch.object(Lds, "write", counted_write):
        run()
    return int(taken[0]), int(taken[1])
