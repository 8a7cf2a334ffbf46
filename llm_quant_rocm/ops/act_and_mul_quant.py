# SPDX-License-Identifier: Apache-2.0
"""The activation of a gated layer, and per-token FP8 quantization of its result."""

from functools import cache

import torch

from llm_quant_rocm import hardware, reference
from llm_quant_rocm.backends import Backend, Choice, choose
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.ops._register import register
from llm_quant_rocm.ops._row_call import HALF_OR_SINGLE, RowCall, fake_codes, rows_as, rows_of, triton_refusal
from llm_quant_rocm.reference.act_and_mul_quant import ACTIVATIONS

NAME = "act_and_mul_quant_fp8"
Result = tuple[torch.Tensor, torch.Tensor]


def _triton(h: torch.Tensor, activation: str, fmt: fp8.Fp8Format, device: Hardware) -> Result:
    from llm_quant_rocm.kernels.act_and_mul_quant import act_and_mul_quant_fp8

    return act_and_mul_quant_fp8(h.contiguous(), activation, fmt, device)


def _reference(h: torch.Tensor, activation: str, fmt: fp8.Fp8Format, device: Hardware) -> Result:
    return reference.act_and_mul_quant_fp8(h, activation, fmt)


BACKENDS = (
    Backend("triton", triton_refusal, _triton),
    Backend("reference", lambda call: None, _reference),
)


@cache
def _choose(call: RowCall) -> Choice:
    return choose("act_and_mul_quant", BACKENDS, call)


def _validate(x: torch.Tensor, activation: str) -> None:
    if x.dtype not in HALF_OR_SINGLE:
        raise TypeError(f"{NAME}: x is {x.dtype}, not bf16, fp16 or fp32")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{NAME}: x has shape {tuple(x.shape)}; its last dimension is gate, then up, of one width")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{NAME}: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")


def _implementation(x: torch.Tensor, activation: str) -> Result:
    call = RowCall(hardware.detect(x.device), x.shape[-1] // 2)
    fmt = fp8.of_dtype(call.hardware.fp8_dtype)
    q, scale = _choose(call).backend.run(rows_of(x), activation, fmt, call.hardware)
    return rows_as(x, q), rows_as(x, scale)


_operator = register(
    f"{NAME}(Tensor x, str activation) -> (Tensor, Tensor)",
    _validate,
    _implementation,
    lambda x, activation: fake_codes(x[..., : x.shape[-1] // 2]),
)


def act_and_mul_quant_fp8(x: torch.Tensor, activation: str = "silu") -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token FP8 codes [..., I] and fp32 scales [..., 1] of activation(gate) * up, in one kernel.

    x [..., 2I] is [gate, up], the output of a gated layer's first product, in dtype T: bf16, fp16 or fp32, any strides,
    any number of rows. The activation is silu, gelu (with erf) or gelu_tanh; it and the product are in fp32, rounded to
    T once, and quantized as `per_token_quant_fp8` does:

        a = T(activation(gate) * up);  codes and scales of a

    Raises:
        TypeError: x has another dtype.
        ValueError: x has no last dimension of two halves, or the activation is another.
    """
    return _operator(x, activation)
