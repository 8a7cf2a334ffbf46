# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, with or without a residual, and per-token FP8 quantization of its result."""

from functools import cache

import torch

from llm_quant_rocm import hardware, reference
from llm_quant_rocm.backends import Backend, Choice, choose
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops._register import register
from llm_quant_rocm.ops._row_call import HALF_OR_SINGLE, RowCall, fake_codes, rows_as, rows_of, triton_refusal

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, fmt: fp8.Fp8Format
) -> Result:
    from llm_quant_rocm.kernels.rms_norm_quant import rms_norm_quant_fp8

    return rms_norm_quant_fp8(x, weight, eps, residual, fmt)


BACKENDS = (
    Backend("triton", triton_refusal, _triton),
    Backend("reference", lambda call: None, reference.rms_norm_quant_fp8),
)


@cache
def _choose(call: RowCall) -> Choice:
    return choose("rms_norm_quant", BACKENDS, call)


def _validate(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> None:
    name = "rms_norm_quant_fp8"
    shape, dtype, device = x.shape, x.dtype, x.device
    if dtype not in HALF_OR_SINGLE:
        raise TypeError(f"{name}: x is {dtype}, not bf16, fp16 or fp32")
    if weight.dtype not in HALF_OR_SINGLE:
        raise TypeError(f"{name}: weight is {weight.dtype}, not bf16, fp16 or fp32")
    if not shape or weight.shape != shape[-1:]:
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}; x of shape {tuple(shape)} needs its last dimension"
        )
    if weight.device != device:
        raise ValueError(f"{name}: weight is on {weight.device}, x on {device}")
    if residual is not None and (residual.shape != shape or residual.dtype != dtype or residual.device != device):
        raise ValueError(
            f"{name}: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}, "
            f"x is {dtype} {tuple(shape)} on {device}; they must agree"
        )


def _run(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> Result:
    call = RowCall(hardware.detect(x.device), x.shape[-1])
    flat_residual = None if residual is None else rows_of(residual)
    q, scale, total = _choose(call).backend.run(
        rows_of(x), weight.contiguous(), eps, flat_residual, fp8.of_dtype(call.hardware.fp8_dtype)
    )
    return rows_as(x, q), rows_as(x, scale), rows_as(x, total)


# Two operators, because a registered operator has a fixed number of outputs and none may alias an input.
_norm = register(
    "rms_norm_quant_fp8(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _validate,
    lambda x, weight, eps: _run(x, weight, eps, None)[:2],
    lambda x, weight, eps: fake_codes(x),
)
_add_norm = register(
    "add_rms_norm_quant_fp8(Tensor x, Tensor weight, float eps, Tensor residual) -> (Tensor, Tensor, Tensor)",
    _validate,
    _run,
    lambda x, weight, eps, residual: (*fake_codes(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)),
)


def rms_norm_quant_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Per-token FP8 codes [..., K] and fp32 scales [..., 1] of the normalised x [..., K], in one kernel.

    With a residual [..., K] x is added to it first, and the sum, in x's dtype T, is a third result:

        z = T(x + residual);  n = T(z / sqrt(mean(z * z) + eps) * weight);  codes and scales of n

    n is rounded to T before it is quantized, so the result is that of the separate operators. For Gemma's norm give
    1 + weight. x is bf16, fp16 or fp32; weight [K] has any of these dtypes; the residual has x's dtype and shape.

    Raises:
        TypeError: the dtype of x or of the weight is another one.
        ValueError: shapes or devices do not fit, or the residual's dtype.
    """
    return _norm(x, weight, eps) if residual is None else _add_norm(x, weight, eps, residual)
