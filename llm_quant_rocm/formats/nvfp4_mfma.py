# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights arranged for the matrix instructions (MFMA) of CDNA GPUs: layouts "mfma" and "mfma_fp4".

A lane of a 16x16 matrix instruction holds neighbouring columns of one row: lane l has row l % 16, and of the columns
group l / 16. The weight is cut in pieces of 32 rows and 128 columns, and every lane finds its codes of a piece in twice
16 bytes and its scales in 4, so nothing moves between lanes after the load. Group g has columns 32 g .. 32 g + 31, two
blocks, rather than 8 columns of every 32 as the instructions count them: the order of columns does not matter to a sum,
and so a scale serves two words of a lane. The kernel moves the columns of x accordingly.

The two layouts differ in the order of the bits in a word, which `kernels/decode_cdna.py` explains.
"""

import torch

from llm_quant_rocm.formats.nvfp4_packing import Parts, move_bits, pack_pieces

# Codes in the places of bytes' and of fp16's sign, exponent and mantissa: gfx90a and gfx942.
LAYOUT = "mfma"
# Codes side by side: gfx950, which converts them itself.
LAYOUT_FP4 = "mfma_fp4"
# The same with the rows of w13 = [gate, up] in turns, 16 of the gate and 16 of up, so that one lane holds both and can
# apply the activation.
GATE_UP = "_gate_up"
LAYOUTS = (LAYOUT, LAYOUT_FP4, LAYOUT + GATE_UP, LAYOUT_FP4 + GATE_UP)
ROWS, COLUMNS = 32, 128
# Weights are padded with zero codes: to whole tiles of every configuration, and to pairs of steps over K.
PAD_N, PAD_K = 128, 256
# Where layout "mfma" has the bits of a word's eight codes: those of four in bits 1, 2, 3 and 7 of a byte, those of the
# other four in the same places of the word in reverse.
_PLACES = (
    1, 2, 3, 7, 17, 18, 19, 23, 9, 10, 11, 15, 25, 26, 27, 31,
    30, 29, 28, 24, 14, 13, 12, 8, 22, 21, 20, 16, 6, 5, 4, 0,
)  # fmt: skip


def layout(arch: str, gate_up: bool = False) -> str:
    """The layout that the kernel reads on `arch`."""
    return (LAYOUT_FP4 if arch == "gfx950" else LAYOUT) + GATE_UP * gate_up


def parts(n: int, k: int) -> Parts:
    """dtype and shape of the words and of the scale bytes of a weight [n, k]."""
    shape = (-(-k // PAD_K) * (PAD_K // COLUMNS), -(-n // PAD_N) * (PAD_N // ROWS))
    return (torch.int32, (*shape, 512)), (torch.uint8, (*shape, 256))


def gate_up_order(n: int, device: torch.device) -> torch.Tensor:
    """Which row of [gate, up] (n rows, a multiple of 32) stands at each place of the layouts with gate and up."""
    return torch.arange(n, device=device).view(2, n // ROWS, ROWS // 2).transpose(0, 1).flatten()


def pack(codes: torch.Tensor, scales: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's codes and block scales as the kernel reads them.

    Args:
        codes: uint8 [..., N, K/2], the even k in the low nibble.
        scales: float8_e4m3fn [..., N, K/16], not negative. -0 becomes +0.
        layout: one of `LAYOUTS`, by its order of bits.

    Returns:
        words int32 [..., K/128, N/32, 512] and scale bytes uint8 [..., K/128, N/32, 256] (E4M3), with N padded to a
        multiple of 128 and K of 256.

    Words of a piece stand as [row / 16][lane][step], scale bytes as [lane][row / 16][block], where lane 16 g + row % 16
    has columns 32 g + 8 step .. + 7 and blocks 2 g and 2 g + 1. -0 codes become +0.
    """
    n, k = codes.shape[-2], 2 * codes.shape[-1]

    def pack_rows(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = _without_negative_zeros(codes.view(torch.int32))
        if not layout.startswith(LAYOUT_FP4):
            words = move_bits(words, _PLACES)
        return _by_lane(words), _scales_by_lane(scales & 0x7F)

    return pack_pieces(codes, scales, parts(n, k), ROWS, COLUMNS, pack_rows)


def _without_negative_zeros(words: torch.Tensor) -> torch.Tensor:
    """Words of eight codes, -0 as 0."""
    is_not_0 = (words | words >> 1 | words >> 2) & 0x11111111
    return words & (is_not_0 << 3 | 0x77777777)


def _by_lane(words: torch.Tensor) -> torch.Tensor:
    """Words [K/128, N/32, 512] of words [N, K/8]."""
    n, eights = words.shape
    return words.view(n // ROWS, 2, 16, eights // 16, 4, 4).permute(3, 0, 1, 4, 2, 5).flatten(2)


def _scales_by_lane(scales: torch.Tensor) -> torch.Tensor:
    """Scale bytes [K/128, N/32, 256] of bytes [N, K/16]."""
    n, blocks = scales.shape
    return scales.view(n // ROWS, 2, 16, blocks // 8, 4, 2).permute(3, 0, 4, 2, 1, 5).flatten(2)
