# SPDX-License-Identifier: Apache-2.0
"""The activation of a gated layer, and per-token FP8 quantization of its result."""

from collections.abc import Callable

import torch
from torch.nn import functional

from llm_quant_rocm.formats import fp8

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def act_and_mul(h: torch.Tensor, activation: str) -> torch.Tensor:
    """T(activation(gate) * up) [..., I] of h [..., 2I] in dtype T, gate before up: in fp32, rounded once.

    torch.compile computes the two torch operators so; run one by one, and in vLLM's CUDA kernel, activation(gate) is
    rounded to T as well.
    """
    gate, up = h.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(h.dtype)


def act_and_mul_quant_fp8(h: torch.Tensor, activation: str, fmt: fp8.Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., I] and fp32 scales [..., 1] of `act_and_mul(h)`."""
    return fp8.quantize_rows(act_and_mul(h, activation), fmt)
