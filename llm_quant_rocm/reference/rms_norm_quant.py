# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, with or without a residual, and per-token FP8 quantization of its result."""

import torch

from llm_quant_rocm.formats import fp8


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised rows and the sum they were computed from, both [..., K] in x's dtype T:

    z = T(x + residual)                                   (x itself without a residual)
    n = T(z / sqrt(mean(z * z) + eps) * weight)           in fp32, rounded once
    """
    z = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = z.float()
    inverse = 1.0 / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse * weight.float()).to(x.dtype), z


def rms_norm_quant_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, fmt: fp8.Fp8Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [..., K], fp32 scales [..., 1], and the sum z [..., K] for the next residual."""
    normed, z = rms_norm(x, weight, eps, residual)
    return *fp8.quantize_rows(normed, fmt), z
