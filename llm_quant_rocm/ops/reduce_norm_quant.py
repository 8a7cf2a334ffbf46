# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual, RMSNorm and quantization: what stands between two layers of a tensor-parallel model."""

from dataclasses import dataclass
from functools import cache

import torch

from llm_quant_rocm import hardware, reference
from llm_quant_rocm.backends import Backend, Choice, choose
from llm_quant_rocm.comm.reduce_norm_quant import Ranks, ranks_named
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Result, ScaleLayout, Target
from llm_quant_rocm.formats.nvfp4 import BLOCK
from llm_quant_rocm.formats.wire import DTYPES
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.ops._register import check, register
from llm_quant_rocm.ops._row_call import HALF_OR_SINGLE, RowCall, rows_of, triton_refusal

NAME = "reduce_norm_quant"
# kernels.reduce_norm_quant keeps a row in registers; repeated here because importing the kernel imports Triton.
MAX_COLUMNS = 32768
_GIVEN = (Quantization.FP8_STATIC, Quantization.NVFP4)


@dataclass(frozen=True)
class Call:
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


def _fused(ranks: Ranks, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target) -> Result:
    return ranks.reduce_norm_quant(x, residual, norm, target)


def _triton(ranks: Ranks, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target) -> Result:
    from llm_quant_rocm.kernels.reduce_norm_quant import norm_quant

    s = ranks.all_reduce(x)
    out = target.empty(s)
    norm_quant(s, residual, norm, target, out)
    return out


def _reference(ranks: Ranks, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target) -> Result:
    out = reference.norm_quant(ranks.all_reduce(x), residual, norm, target)
    # An operator's result may not be its input.
    return out._replace(residual=out.residual.clone()) if residual is None else out


BACKENDS = (
    Backend("fused", _fused_refusal, _fused),
    Backend("triton", _kernel_refusal, _triton),
    Backend("reference", lambda call: None, _reference),
)


@cache
def _choose(call: Call) -> Choice:
    return choose("reduce_norm_quant", BACKENDS, call)


def _validate(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor | None, eps: float,
    weight_bias: float, group: str, quantization: str, layout: str, normed: bool,
) -> None:  # fmt: skip
    ranks_named(group)
    check(x.dtype in DTYPES, TypeError, lambda: f"{NAME}: x is {x.dtype}, not bf16 or fp16")
    check(
        weight.dtype in HALF_OR_SINGLE, TypeError, lambda: f"{NAME}: weight is {weight.dtype}, not bf16, fp16 or fp32"
    )
    check(
        x.dim() > 0 and weight.shape == x.shape[-1:] and weight.device == x.device,
        ValueError,
        lambda: (
            f"{NAME}: weight has shape {tuple(weight.shape)} on {weight.device}; x {tuple(x.shape)} on {x.device} "
            "needs its last dimension there"
        ),
    )
    check(
        x.shape[-1] > 0 and x.shape[-1] % BLOCK == 0,
        ValueError,
        lambda: f"{NAME}: x has {x.shape[-1]} columns, no multiple of {BLOCK}",
    )
    if residual is not None:
        check(
            residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device,
            ValueError,
            lambda: (
                f"{NAME}: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}, "
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}; they must agree"
            ),
        )
    check(
        quantization in set(Quantization),
        ValueError,
        lambda: f"{NAME}: {quantization!r} is no quantization: use {', '.join(Quantization)}",
    )
    check(
        layout in set(ScaleLayout),
        ValueError,
        lambda: f"{NAME}: {layout!r} is no layout of scales: use {', '.join(ScaleLayout)}",
    )
    check(
        layout == ScaleLayout.LINEAR or quantization == Quantization.NVFP4,
        ValueError,
        lambda: f"{NAME}: only NVFP4's scales have the layout {layout}, not those of {quantization}",
    )
    check(
        normed or quantization != Quantization.NONE,
        ValueError,
        lambda: f"{NAME}: quantization {quantization!r} without the normalised rows leaves nothing to return",
    )
    check(
        (scale is not None) == (quantization in _GIVEN),
        ValueError,
        lambda: f"{NAME}: {', '.join(_GIVEN)} need a scale and others take none; quantization is {quantization}",
    )
    if scale is not None:
        check(
            scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == x.device,
            ValueError,
            lambda: (
                f"{NAME}: scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}; it is one fp32 on {x.device}"
            ),
        )


def _target(x: torch.Tensor, quantization: str, layout: str, normed: bool) -> Target:
    fmt = fp8.of_dtype(hardware.detect(x.device).fp8_dtype)
    return Target(Quantization(quantization), fmt, ScaleLayout(layout), normed)


def _run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor | None, eps: float,
    weight_bias: float, group: str, quantization: str, layout: str, normed: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    ranks, target = ranks_named(group), _target(x, quantization, layout, normed)
    call = Call(hardware.detect(x.device), x.shape[-1], ranks.world, ranks.obstacle)
    added = None if residual is None else rows_of(residual)
    norm = Norm(weight.contiguous(), eps, weight_bias, scale)
    return _shaped(x, target, _choose(call).backend.run(ranks, rows_of(x), added, norm, target))


def _fake(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor | None, eps: float,
    weight_bias: float, group: str, quantization: str, layout: str, normed: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    target = _target(x, quantization, layout, normed)
    return _shaped(x, target, target.empty(rows_of(x)))


def _shaped(x: torch.Tensor, target: Target, out: Result) -> tuple[torch.Tensor, ...]:
    """Results in the shape of x; empty tensors for those that are absent, which an operator must give too."""

    def shaped(part: torch.Tensor | None) -> torch.Tensor:
        if part is None:
            return x.new_empty(0)
        tiled = part is out.scales and target.layout is not ScaleLayout.LINEAR
        return part if tiled else part.view(*x.shape[:-1], part.shape[-1])

    return tuple(shaped(part) for part in out)


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
        TypeError: a dtype.
        ValueError: shapes, devices or options that do not fit, or a group that nobody registered.
    """
    out = _operator(x, residual, weight, scale, eps, weight_bias, group, quantization, layout, normed)
    quantized = quantization != Quantization.NONE
    has_scales = quantization in (Quantization.FP8_PER_TOKEN, Quantization.NVFP4)
    return Result(out[0], out[1] if normed else None, out[2] if quantized else None, out[3] if has_scales else None)
