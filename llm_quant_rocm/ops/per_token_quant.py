# SPDX-License-Identifier: Apache-2.0
"""Per-token FP8 quantization."""

from functools import cache

import torch

from llm_quant_rocm import hardware, reference
from llm_quant_rocm.backends import Backend, Choice, choose
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops._register import register
from llm_quant_rocm.ops._row_call import HALF_OR_SINGLE, RowCall, fake_codes, rows_as, rows_of, triton_refusal


def _triton(x: torch.Tensor, fmt: fp8.Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    from llm_quant_rocm.kernels.per_token_quant import per_token_quant_fp8

    return per_token_quant_fp8(x, fmt)


BACKENDS = (
    Backend("triton", triton_refusal, _triton),
    Backend("reference", lambda call: None, reference.per_token_quant_fp8),
)


@cache
def _choose(call: RowCall) -> Choice:
    return choose("per_token_quant", BACKENDS, call)


def _validate(x: torch.Tensor) -> None:
    if x.dtype not in HALF_OR_SINGLE:
        raise TypeError(f"per_token_quant_fp8: x is {x.dtype}, not bf16, fp16 or fp32")
    if x.dim() == 0:
        raise ValueError("per_token_quant_fp8: x is a scalar; it needs a last dimension to quantize")


def _implementation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    call = RowCall(hardware.detect(x.device), x.shape[-1])
    q, scale = _choose(call).backend.run(rows_of(x), fp8.of_dtype(call.hardware.fp8_dtype))
    return rows_as(x, q), rows_as(x, scale)


_operator = register("per_token_quant_fp8(Tensor x) -> (Tensor, Tensor)", _validate, _implementation, fake_codes)


def per_token_quant_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes [..., K] and fp32 scales [..., 1] of x [..., K], one scale a row, as formats/fp8.py defines them.

    x is bf16, fp16 or fp32, on any device, with any strides and any number of rows, none included. The codes have the
    E4M3 flavour of x's device.

    Raises:
        TypeError: x has another dtype.
        ValueError: x has no dimension.
    """
    return _operator(x)
