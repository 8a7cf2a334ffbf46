# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and NVFP4 weights on CDNA GPUs (gfx90a, gfx942, gfx950)."""

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.decode_cdna import FACTOR, decode_scales, decode_words

LAYOUT = "mfma"
ROWS, COLUMNS = 32, 128
PAD_N, PAD_K = 128, 128


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    split_k: int = 1
    warps: int = 4


def pack(codes: torch.Tensor, scales: torch.Tensor, hardware: Hardware) -> tuple[torch.Tensor, torch.Tensor]:
    leading, (n, half) = codes.shape[:-2], codes.shape[-2:]
    padded_n, padded_k = -(-n // PAD_N) * PAD_N, -(-2 * half // PAD_K) * PAD_K
    codes = torch.nn.functional.pad(codes, (0, padded_k // 2 - half, 0, padded_n - n)).reshape(-1, padded_n, padded_k // 2)
    scales = torch.nn.functional.pad(scales.view(torch.uint8), (0, padded_k // 16 - half // 8, 0, padded_n - n)) & 0x7F
    scales = scales.reshape(-1, padded_n, padded_k // 16)
    E = codes.shape[0]
    nib = torch.stack([codes & 15, codes >> 4], -1)  # E, N, K/2, 2
    nib = torch.where(nib == 8, 0, nib).to(torch.int32)
    # K = chunk, g, c, i ; N = piece, t, row
    nib = nib.view(E, padded_n // 32, 2, 16, padded_k // 128, 4, 4, 8).permute(0, 4, 1, 2, 5, 3, 6, 7)
    if hardware.arch == "gfx950":
        words = sum(nib[..., i] << (4 * i) for i in range(8))
    else:
        def put(c, sign, e1, e0, m):
            return ((c >> 3 & 1) << sign) | ((c >> 2 & 1) << e1) | ((c >> 1 & 1) << e0) | ((c & 1) << m)
        words = 0
        for byte, k in enumerate((0, 2, 1, 3)):
            words = words | put(nib[..., k], 8 * byte + 7, 8 * byte + 3, 8 * byte + 2, 8 * byte + 1)
            b = 31 - 8 * byte
            words = words | put(nib[..., k + 4], b - 7, b - 3, b - 2, b - 1)
    words = words.to(torch.int32).reshape(*leading, padded_k // 128, padded_n // 32, 512)
    sb = scales.view(E, padded_n // 32, 2, 16, padded_k // 128, 4, 2).permute(0, 4, 1, 5, 3, 2, 6)
    return words.contiguous(), sb.reshape(*leading, padded_k // 128, padded_n // 32, 256).contiguous()


@gluon.jit
def _load_weight(words, scales, piece, word_offset, scale_offset):
    """Words [BLOCK_N / 16, 256] and scale words [BLOCK_N / 32, 64] from piece `piece` on."""
    piece = piece.to(gl.int64)
    return buffer_load(words + piece * 512, word_offset), buffer_load(scales + piece * 64, scale_offset)


@gluon.jit
def _for_words(scales, words):
    """Scales [piece, lane, row tile] for the two words of a block [piece, row tile, lane, word]."""
    scales = scales.permute(0, 2, 1)
    return gl.convert_layout(gl.join(scales, scales), words.type.layout, assert_trivial=True)


@gluon.jit
def _decode(words, scale_words, ARCH: gl.constexpr, FP16: gl.constexpr, layout: gl.constexpr):
    NT: gl.constexpr = words.shape[0]
    words_0, words_1 = words.reshape(NT // 2, 2, 64, 2, 2).permute(0, 1, 2, 4, 3).split()  # by block
    scales_0, scales_1 = decode_scales(scale_words, ARCH, FP16)
    values_0 = decode_words(words_0, _for_words(scales_0, words_0), 0, ARCH, FP16)
    values_1 = decode_words(words_1, _for_words(scales_1, words_1), 1, ARCH, FP16)
    values = gl.join(values_0, values_1)  # piece, row tile, lane, word, 2, 2, 2, block
    values = values.reshape(NT, 4, 16, 2, 8, 2).permute(0, 2, 5, 3, 1, 4).reshape(NT * 16, 128)
    return gl.convert_layout(values, layout, assert_trivial=True)


@gluon.jit
def _not_before(words):
    """The same registers, which what follows cannot read earlier than here: an empty statement that must stay in its
    place among the loads and barriers."""
    return gl.inline_asm_elementwise("", "=v,0", [words], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["M"])
def nvfp4_mfma_kernel(
    x, words, scales, global_scale, bias, out, partial, M, N, K, stride_x,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLIT_K: gl.constexpr, EVEN_K: gl.constexpr, ARCH: gl.constexpr,
    FP16: gl.constexpr, UNSCALE: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    dtype: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    NT: gl.constexpr = BLOCK_N // 16
    version: gl.constexpr = 2 if ARCH == "gfx90a" else 3 if ARCH == "gfx942" else 4
    depth: gl.constexpr = 32 if ARCH == "gfx950" else 16
    acc_layout: gl.constexpr = AMDMFMALayout(version, [16, 16, depth], False, [num_warps, 1], tiles_per_warp=[2, 1])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 8)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, acc_layout, 8)
    word_layout: gl.constexpr = gl.BlockedLayout([2, 4], [1, 64], [num_warps, 1], [1, 0])
    scale_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 64], [num_warps, 1], [1, 0])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 16], [num_warps, 1], [1, 0])
    shared_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 16, [1, 0])

    tiles_m = gl.cdiv(M, BLOCK_M)
    tile = gl.program_id(0)
    tile_m = tile % tiles_m
    tile_n = tile // tiles_m
    row_pieces = (N + 127) // 128 * 4
    chunks = gl.cdiv(K, 128)
    first = chunks * gl.program_id(1) // SPLIT_K
    end = chunks * (gl.program_id(1) + 1) // SPLIT_K
    last = chunks - 1

    nt = gl.arange(0, NT, layout=gl.SliceLayout(1, word_layout))
    lane4 = gl.arange(0, 256, layout=gl.SliceLayout(0, word_layout))
    word_offset = tile_n * (NT * 256) + nt[:, None] * 256 + lane4[None, :]
    np = gl.arange(0, NT // 2, layout=gl.SliceLayout(1, scale_layout))
    lane = gl.arange(0, 64, layout=gl.SliceLayout(0, scale_layout))
    scale_offset = tile_n * (NT * 32) + np[:, None] * 64 + lane[None, :]

    x += (tile_m * BLOCK_M).to(gl.int64) * stride_x
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, load_layout))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, load_layout))
    x_offset = gl.minimum(m, M - 1 - tile_m * BLOCK_M)[:, None] * stride_x + k[None, :]

    shared_0 = gl.allocate_shared_memory(dtype, [BLOCK_M, 128], shared_layout)
    shared_1 = gl.allocate_shared_memory(dtype, [BLOCK_M, 128], shared_layout)
    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=acc_layout)

    _store_x(shared_0, _load_x(x, x_offset, k, first, K, EVEN_K), BLOCK_M)
    x_1 = _load_x(x, x_offset, k, gl.minimum(first + 1, last), K, EVEN_K)
    scale_offset = _not_before(scale_offset)
    codes_0, scales_0 = _load_weight(words, scales, first * row_pieces, word_offset, scale_offset)
    codes_1, scales_1 = _load_weight(words, scales, gl.minimum(first + 1, last) * row_pieces, word_offset, scale_offset)
    for step in range(first, end - 1, 2):
        ahead = gl.minimum(step + 2, last)
        x_0 = _load_x(x, x_offset, k, ahead, K, EVEN_K)
        b = shared_0.permute((1, 0)).load(x_layout)
        a = _decode(_not_before(codes_0), _not_before(scales_0), ARCH, FP16, w_layout)
        codes_0, scales_0 = _load_weight(words, scales, ahead * row_pieces, word_offset, scale_offset)
        acc = mfma(a, b, acc)
        _store_x(shared_1, x_1, BLOCK_M)

        ahead = gl.minimum(step + 3, last)
        x_1 = _load_x(x, x_offset, k, ahead, K, EVEN_K)
        b = shared_1.permute((1, 0)).load(x_layout)
        a = _decode(_not_before(codes_1), _not_before(scales_1), ARCH, FP16, w_layout)
        codes_1, scales_1 = _load_weight(words, scales, ahead * row_pieces, word_offset, scale_offset)
        acc = mfma(a, b, acc)
        _store_x(shared_0, x_0, BLOCK_M)
    if (end - first) % 2 == 1:
        b = shared_0.permute((1, 0)).load(x_layout)
        a = _decode(codes_0, scales_0, ARCH, FP16, w_layout)
        acc = mfma(a, b, acc)

    rows = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, acc_layout))
    om = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, acc_layout))
    acc = acc * UNSCALE * gl.load(global_scale + rows)[:, None]
    gl.store(out + om[None, :].to(gl.int64) * N + rows[:, None], acc.to(dtype), mask=(om < M)[None, :] & (rows < N)[:, None])


@gluon.jit
def _load_x(x, offset, k, step, K, EVEN_K: gl.constexpr):
    if EVEN_K:
        return buffer_load(x + step * 128, offset)
    else:
        return buffer_load(x + step * 128, offset, mask=(k < K - step * 128)[None, :], other=0.0)


@gluon.jit
def _store_x(shared, x, BLOCK_M: gl.constexpr):
    """Columns g, c, i of x as columns c, g, i."""
    shared.store(x.reshape(BLOCK_M, 4, 4, 8).permute(0, 2, 1, 3).reshape(BLOCK_M, 128))


def gemm(x, words, scale_bytes, global_scale, bias, n, hardware, config):
    m, k = x.shape
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    fp16 = x.dtype == torch.float16
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    nvfp4_mfma_kernel[(tiles, config.split_k)](
        x, words, scale_bytes.view(torch.int32), global_scale, bias, out, None, m, n, k, x.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, SPLIT_K=config.split_k, EVEN_K=k % 128 == 0, ARCH=hardware.arch,
        FP16=fp16, UNSCALE=1 / FACTOR[hardware.arch, fp16], num_warps=config.warps,
    )  # fmt: skip
    return out
