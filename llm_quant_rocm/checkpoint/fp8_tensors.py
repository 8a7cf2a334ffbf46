# SPDX-License-Identifier: Apache-2.0
"""ModelOpt's FP8 weights (E4M3, one scale a tensor) as the PTPC path takes them: one scale a row."""

from collections.abc import Sequence

import torch

from llm_quant_rocm import hardware
from llm_quant_rocm.formats import fp8

# E4M3's NaN, its sign left out.
_NAN = 0x7F


def with_row_scales(
    codes: torch.Tensor, shard_scales: torch.Tensor, pieces: Sequence[tuple[str, slice]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K], in the flavour of their device, and fp32 scales [N, 1]: each row has that of its shard.

    Args:
        codes: E4M3 [N, K] as the checkpoint has them.
        shard_scales: fp32 [shards].
        pieces: (the checkpoint's name, its rows) of each shard.

    Raises:
        ValueError: a scale is not positive and finite, or a code is NaN; the message names the tensor.
    """
    scale = torch.empty(codes.shape[0], 1, dtype=torch.float32, device=codes.device)
    for (name, rows), value in zip(pieces, shard_scales, strict=True):
        if not (value.isfinite() and value > 0):
            raise ValueError(
                f"{name}_scale is {value.item():g}; a scale is positive and finite: the checkpoint is broken; "
                "fetch or export it again"
            )
        if bool(((codes[rows].view(torch.uint8) & 0x7F) == _NAN).any()):
            raise ValueError(f"{name} holds NaN: the checkpoint is broken; fetch or export it again")
        scale[rows] = value
    if hardware.detect(codes.device).fp8_dtype == fp8.FNUZ.dtype:
        return fp8.ocp_to_fnuz(codes, scale)
    return codes, scale
