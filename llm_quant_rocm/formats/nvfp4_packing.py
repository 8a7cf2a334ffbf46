# SPDX-License-Identifier: Apache-2.0
"""What the layouts of the NVFP4 kernels share: a weight becomes pieces of so many rows and columns, some at a time."""

from collections.abc import Callable
from math import prod

import torch

# dtype and shape of the words and of the scale bytes of a weight.
Parts = tuple[tuple[torch.dtype, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...]]]
# Codes are packed this many at a time, so that temporary tensors stay small however large the weight.
_ELEMENTS = 2**23


def pack_pieces(
    codes: torch.Tensor,
    scales: torch.Tensor,
    parts: Parts,
    rows: int,
    columns: int,
    pack_rows: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words [..., K / columns, N / rows, words] and scale bytes [..., K / columns, N / rows, bytes] of a weight.

    Args:
        codes: uint8 [..., N, K/2], the even k in the low nibble.
        scales: float8_e4m3fn [..., N, K/16].
        parts: dtypes and shapes of the results for one [N, K], N and K padded to whole pieces.
        rows, columns: those of a piece.
        pack_rows: makes words and scale bytes of some whole pieces' codes and scales (as uint8), padded with zeros.
    """
    leading, (n, half) = codes.shape[:-2], codes.shape[-2:]
    count = prod(leading)
    words, scale_bytes = (torch.zeros((count, *shape), dtype=dtype, device=codes.device) for dtype, shape in parts)
    codes, scales = codes.reshape(count, n, half), scales.view(torch.uint8).reshape(count, n, half // 8)
    column_padding = words.shape[1] * columns // 2 - half
    step = max(rows, _ELEMENTS // max(2 * half, 1) // rows * rows)
    for index in range(count):
        for first in range(0, n, step):
            some = slice(first, min(first + step, n))
            row_padding = -(some.stop - first) % rows
            place = slice(first // rows, (some.stop + row_padding) // rows)
            words[index, :, place], scale_bytes[index, :, place] = pack_rows(
                torch.nn.functional.pad(codes[index, some], (0, column_padding, 0, row_padding)),
                torch.nn.functional.pad(scales[index, some], (0, column_padding // 8, 0, row_padding)),
            )
    return words.view(*leading, *words.shape[1:]), scale_bytes.view(*leading, *scale_bytes.shape[1:])
