# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual, RMSNorm and quantization: the references of the separate operators, one after another.

    s = the all-reduce of x                                 `quick_reduce`, every row a buffer of its own
    z = T(s + residual)                                     (s itself without a residual)
    n = T(z / sqrt(mean(z * z) + eps) * (weight + weight_bias))
    codes and scales of n                                   FP8 per token by `formats.fp8`; NVFP4 by `formats.nvfp4`;
                                                            FP8 under a given scale: e4m3(n * (1 / scale)), clamped

Rows are padded with zeros to whole buffers of 256 values, so that no group of the wire straddles two rows. Where K is a
multiple of 32 that changes nothing: the sum is the one of `quick_reduce` over all values.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from llm_quant_rocm.formats import fp8, nvfp4, wire
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Result, Target, arrange_scales
from llm_quant_rocm.reference import quick_reduce
from llm_quant_rocm.reference.rms_norm_quant import rms_norm


def reduce_rows(inputs: Sequence[torch.Tensor], codec: wire.Codec, shots: int) -> torch.Tensor:
    """s [M, K] of every rank's x [M, K] (bf16 or fp16), by the one-shot or the two-shot of `quick_reduce`."""
    if len(inputs) == 1:
        return inputs[0]
    reduce = quick_reduce.two_shot if shots == 2 else quick_reduce.one_shot
    return reduce([padded(x) for x in inputs], codec)[:, : inputs[0].shape[1]]


def padded(x: torch.Tensor) -> torch.Tensor:
    """Rows [M, K] with zeros up to a multiple of 256 values."""
    return pad(x, (0, -x.shape[1] % wire.BLOCK))


def norm_quant(s: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target) -> Result:
    """What follows on the all-reduce s [M, K]."""
    # Only where there is a bias: a weight of -0 and 0 are +0.
    weight = norm.weight.float() + norm.weight_bias if norm.weight_bias else norm.weight
    normed, z = rms_norm(s, weight, norm.eps, residual)
    return Result(z, normed if target.normed else None, *_quantized(normed, norm.scale, target))


def reduce_norm_quant(
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    norm: Norm,
    target: Target,
    codec: wire.Codec = wire.CODECS["FP"],
    shots: int = 1,
) -> Result:
    """What every rank ends with, of one x [M, K] from each rank."""
    return norm_quant(reduce_rows(inputs, codec, shots), residual, norm, target)


def _quantized(
    normed: torch.Tensor, scale: torch.Tensor | None, target: Target
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if target.quantization is Quantization.FP8_PER_TOKEN:
        return fp8.quantize_rows(normed, target.fmt)
    if target.quantization is Quantization.NONE:
        return None, None
    assert scale is not None
    scale = scale.reshape(())  # of any number of dimensions, which results do not take over
    if target.quantization is Quantization.NVFP4:
        codes, scales = nvfp4.quantize_activation(normed, scale)
        return codes, arrange_scales(scales, target.layout)
    limit = target.fmt.max
    return (normed.float() * scale.float().reciprocal()).clamp_(-limit, limit).to(target.fmt.dtype), None
