# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual, RMSNorm and quantization: what stands between two layers of a tensor-parallel model."""

from functools import cache
from typing import NamedTuple

import torch

from llm_quant_rocm import hardware, reference
from llm_quant_rocm.backends import Backend, Choice, choose
from llm_quant_rocm.comm.reduce_norm_quant import Ranks, ranks_named
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Result, ScaleLayout, Target
from llm_quant_rocm.formats.nvfp4 import BLOCK
from llm_quant_rocm.formats.wire import DTYPES
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.ops._register import register
from llm_quant_rocm.ops._row_call import HALF_OR_SINGLE, RowCall, rows_as, rows_of, triton_refusal

NAME = "reduce_norm_quant"
# kernels.reduce_norm_quant keeps a row in registers; repeated here because importing the kernel imports Triton.
MAX_COLUMNS = 32768
_QUANTIZATIONS, _LAYOUTS = frozenset(Quantization), frozenset(ScaleLayout)
_GIVEN = (Quantization.FP8_STATIC, Quantization.NVFP4)


class Call(NamedTuple):
    """A call's facts that decide its backend; `obstacle` is why there is no peer memory."""

    hardware: Hardware
    columns: int
    world: int
    obstacle: str | None


def _kernel_refusal(call: Call) -> str | None:
    if call.columns > MAX_COLUMNS:
        return f"rows of more than {MAX_COLUMNS} columns do not fit in registers"
    return triton_refusal(RowCall(call.hardware, call.columns))


def _fused_refusal(call: Call) -> str | None:
    if call.world == 1:
        return "one rank has nothing to add up"
    return call.obstacle or _kernel_refusal(call)


def _triton(ranks: Ranks, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target) -> Result:
    from llm_quant_rocm.kernels.reduce_norm_quant import norm_quant

    s = ranks.all_reduce(x)
    out = target.empty(s)
    norm_quant(s, residual, norm, target, out)
    return out


def _reference(ranks: Ranks, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target) -> Result:
    out = reference.norm_quant(ranks.all_reduce(x), residual, norm, target)
    if residual is not None:
        return out
    # An operator's result may not be its input.
    return out._replace(residual=out.residual.clone(memory_format=torch.contiguous_format))


BACKENDS = (
    Backend("fused", _fused_refusal, Ranks.reduce_norm_quant),
    Backend("triton", _kernel_refusal, _triton),
    Backend("reference", lambda call: None, _reference),
)


@cache
def _choose(call: Call) -> Choice:
    return choose(NAME, BACKENDS, call)


def _validate(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor | None, eps: float,
    weight_bias: float, group: str, quantization: str, layout: str, normed: bool,
) -> None:  # fmt: skip
    ranks_named(group)
    shape, dtype, device = x.shape, x.dtype, x.device
    if dtype not in DTYPES:
        raise TypeError(f"{NAME}: x is {dtype}, not bf16 or fp16")
    if weight.dtype not in HALF_OR_SINGLE:
        raise TypeError(f"{NAME}: weight is {weight.dtype}, not bf16, fp16 or fp32")
    if not shape or weight.shape != shape[-1:] or weight.device != device:
        raise ValueError(
            f"{NAME}: weight has shape {tuple(weight.shape)} on {weight.device}; x {tuple(shape)} on {device} "
            "needs its last dimension there"
        )
    if shape[-1] == 0 or shape[-1] % BLOCK:
        raise ValueError(f"{NAME}: x has {shape[-1]} columns, no multiple of {BLOCK}")
    if residual is not None and (residual.shape != shape or residual.dtype != dtype or residual.device != device):
        raise ValueError(
            f"{NAME}: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}, "
            f"x is {dtype} {tuple(shape)} on {device}; they must agree"
        )
    if quantization not in _QUANTIZATIONS:
        raise ValueError(f"{NAME}: {quantization!r} is no quantization: use {', '.join(Quantization)}")
    if layout not in _LAYOUTS:
        raise ValueError(f"{NAME}: {layout!r} is no layout of scales: use {', '.join(ScaleLayout)}")
    if layout != ScaleLayout.LINEAR and quantization != Quantization.NVFP4:
        raise ValueError(f"{NAME}: only NVFP4's scales have the layout {layout}, not those of {quantization}")
    if not normed and quantization == Quantization.NONE:
        raise ValueError(f"{NAME}: quantization {quantization!r} without the normalised rows leaves nothing to return")
    if (scale is not None) != (quantization in _GIVEN):
        raise ValueError(
            f"{NAME}: {', '.join(_GIVEN)} need a scale and others take none; quantization is {quantization}"
        )
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device):
        raise ValueError(
            f"{NAME}: scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}; it is one fp32 on {device}"
        )


