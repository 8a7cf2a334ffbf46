# SPDX-License-Identifier: Apache-2.0
"""What rows become between two layers: the residual for the next norm, normalised rows, their codes and scales.

NVFP4's block scales, float8_e4m3fn [M, K/16], come in three orders of bytes. With k the block of row m:

    linear    m * K/16 + k
    128x4     tiles of 128 rows and 4 blocks, 512 bytes each, in rows of tiles; in a tile
              m % 32 * 16 + m % 128 // 32 * 4 + k % 4                       what tcgen05 and cuBLASLt read
    8x4       tiles of 8 rows and 4 blocks, 32 bytes each; in a tile  m % 8 * 4 + k % 4        for few rows

The tiled ones are padded to whole tiles, with zeros.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from llm_quant_rocm.formats.fp8 import OCP, Fp8Format
from llm_quant_rocm.formats.nvfp4 import BLOCK


class Quantization(StrEnum):
    """How normalised rows are quantized."""

    NONE = "none"
    FP8_PER_TOKEN = "fp8_per_token"
    FP8_STATIC = "fp8_static"
    NVFP4 = "nvfp4"


class ScaleLayout(StrEnum):
    """The order of NVFP4's block scales."""

    LINEAR = "linear"
    SWIZZLED_128X4 = "128x4"
    SWIZZLED_8X4 = "8x4"

    @property
    def tile_rows(self) -> int:
        """Rows of a tile; 1 where there are none."""
        return {"linear": 1, "128x4": 128, "8x4": 8}[self]

    def shape(self, rows: int, blocks: int) -> tuple[int, int]:
        """The shape, padded, of the scales of `rows` rows of `blocks` blocks."""
        if self is ScaleLayout.LINEAR:
            return rows, blocks
        return -(-rows // self.tile_rows) * self.tile_rows, -(-blocks // 4) * 4


class Result(NamedTuple):
    """What `reduce_norm_quant` gives, of x [..., K] in M rows.

    Attributes:
        residual: [..., K] in x's dtype: the sum that was normalised, which is the next residual.
        normed: [..., K] in x's dtype, or None.
        codes: FP8 [..., K], NVFP4 uint8 [..., K/2] with the even column in the low nibble, or None.
        scales: of FP8 per token fp32 [..., 1]; of NVFP4 float8_e4m3fn, [..., K/16] or tiled [padded M, padded K/16];
            or None.
    """

    residual: torch.Tensor
    normed: torch.Tensor | None
    codes: torch.Tensor | None
    scales: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Norm:
    """The operands of a norm and of the quantization behind it.

    Attributes:
        weight: [K], of any float dtype.
        eps: added to the mean square.
        weight_bias: added to the weight in fp32; 1 for Gemma's norm.
        scale: fp32, one value: what FP8_STATIC divides by, or NVFP4's encoding scale (2688 / amax); or None.
    """

    weight: torch.Tensor
    eps: float = 1e-6
    weight_bias: float = 0.0
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Target:
    """What is asked of normalised rows.

    Attributes:
        quantization: how they are quantized.
        fmt: the flavour of FP8 codes.
        layout: the order of NVFP4's block scales.
        normed: whether the normalised rows in 16 bits are asked for as well.
    """

    quantization: Quantization = Quantization.NONE
    fmt: Fp8Format = OCP
    layout: ScaleLayout = ScaleLayout.LINEAR
    normed: bool = True

    def empty(self, x: torch.Tensor) -> Result:
        """Memory for the results of x [M, K]."""
        rows, columns = x.shape
        codes = scales = None
        if self.quantization in (Quantization.FP8_PER_TOKEN, Quantization.FP8_STATIC):
            codes = x.new_empty((rows, columns), dtype=self.fmt.dtype)
        if self.quantization is Quantization.FP8_PER_TOKEN:
            scales = x.new_empty((rows, 1), dtype=torch.float32)
        if self.quantization is Quantization.NVFP4:
            codes = x.new_empty((rows, columns // 2), dtype=torch.uint8)
            scales = x.new_empty(self.layout.shape(rows, columns // BLOCK), dtype=torch.float8_e4m3fn)
        return Result(
            x.new_empty((rows, columns)), x.new_empty((rows, columns)) if self.normed else None, codes, scales
        )


def arrange_scales(scales: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """NVFP4's block scales [M, K/16] in `layout`, padded; linear ones as they are."""
    if layout is ScaleLayout.LINEAR:
        return scales
    rows, blocks = scales.shape
    shape = layout.shape(rows, blocks)
    padded = torch.zeros(shape, dtype=torch.uint8, device=scales.device)
    padded[:rows, :blocks] = scales.view(torch.uint8)
    inner = 4 if layout is ScaleLayout.SWIZZLED_128X4 else 1  # rows of a tile come in fours 32 apart
    tiles = padded.view(shape[0] // layout.tile_rows, inner, layout.tile_rows // inner, shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(shape).view(scales.dtype)
