# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights expanded to FP8 in memory on Hopper, for products of so many rows that this is the smaller part."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.nvfp4_wgmma import COLUMNS
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.decode_hopper import declare_fp8_table, decode_words_fp8, fill_fp8_table
from llm_quant_rocm.kernels.hopper import cta_barrier
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pdl import pdl_option
from llm_quant_rocm.kernels.sizes import cdiv

# Pieces of a program's tile, across and down.
DEPTH, ROW_TILES = 4, 4


@gluon.jit
def nvfp4_expand_kernel(
    words, scale_bytes, out, first_row_tile, rows, N, K,
    DEPTH: gl.constexpr, NT: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """Stores [NT * 16, DEPTH * 64] of the weight's rows from `first_row_tile` * 16 on, four E4M3 in an int32."""
    word_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [num_warps, 1], [1, 0])
    row_tiles = gl.cdiv(N, 128) * 8
    row_tile = first_row_tile + gl.program_id(1) * NT
    depth = gl.program_id(0) * DEPTH
    piece = gl.arange(0, DEPTH * NT, layout=gl.SliceLayout(1, word_layout))
    # Packed weights have an even number of pieces across.
    across = gl.minimum(depth + piece // NT, gl.cdiv(K, 128) * 2 - 1)
    piece = across.to(gl.int64) * row_tiles + row_tile + piece % NT
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, word_layout))
    table = declare_fp8_table(N)
    fill_fp8_table(table)
    cta_barrier()
    # A row's 16 words are four lanes' four, and each of a lane's is of another block.
    place = word & ~15 | (word & 3) << 2 | word >> 2 & 3
    codes = gl.load(words + piece[:, None] * 128 + place[None, :])
    pairs = gl.load(scale_bytes + piece[:, None] * 32 + (word >> 2)[None, :]).to(gl.int32)
    # piece, tile, row, block, word, row half
    values = decode_words_fp8(codes, pairs, table).reshape(DEPTH, NT, 8, 4, 4, 2)
    values = values.permute(1, 5, 2, 0, 4, 3).reshape(NT * 16, DEPTH * 16)
    values = gl.convert_layout(values, out_layout)
    row = gl.program_id(1) * (NT * 16) + gl.arange(0, NT * 16, layout=gl.SliceLayout(1, out_layout))
    column = depth * 16 + gl.arange(0, DEPTH * 16, layout=gl.SliceLayout(0, out_layout))
    inside = (row < rows)[:, None] & (column < K // 4)[None, :]
    if PDL:
        # The product before this one may still read what is overwritten here.
        gdc_wait()
        gdc_launch_dependents()
    gl.store(out + row.to(gl.int64)[:, None] * (K // 4) + column[None, :], values, mask=inside)


def expand_fp8(
    words: torch.Tensor, scale_bytes: torch.Tensor, first: int, rows: int, n: int, k: int, hardware: Hardware
) -> torch.Tensor:
    """Rows `first` (a multiple of 128) to first + rows of the weight [n, k] as `formats.nvfp4.to_fp8` makes them, E4M3
    [rows, k padded to a multiple of 64], columns in the order of `per_token_quant_fp8(interleave=True)`."""
    k = cdiv(k, COLUMNS) * COLUMNS
    out = torch.empty((rows, k), dtype=fp8.OCP.dtype, device=words.device)
    grid = (cdiv(k, DEPTH * 64), cdiv(rows, ROW_TILES * 16))
    launch(
        nvfp4_expand_kernel, grid,
        words, scale_bytes.view(torch.uint16), out.view(torch.int32), first // 16, rows, n, k,
        DEPTH=DEPTH, NT=ROW_TILES, PDL=hardware.pdl, num_warps=4, **pdl_option(hardware),
    )  # fmt: skip
    return out
