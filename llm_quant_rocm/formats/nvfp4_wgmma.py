# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights arranged for Hopper's warpgroup matrix units: layout "wgmma".

A wgmma takes its first operand from registers. The weight is cut in pieces of 16 rows and 64 columns, four operand
fragments, and every lane finds its codes of a piece in 16 bytes, at the bits where `kernels/decode_hopper.py` turns
them into values with the fewest instructions. Nothing moves between lanes after the load. That is for products in 16
bits; for those in E4M3 a lane takes four words of one block from the 16 bytes of four (`nvfp4_wgmma.load_blocks`).
"""

import torch

from llm_quant_rocm.formats.nvfp4_packing import Parts, move_bits, pack_pieces

LAYOUT = "wgmma"
# The same with the rows of w13 = [gate, up] in turns, eight of the gate and eight of up, so that one program holds both
# and can apply the activation.
LAYOUT_GATE_UP = "wgmma_gate_up"
LAYOUTS = (LAYOUT, LAYOUT_GATE_UP)
ROWS, COLUMNS = 16, 64
# Weights are padded with zero codes to whole tiles of every configuration.
PAD_N, PAD_K = 128, 128
# Scales are stored as scale * 2^7, the upper half of an fp16.
SCALE_EXPONENT = 7
# Where `decode_words` finds the bits of a word's four bytes, by (row half, column half), each the codes of two columns.
_PLACES = (
    0, 1, 2, 9, 16, 17, 18, 25,
    4, 5, 6, 13, 20, 21, 22, 29,
    10, 11, 12, 19, 26, 27, 28, 3,
    14, 15, 8, 7, 30, 31, 24, 23,
)  # fmt: skip


def layout(arch: str, gate_up: bool = False) -> str:
    """The layout that the kernels read; `arch` is Hopper's."""
    return LAYOUT_GATE_UP if gate_up else LAYOUT


def parts(n: int, k: int) -> Parts:
    """dtype and shape of the words and of the scale bytes of a weight [n, k]."""
    row_tiles, pieces = -(-n // PAD_N) * (PAD_N // ROWS), -(-k // PAD_K) * (PAD_K // COLUMNS)
    return (torch.int32, (pieces, row_tiles, 128)), (torch.uint8, (pieces, row_tiles, 64))


def gate_up_order(n: int, device: torch.device) -> torch.Tensor:
    """Which row of [gate, up] (n rows, a multiple of 16) stands at each place of LAYOUT_GATE_UP."""
    return torch.arange(n, device=device).view(2, n // ROWS, ROWS // 2).transpose(0, 1).flatten()


def pack(codes: torch.Tensor, scales: torch.Tensor, layout: str = LAYOUT) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's codes and block scales as the kernel reads them.

    Args:
        codes: uint8 [..., N, K/2], the even k in the low nibble.
        scales: float8_e4m3fn [..., N, K/16], not negative.
        layout: one of `LAYOUTS`; they have the same bits, and the caller orders the rows.

    Returns:
        words int32 [..., K/64, N/16, 128], with N and K padded to multiples of 128, and scale bytes uint8
        [..., K/64, N/16, 64].

    Word lane * 4 + step of a piece holds what lane `lane` multiplies in fragment `step`: columns 16 * step + 2 * (lane
    % 4) + {0, 1, 8, 9} of rows lane / 4 and lane / 4 + 8. `decode_hopper` says where in the word. The scale bytes of a
    piece stand as [row % 8][step][row / 8]; a byte is the upper half of scale * 2^7 in fp16, exact for every scale. A
    block whose scale is 0 gets zero codes, so what its byte stands for does not matter.
    """
    return pack_pieces(codes, scales, parts(codes.shape[-2], 2 * codes.shape[-1]), ROWS, COLUMNS, _pack_rows)


def _pack_rows(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = scales.view(torch.float8_e4m3fn).float()
    codes = torch.where(values.unsqueeze(-1) == 0, 0, codes.unflatten(-1, (-1, 8))).flatten(-2)
    return _words(codes), _scale_bytes(values)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Words [K/64, N/16, 128] of codes uint8 [N, K/2]: each of a word's four pairs of codes at the bits where
    `decode_words` finds it with the fewest instructions."""
    n, half = codes.shape
    # Words of four lanes' bytes, a byte for two neighbouring columns: [tile, row half, row, piece, step, column half]
    of_lanes = codes.view(torch.int32).view(n // ROWS, 2, 8, 2 * half // COLUMNS, 4, 2).permute(3, 0, 2, 4, 1, 5)
    # become words of a lane's four: [piece, tile, row, step, lane % 4, (row half, column half)].
    of_halves = of_lanes.flatten(4).view(torch.uint8).unflatten(-1, (4, 4)).transpose(-1, -2).contiguous()
    return move_bits(of_halves.view(torch.int32).squeeze(-1).transpose(3, 4).flatten(2), _PLACES)


def _scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Bytes [K/64, N/16, 64] of scales fp32 [N, K/16]."""
    n, blocks = scales.shape
    upper = ((scales * 2.0**SCALE_EXPONENT).to(torch.float16).view(torch.int16) >> 7).to(torch.uint8)
    return upper.view(n // ROWS, 2, 8, blocks // 4, 4).permute(3, 0, 2, 4, 1).flatten(2)
