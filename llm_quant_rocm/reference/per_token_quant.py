# SPDX-License-Identifier: Apache-2.0
"""Per-token FP8 quantization."""

import torch

from llm_quant_rocm.formats import fp8


def per_token_quant_fp8(x: torch.Tensor, fmt: fp8.Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., K] and fp32 scales [..., 1] of x [..., K]."""
    return fp8.quantize_rows(x, fmt)
