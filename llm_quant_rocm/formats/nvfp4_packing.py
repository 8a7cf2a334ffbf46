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
    results = [torch.zeros((count, *shape), dtype=dtype, device=codes.device) for dtype, shape in parts]
    codes, scales = codes.reshape(count, n, half), scales.view(torch.uint8).reshape(count, n, half // 8)
    column_padding = parts[0][1][0] * columns // 2 - half
    step = max(rows, _ELEMENTS // max(2 * half, 1) // rows * rows)
    # Small experts together: a layer of hundreds would launch a hundred thousand kernels.
    together = max(1, step // max(n, 1))
    for expert in range(0, count, together):
        experts = slice(expert, expert + together)
        for first in range(0, n, step):
            some = slice(first, min(first + step, n))
            row_padding = -(some.stop - first) % rows
            pieces = (some.stop - first + row_padding) // rows
            packed = pack_rows(
                torch.nn.functional.pad(codes[experts, some], (0, column_padding, 0, row_padding)).flatten(0, 1),
                torch.nn.functional.pad(scales[experts, some], (0, column_padding // 8, 0, row_padding)).flatten(0, 1),
            )
            for result, part in zip(results, packed, strict=True):
                place = result[experts, :, first // rows : first // rows + pieces]
                place.copy_(part.unflatten(1, (-1, pieces)).transpose(0, 1))
    words, scale_bytes = (result.view(*leading, *result.shape[1:]) for result in results)
    return words, scale_bytes


def words_of(pairs: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Words int32 [...] of eight codes each, in four bytes: uint8 [..., 4].

    `tables` int32 [4, 256] say by a byte's place and value which bits of the word it sets.
    """
    index = pairs.int() + torch.arange(0, 1024, 256, dtype=torch.int32, device=pairs.device)
    # No two places set the same bit: to add is to unite.
    return tables.flatten().to(pairs.device)[index].sum(-1, dtype=torch.int32)
