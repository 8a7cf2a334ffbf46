# SPDX-License-Identifier: Apache-2.0
"""Tokens and the experts that a router gave to each of them: what routed experts compute, whatever they are made of."""

from typing import NamedTuple, Self

import torch


class RoutedTokens(NamedTuple):
    """Some tokens and their slots: (token, expert) pairs, k of each token.

    Attributes:
        x: activations [T, H].
        weights: the router's weight of each slot, fp32 [T, k].
        ids: the expert of each slot, integers of 32 or 64 bits [T, k]; one that is negative or too large is nobody's.
        expert_map: int32 or int64 [all experts], the index among this rank's experts of each, or -1 of one that is
            elsewhere. None: ids are indices.
        padding: int32 or int64 [T], negative for tokens that have no experts. None: all have.
    """

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    expert_map: torch.Tensor | None = None
    padding: torch.Tensor | None = None

    def known(self, experts: int) -> int:
        """How many experts the model has, of which this rank has so many: ids are below it."""
        return experts if self.expert_map is None else self.expert_map.numel()

    def fair_slots(self, experts: int) -> int:
        """How many slots this rank's `experts` have if the router is fair to all: what a configuration is chosen by.
        Known without reading the ids."""
        known = self.known(experts)
        return -(-self.ids.numel() * experts // known) if known else 0

    def local_ids(self, experts: int) -> torch.Tensor:
        """The index among this rank's `experts` of each slot's; -1 of one that is elsewhere, of nobody's, and of
        padding."""
        known = self.known(experts)
        ids = self.ids.long()
        ids = torch.where((ids >= 0) & (ids < known), ids, -1)
        if self.padding is not None:
            ids = torch.where(self.padding[:, None] < 0, -1, ids)
        if self.expert_map is None or not known:
            return ids
        return torch.where(ids < 0, -1, self.expert_map[ids.clamp_min(0)])

    def part(self, first: int, count: int) -> Self:
        """`count` tokens from number `first` on, or as many as there are."""
        chosen = slice(first, first + count)
        return self._replace(
            x=self.x[chosen],
            weights=self.weights[chosen],
            ids=self.ids[chosen],
            padding=None if self.padding is None else self.padding[chosen],
        )
