# SPDX-License-Identifier: Apache-2.0
"""Packed NVFP4 weights back to rows of 16-bit or FP8 values on CDNA GPUs, for the matrix products of others.

With many rows of x decoding every weight once costs little, and a vendor's GEMM on a 16-bit weight is exact too.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llm_quant_rocm.formats.nvfp4_mfma import PAD_K, PAD_N
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.nvfp4_mfma import decode_pieces, load_weight
from llm_quant_rocm.kernels.sizes import cdiv


@gluon.jit(do_not_specialize=["first_row"])
def nvfp4_mfma_expand_kernel(
    words, scales, factor, out, first_row, rows, N, K,
    BLOCK_N: gl.constexpr, ARCH: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """Rows first_row .. first_row + rows of the weight [N, K] to out [rows, K], BLOCK_N rows and 256 columns a program:
    codes times block scales, times `factor` if there is one."""
    NT: gl.constexpr = BLOCK_N // 16
    word_layout: gl.constexpr = gl.BlockedLayout([2, 4], [1, 64], [num_warps, 1], [1, 0])
    scale_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 64], [num_warps, 1], [1, 0])
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 4], [num_warps, 1], [1, 0])
    row_tile = gl.arange(0, NT, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 256, layout=gl.SliceLayout(0, word_layout))
    word_offset = row_tile[:, None] * 256 + word[None, :]
    piece = gl.arange(0, NT // 2, layout=gl.SliceLayout(1, scale_layout))
    lane = gl.arange(0, 64, layout=gl.SliceLayout(0, scale_layout))
    scale_offset = piece[:, None] * 64 + lane[None, :]
    row = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, row_layout))
    for step in gl.static_range(2):
        chunk = gl.program_id(1) * 2 + step
        first = first_row // 32 + gl.program_id(0) * (NT // 2) + chunk * ((N + 127) // 128 * 4)
        codes, scale_words = load_weight(words, scales, first, word_offset, scale_offset)
        values = decode_pieces(codes, scale_words, ARCH, False).permute(0, 2, 1, 5, 3, 4).reshape(BLOCK_N, 128)
        values = gl.convert_layout(values, row_layout)
        if factor is not None:
            values = values.to(gl.float32) * factor
        column = chunk * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, row_layout))
        place = row.to(gl.int64)[:, None] * K + column[None, :]
        gl.store(out + place, values.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < K)[None, :])


def expand(
    words: torch.Tensor,
    scale_bytes: torch.Tensor,
    factor: float | None,
    out: torch.Tensor,
    first_row: int,
    n: int,
    hardware: Hardware,
) -> None:
    """Decodes rows first_row .. first_row + len(out) of a weight [n, K] into out [rows, K], contiguous.

    bf16 or fp16 out: codes times block scales, exact. FP8 out (of the architecture's flavour): that times `factor`,
    rounded. `first_row` is a multiple of 128.
    """
    rows, k = out.shape
    block_n = PAD_N
    launch(
        nvfp4_mfma_expand_kernel, (cdiv(rows, block_n), cdiv(k, PAD_K)),
        words, scale_bytes.view(torch.int32), factor, out, first_row, rows, n, k,
        BLOCK_N=block_n, ARCH=hardware.arch, num_warps=4,
    )  # fmt: skip
