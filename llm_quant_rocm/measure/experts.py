# SPDX-License-Identifier: Apache-2.0
"""Routed experts: this library's in FP8 and NVFP4 against bf16 and other peers.

Results are compared with fp32 on the 16-bit weights before they are timed. A router that is fair and one that is skewed
(its experts are drawn by Zipf's law) choose the experts; every call of a graph has its own choice.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from llm_quant_rocm import ops, timing
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight

BASE = "bf16_grouped"
ROUTERS = ("fair", "skewed")
ROUTINGS = 16

# The call for x [T, H], router weights fp32 [T, k] and ids int32 [T, k]: it gives [T, H].
Bind = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]


def choose(
    experts: int, topk: int, tokens: int, router: str = "fair", device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights fp32 [T, k], which add up to one, and ids int32 [T, k] of different experts."""
    odds = torch.ones(experts, device=device)
    if router == "skewed":
        odds = odds / torch.arange(1, experts + 1, device=device)
        odds = odds[torch.randperm(experts, device=device)]
    ids = torch.multinomial(odds.expand(tokens, experts), topk)
    return torch.randn(tokens, topk, device=device).softmax(-1), ids.int()


def expected(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The output in fp32 throughout, of weights [E, 2I, H] and [E, H, I]."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ w13[expert].float().t()).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().t()
        out.index_add_(0, token, y * weights[token, slot, None])
    return out


def grouped_bf16(w13: torch.Tensor, w2: torch.Tensor) -> Bind:
    """torch's grouped product (CUTLASS) with the same activation and weighting around it, given its groups already
    sorted: what is timed of it is a lower bound."""

    def bind(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
        order = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=w13.shape[0]).cumsum(0).int()
        token, weight = order // ids.shape[1], weights.flatten()[order, None].to(x.dtype)

        def call() -> torch.Tensor:
            gate, up = torch._grouped_mm(x[token], w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
            y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=ends)
            return torch.zeros_like(x).index_add_(0, token, y * weight)

        return call

    return bind


def ptpc(w13: torch.Tensor, w2: torch.Tensor) -> Bind:
    """Ours in FP8."""
    arranged = (*ops.per_token_quant_fp8(w13), *ops.per_token_quant_fp8(w2))
    return lambda x, *routing: partial(ops.ptpc_moe, x, *arranged, *routing)


def ours(w13: NvFp4Weight, w2: NvFp4Weight) -> Bind:
    """Ours in NVFP4."""
    prepared = ops.prepare_nvfp4_weight(w13, gate_up=True), ops.prepare_nvfp4_weight(w2)
    return lambda x, *routing: partial(ops.nvfp4_moe, x, *prepared, *routing)


# By name, what arranges 16-bit weights, and what arranges what NVFP4 makes of them.
Dense = Mapping[str, Callable[[torch.Tensor, torch.Tensor], Bind]]
Packed = Mapping[str, Callable[[NvFp4Weight, NvFp4Weight], Bind]]
DENSE: Dense = {BASE: grouped_bf16, "ptpc_moe": ptpc}
PACKED: Packed = {"nvfp4_moe": ours}
# Who rounds the 16-bit weights, and x, to FP8: ours and vLLM's.
_FP8 = ("ptpc_moe", "vllm_fp8", "vllm_cutlass")
# The largest relative errors that count as right: two products, each with what a format rounds its weights (and FP8 x
# too) by.
_TOLERANCE_16_BIT, _TOLERANCE_FP8, _TOLERANCE_NVFP4 = 0.02, 0.1, 0.25


def tolerance_of_dense(names: Iterable[str]) -> dict[str, float]:
    """By name, the largest relative error, from fp32 on the 16-bit weights, that counts as right."""
    return {name: _TOLERANCE_FP8 if name in _FP8 else _TOLERANCE_16_BIT for name in names}


class Layer:
    """A model's experts, in two sets that take turns, arranged for everyone who runs them.

    Attributes:
        absent: who cannot run them, and why.
    """

    def __init__(
        self,
        experts: int,
        topk: int,
        hidden: int,
        inner: int,
        dense: Dense = DENSE,
        packed: Packed = PACKED,
        device: str = "cuda",
    ) -> None:
        self._experts, self._topk, self._hidden, self._device = experts, topk, hidden, device
        self._tolerance = tolerance_of_dense(dense) | dict.fromkeys(packed, _TOLERANCE_NVFP4)
        self.absent: dict[str, str] = {}
        self._runners: dict[str, list[Bind]] = {}
        for number in range(2):
            w13, w2 = (
                torch.randn(experts, n, k, device=device, dtype=torch.bfloat16) / k**0.5
                for n, k in ((2 * inner, hidden), (hidden, inner))
            )
            if number == 0:
                self._dense = w13, w2
            for name, prepare in dense.items():
                self._add(name, partial(prepare, w13, w2))
            quantized = nvfp4.quantize(w13), nvfp4.quantize(w2)
            for name, pack in packed.items():
                self._add(name, partial(pack, *quantized))

    def _add(self, name: str, prepare: Callable[[], Bind]) -> None:
        if name in self.absent:
            return
        try:
            self._runners.setdefault(name, []).append(prepare())
        except Exception as error:  # a peer's reasons are its own
            self._runners.pop(name, None)
            self.absent[name] = timing.in_a_cell(error)

    def measure(self, tokens: int, router: str = "fair") -> dict[str, Any]:
        """{"us": ..., "error": ...} by name, and "failed" where there is something."""
        x = torch.randn(tokens, self._hidden, device=self._device, dtype=torch.bfloat16)
        routings = [choose(self._experts, self._topk, tokens, router, self._device) for _ in range(ROUTINGS)]
        calls = {
            name: [binds[number % 2](x, *routing) for number, routing in enumerate(routings)]
            for name, binds in self._runners.items()
        }
        return timing.measure(calls, expected(x, *self._dense, *routings[0]), self._tolerance)
