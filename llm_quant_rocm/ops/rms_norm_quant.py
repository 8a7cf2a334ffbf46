# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, with or without a residual, and per-token FP8 quantization of its result."""

from functools import cache

import torch

from llm_quant_rocm import hardware, reference
from llm_quant_rocm.backends import Backend, Choice, choose
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops._register import check, register
from llm_quant_rocm.ops._row_call import HALF_OR_SINGLE, RowCall, rows_of, triton_refusal

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
    check(x.dtype in HALF_OR_SINGLE, TypeError, lambda: f"{name}: x is {x.dtype}, not bf16, fp16 or fp32")
    check(
        weight.dtype in HALF_OR_SINGLE, TypeError, lambda: f"{name}: weight is {weight.dtype}, not bf16, fp16 or fp32"
    )
    check(
        x.dim() > 0 and weight.shape == x.shape[-1:],
        ValueError,
        lambda: f"{name}: weight has shape {tuple(weight.shape)}; x of shape {tuple(x.shape)} needs its last dimension",
    )
    check(weight.device == x.device, ValueError, lambda: f"{name}: weight is on {weight.device}, x on {x.device}")
    if residual is None:
        return
    check(
        residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device,
        ValueError,
        lambda: (
            f"{name}: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}, "
            f"x is {x.dtype} {tuple(x.shape)} on {x.device}; they must agree"
        ),
    )


def _run(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> Result:
    call = RowCall(hardware.detect(x.device), x.shape[-1])
    flat_residual = None if residual is None else rows_of(residual)
    q, scale, total = _choose(call).backend.run(
        rows_of(x), weight.contiguous(), eps, flat_residual, fp8.of_dtype(call.hardware.fp8_dtype)
    )
    return q.view(x.shape), scale.view(*x.shape[:-1], 1), total.view(x.shape)


def _fake_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty(x.shape, dtype=hardware.detect(x.device).fp8_dtype, device=x.device)
    return q, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


# Two operators, because a registered operator has a fixed number of outputs and none may alias an input.
_norm = register(
    "rms_norm_quant_fp8(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _validate,
    lambda x, weight, eps: _run(x, weight, eps, None)[:2],
    lambda x, weight, eps: _fake_codes(x),
)
_add_norm = register(
    "add_rms_norm_quant_fp8(Tensor x, Tensor weight, float eps, Tensor residual) -> (Tensor, Tensor, Tensor)",
    _validate,
    _run,
    lambda x, weight, eps, residual: (*_fake_codes(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)),
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
        TypeError: a dtype is another one.
        ValueError: shapes or devices do not fit.
    """
    return _norm(x, weight, eps) if residual is None else _add_norm(x, weight, eps, residual)
