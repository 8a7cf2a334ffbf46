# SPDX-License-Identifier: Apache-2.0
"""What the layouts of the NVFP4 kernels share: a weight becomes pieces of so many rows and columns, some at a time."""

from collections.abc import Callable
from functools import cache
from math import prod

import torch

# dtype and shape of the words and of the scale bytes of a weight.
Parts = tuple[tuple[torch.dtype, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...]]]
# Codes are packed this many at a time, so that temporary tensors stay small however large the weight: 16 MiB each.
_ELEMENTS = 2**25


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
        for first in range(0, n if half else 0, step):
            some = slice(first, min(first + step, n))
            row_padding = -(some.stop - first) % rows
            pieces = (some.stop - first + row_padding) // rows
            packed = pack_rows(
                _padded(codes[experts, some], row_padding, column_padding),
                _padded(scales[experts, some], row_padding, column_padding // 8),
            )
            for result, part in zip(results, packed, strict=True):
                place = result[experts, :, first // rows : first // rows + pieces]
                place.copy_(part.unflatten(1, (-1, pieces)).transpose(0, 1))
    words, scale_bytes = (result.view(*leading, *result.shape[1:]) for result in results)
    return words, scale_bytes


def _padded(part: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The rows of all experts in `part` [E, N, K], with so many rows and columns of zeros behind each one's."""
    # Contiguous also where there is nothing to add and the weight is column-major: of rows, words are views.
    return torch.nn.functional.pad(part, (0, columns, 0, rows)).flatten(0, 1).contiguous()


def move_bits(words: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """int32 words with bit i of each at bit places[i], a permutation of 0 .. 31."""
    result = torch.zeros_like(words)
    for shift, mask in _moves(places):
        # A shift to the right repeats the sign: the mask comes after it.
        result |= (words & mask) << shift if shift >= 0 else (words >> -shift) & mask
    return result


@cache
def _moves(places: tuple[int, ...]) -> list[tuple[int, int]]:
    """(shift, mask as int32) of the bits that move as far as each other: to the left, where they were; to the right,
    where they come to."""
    masks: dict[int, int] = {}
    for bit, place in enumerate(places):
        masks[place - bit] = masks.get(place - bit, 0) | 1 << min(bit, place)
    return [(shift, mask - (mask >> 31 << 32)) for shift, mask in masks.items()]
