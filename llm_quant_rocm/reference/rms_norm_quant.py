# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, with or without a residual, and per-token FP8 quantization of its result."""

import torch
from torch.nn.functional import pad

from llm_quant_rocm.formats import fp8


def mean_square(wide: torch.Tensor) -> torch.Tensor:
    """Mean of the squares of fp32 values [..., K], fp32 [..., 1], of one order and so of one result on every device.

    Eight neighbours in fp32, ((a + b) + (c + d)) + ((e + f) + (g + h)), the eights in fp64: there the order is lost in
    rounding to fp32. Zeros fill the last eight.
    """
    sums = pad(wide.square(), (0, -wide.shape[-1] % 8)).unflatten(-1, (-1, 8))
    for _ in range(3):
        sums = sums[..., 0::2] + sums[..., 1::2]
    # A tensor, because division by a Python number becomes a multiplication by its reciprocal on some devices.
    count = torch.full((), wide.shape[-1], dtype=torch.float32, device=wide.device)
    return sums.flatten(-2).sum(-1, keepdim=True, dtype=torch.float64).float() / count


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised rows and the sum they were computed from, both [..., K] in x's dtype T:

    z = T(x + residual)                                   (x itself without a residual)
    n = T(z / sqrt(mean(z * z) + eps) * weight)           in fp32, rounded once; the mean by `mean_square`

    What is computed is contiguous; a copy is made only where rows overlap, as those of a sliding window.
    """
    z = x if residual is None else (x.float() + residual.float()).to(x.dtype).contiguous()
    wide = z.float()
    # In fp64, because torch's fp32 root is not correctly rounded on every CPU.
    inverse = 1.0 / torch.sqrt((mean_square(wide) + eps).double()).float()
    return (wide * inverse * weight.float()).to(x.dtype).contiguous(), z


def rms_norm_quant_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, fmt: fp8.Fp8Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [..., K], fp32 scales [..., 1], and the sum z [..., K] for the next residual."""
    normed, z = rms_norm(x, weight, eps, residual)
    return *fp8.quantize_rows(normed, fmt), z
