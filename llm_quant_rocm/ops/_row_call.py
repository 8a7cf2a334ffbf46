# SPDX-License-Identifier: Apache-2.0
"""What the row kernels (quantization, normalization) can be asked, and what their Triton backend refuses."""

from math import prod
from typing import NamedTuple

import torch

from llm_quant_rocm import backends
from llm_quant_rocm.hardware import Hardware, detect

HALF_OR_SINGLE = (torch.bfloat16, torch.float16, torch.float32)
# kernels.per_token_quant keeps a row in registers; repeated here because importing the kernel imports Triton.
MAX_COLUMNS = 65536


class RowCall(NamedTuple):
    """A call's facts that decide its backend."""

    hardware: Hardware
    columns: int


def triton_refusal(call: RowCall) -> str | None:
    """Why the Triton kernel cannot serve the call."""
    if not call.hardware.gpu:
        return "Triton kernels run on a GPU"
    if not call.hardware.fp8_cast:
        return f"Triton has no conversion to FP8 for {call.hardware.arch}"
    if call.columns > MAX_COLUMNS:
        return f"rows of more than {MAX_COLUMNS} columns do not fit in registers"
    return backends.missing("triton")


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [M, K] with a contiguous last dimension, copied only where it must be."""
    flat = x if x.dim() == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def rows_as(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What became of `rows_of(x)`, [M, N], as [..., N]."""
    return rows if x.dim() == 2 else rows.view(*x.shape[:-1], rows.shape[-1])


def fake_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a fake gives for the FP8 codes [..., K] and fp32 scales [..., 1] of x [..., K]."""
    q = x.new_empty(x.shape, dtype=detect(x.device).fp8_dtype)
    return q, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