@cache
def _target(device: Hardware, quantization: str, layout: str, normed: bool) -> Target:
    return Target(Quantization(quantization), fp8.of_dtype(device.fp8_dtype), ScaleLayout(layout), normed)


def _run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor | None, eps: float,
    weight_bias: float, group: str, quantization: str, layout: str, normed: bool,
) -> Result:  # fmt: skip
    ranks, device = ranks_named(group), hardware.detect(x.device)
    target = _target(device, quantization, layout, normed)
    call = Call(device, x.shape[-1], ranks.world, ranks.obstacle)
    added = None if residual is None else rows_of(residual)
    norm = Norm(weight.contiguous(), eps, weight_bias, scale)
    return _shaped(x, target, _choose(call).backend.run(ranks, rows_of(x), added, norm, target))


def _fake(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor | None, eps: float,
    weight_bias: float, group: str, quantization: str, layout: str, normed: bool,
) -> Result:  # fmt: skip
    target = _target(hardware.detect(x.device), quantization, layout, normed)
    return _shaped(x, target, target.empty(rows_of(x)))


def _shaped(x: torch.Tensor, target: Target, out: Result) -> Result:
    """Results in the shape of x; tiled scales as they are. None stays for those that are absent: of an operator's
    tensors some may be undefined."""
    scales = out.scales if target.layout is not ScaleLayout.LINEAR else _as(x, out.scales)
    return Result(rows_as(x, out.residual), _as(x, out.normed), _as(x, out.codes), scales)


def _as(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor | None:
    return None if rows is None else rows_as(x, rows)


_operator = register(
    f"{NAME}(Tensor x, Tensor? residual, Tensor weight, Tensor? scale, float eps, float weight_bias, str group, "
    "str quantization, str layout, bool normed) -> (Tensor, Tensor, Tensor, Tensor)",
    _validate,
    _run,
    _fake,
)


def reduce_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    group: str = "",
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    quantization: str = Quantization.FP8_PER_TOKEN,
    scale: torch.Tensor | None = None,
    layout: str = ScaleLayout.LINEAR,
    normed: bool = False,
) -> Result:
    """Adds x [..., K] up over the ranks of `group`, adds the residual, normalises and quantizes: one kernel.

        s = the sum of x over the ranks, in x's dtype T
        z = T(s + residual)                                                 the next residual; s itself without one
        n = T(z / sqrt(mean(z * z) + eps) * (weight + weight_bias))
        codes and scales of n

    Every rank gets the same bits, in new tensors, with any number of rows. All ranks call with the same shapes and
    options, on one stream at a time.

    Args:
        x: bf16 or fp16, the last dimension a multiple of 16.
        weight: [K], bf16, fp16 or fp32.
        residual: of x's shape and dtype, the same on all ranks.
        group: the name that `comm.reduce_norm_quant.connect` was given; "" for one rank alone.
        weight_bias: 1 for Gemma's norm.
        quantization: one of `formats.norm_quant.Quantization`: "none", "fp8_per_token", "fp8_static", "nvfp4". FP8
            has the flavour of x's device.
        scale: one fp32 on x's device: what "fp8_static" divides by, or NVFP4's ENCODING scale (2688 / amax).
        layout: of NVFP4's block scales: "linear", "128x4" or "8x4", as `formats.norm_quant` draws them.
        normed: whether n is wanted too.

    Raises:
        TypeError: the dtype of x or of the weight.
        ValueError: shapes, devices, options, or the dtype of residual or scale, that do not fit, or a group that nobody
            registered.
    """
    return Result(*_operator(x, residual, weight, scale, eps, weight_bias, group, quantization, layout, normed))
