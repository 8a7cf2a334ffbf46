# SPDX-License-Identifier: Apache-2.0
"""A weight that lives in 16 bits from the first of its checkpoint tensors to the last."""

from collections.abc import Callable, Collection, Hashable
from threading import Lock
from typing import Any

import torch

from llm_quant_rocm.checkpoint.whole_rows import WholeRows

Quantize = Callable[[torch.Tensor, torch.Tensor | None], None]


class ArrivingWeight:
    """Stands between an engine's loader and one weight, of which a model at first holds the shape alone.

    The engine loads tensor by tensor, and what has all of its tensors is quantized at once: so a model takes the memory
    of its quantized weights and of the few that are incomplete. Engines may load from several threads, and each rank in
    another order; nothing here talks to other ranks.

    Args:
        make: the weight in 16 bits, empty, as the engine's loader wants it: [..., N, K].
        pieces: of what the weight is made up, as the `piece` of `load` says it. None where nobody knows, and `finish`
            quantizes.
        quantize: takes the complete weight, and the largest magnitudes [..., N, 1] of its whole rows, or None where
            nobody saw them: K is not sharded, or was sharded before it came here.
        whole_columns: K of the checkpoint's tensors, where this rank holds a share of them; None where it holds all.
    """

    def __init__(
        self,
        make: Callable[[], torch.nn.Parameter],
        pieces: Collection[Hashable] | None,
        quantize: Quantize,
        whole_columns: int | None = None,
    ) -> None:
        self._make, self._quantize = make, quantize
        self._whole_rows = None if whole_columns is None else WholeRows(whole_columns)
        self._missing = None if pieces is None else set(pieces)
        self._weight: torch.nn.Parameter | None = None
        self._lock = Lock()
        self.is_quantized = False

    def load(
        self,
        loader: Callable[[torch.nn.Parameter, torch.Tensor], Any],
        tensor: torch.Tensor,
        piece: Collection[Hashable] | None,
        rows: int | slice,
        name: str,
    ) -> Any:
        """Loads a checkpoint tensor [..., n, K], and quantizes the weight if it was the last.

        Args:
            loader: the engine's, which copies the tensor, or this rank's share of it, into the weight that it is given.
            piece: what of the weight the tensor is; None where nobody knows.
            rows: where in the weight its rows are.
            name: the tensor's.

        Raises:
            ValueError: the weight was complete before.
        """
        with self._lock:
            if self.is_quantized:
                raise ValueError(f"{name} is in the checkpoint twice: fetch or export it again")
            if self._weight is None:
                self._weight = self._make()
            if self._whole_rows:
                self._whole_rows.look_at(self._weight.data, tensor, rows)
            result = loader(self._weight, tensor)
            if piece is None:
                self._missing = None
            elif self._missing is not None:
                self._missing -= set(piece)
                if not self._missing and (self._whole_rows is None or self._whole_rows.is_complete):
                    self._finish()
            return result

    def finish(self) -> list[Any]:
        """Quantizes a weight that could not be while it arrived. All ranks call, in the same order.

        Returns:
            What is missing of it; then it is not quantized.
        """
        with self._lock:
            if not self.is_quantized and not self._missing and self._weight is not None:
                self._finish()
            return sorted(self._missing or (), key=str)

    def _finish(self) -> None:
        assert self._weight is not None
        self._quantize(self._weight.data, self._whole_rows.take() if self._whole_rows else None)
        self.is_quantized, self._weight = True, None
