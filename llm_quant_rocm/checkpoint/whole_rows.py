# SPDX-License-Identifier: Apache-2.0
"""What a rank with some columns of a weight must know of the others: the rows' largest magnitudes."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from llm_quant_rocm.formats import fp8

# Values of a tensor that are on the device at a time: 16 MiB in 16 bits, which is as good as less (`formats/fp8.py`).
_CHUNK_ELEMENTS = 2**23
_UNSEEN = -1.0


class WholeRows:
    """The largest magnitudes of a weight's rows, from the checkpoint's tensors, which have all columns.

    So no rank asks another: engines may load from several threads, and each rank in another order.

    Args:
        columns: K of the checkpoint's tensors.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._amax: torch.Tensor | None = None

    def watching(self, loader: Callable[..., Any], rows: Callable[..., int | slice]) -> Callable[..., Any]:
        """The engine's weight loader `loader`, which looks at what it loads.

        `rows` gets the tensor and the loader's further arguments, and says where in the weight the tensor's rows are.
        """

        @wraps(loader)  # vLLM binds arguments by the loader's signature
        def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # vLLM first has the loader count, with a weight that is not there.
            if not param.is_meta:
                self.look_at(param.data, loaded_weight, rows(loaded_weight, *args, **kwargs))
            return loader(param, loaded_weight, *args, **kwargs)

        return load

    def look_at(self, weight: torch.Tensor, tensor: torch.Tensor, rows: int | slice) -> None:
        """Remembers the magnitudes of `rows` of weight [..., N, K / ranks], which come from tensor [..., n, K].

        They are those of the engine's copy, in the weight's dtype. A tensor of another shape tells nothing.
        """
        if self._amax is None:
            shape = (*weight.shape[:-1], 1)
            self._amax = torch.full(shape, _UNSEEN, dtype=torch.float32, device=weight.device)
        place = self._amax[rows]
        if tensor.shape != (*place.shape[:-1], self._columns):
            place.fill_(_UNSEEN)
            return
        lines, found = tensor.reshape(-1, self._columns), place.reshape(-1, 1)
        step = max(1, _CHUNK_ELEMENTS // max(1, self._columns))
        there = (tensor.device, tensor.dtype) == (weight.device, weight.dtype)
        copies = None if there else torch.empty((step, self._columns), dtype=weight.dtype, device=weight.device)
        for start in range(0, len(lines), step):
            part = lines[start : start + step]
            found[start : start + step] = fp8.row_amax(part if copies is None else copies[: len(part)].copy_(part))

    @property
    def is_complete(self) -> bool:
        """Whether all rows were seen whole."""
        return self._amax is not None and not bool((self._amax == _UNSEEN).any())

    def take(self) -> torch.Tensor | None:
        """The magnitudes, fp32 [..., N, 1], NaN where a row holds one; None where some are not known. Forgets them."""
        amax = self._amax if self.is_complete else None
        self._amax = None
        return amax
