# SPDX-License-Identifier: Apache-2.0
"""The packed layout of Hopper's kernel, read back on the CPU by the instructions that the kernel decodes with."""

import pytest
import torch

from llm_quant_rocm.formats import fp8, nvfp4, nvfp4_packing, nvfp4_wgmma
from tests.inputs import assert_same
from tests.nvfp4_inputs import nasty_weight


def bf16_pairs(words: torch.Tensor) -> torch.Tensor:
    """The two bf16 [..., 2] in the bits of each 32-bit word, the lower half first."""
    halves = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], dim=-1)
    return torch.where(halves < 2**15, halves, halves - 2**16).to(torch.int16).view(torch.bfloat16)


def decode(words: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """Values [N, K] in fp32 of packed words [K/64, N/16, 128] and scale bytes, by `decode_words`' steps for bf16."""
    word = words.long() & 0xFFFFFFFF
    # Word lane * 4 + step belongs to rows lane / 4 and lane / 4 + 8; a scale byte stands at [row % 8][step][row / 8].
    scales = scale_bytes.view(*scale_bytes.shape[:2], 8, 1, 4, 2).expand(-1, -1, -1, 4, -1, -1)
    multiplier = bf16_pairs(scales.long() * 16 + 0x6F80)[..., 0].float()
    word = word.view(*word.shape[:2], 8, 4, 4)
    rotated = ((word >> 4) | (word << 28)) & 0xFFFFFFFF
    pairs = (
        ((word << 6) & 0x81C081C0, 0),
        ((word << 2) & 0x81C081C0, 0),
        (rotated & 0x81C081C0, 1),
        ((word & 0x81808180) | ((word >> 8) & 0x00400040), 1),
    )
    values = [bf16_pairs(bits & 0xFFFFFFFF).float() * multiplier[..., row, None] * 2.0**8 for bits, row in pairs]
    # [piece, tile, row, lane % 4, step, column] of each (row half, column half)
    stacked = torch.stack([torch.stack(values[:2], -2), torch.stack(values[2:], -2)], -3)
    # piece, tile, row, quarter, step, row half, column half, column
    return stacked.permute(1, 5, 2, 0, 4, 6, 3, 7).reshape(words.shape[1] * 16, words.shape[0] * 64)


def e4m3_bytes(word: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """E4M3 [..., 4] of the codes in the bytes of `word`, times a sixth of 2^6 * the scales whose bytes are `scales`."""
    codes = torch.stack([(word >> shift) & 0xFF for shift in (0, 8, 16, 24)], -1).to(torch.uint8)
    multiplier = (scales << 7).to(torch.int16).view(torch.float16) * torch.tensor(2**6 / 6 / 2**7).half()
    return (codes.view(torch.float8_e4m3fn).half() * multiplier[..., None]).to(torch.float8_e4m3fn)


def decode_fp8(words: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """E4M3 [N, K], columns in the order 0, 8, 1, 9, ... 7, 15 of every sixteen, by `decode_words_fp8`'s steps."""
    word = (words.long() & 0xFFFFFFFF).view(*words.shape[:2], 8, 4, 4)
    scales = scale_bytes.int().view(*scale_bytes.shape[:2], 8, 1, 4, 2).expand(-1, -1, -1, 4, -1, -1)
    rotated = ((word >> 4) | (word << 28)) & 0xFFFFFFFF
    first = ((word << 2) & 0x801C801C) | ((word << 6) & 0x1C001C00) | ((word >> 2) & 0x00800080)
    second = (rotated & 0x80188018) | (word & 0x1C001C00) | ((word >> 12) & 0x00040004) | ((word >> 8) & 0x00800080)
    rows = e4m3_bytes(first, scales[..., 0]), e4m3_bytes(second, scales[..., 1])[..., [1, 0, 3, 2]]
    # piece, tile, row, quarter, step, row half, column
    values = torch.stack(rows, -2).view(torch.uint8).permute(1, 5, 2, 0, 4, 3, 6)
    return values.reshape(words.shape[1] * 16, words.shape[0] * 64).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(("n", "k"), [(128, 128), (16, 64), (1, 16), (130, 272), (3000, 16)])
def test_the_kernels_steps_find_every_value(n: int, k: int) -> None:
    weight = nasty_weight(n, k)
    words, scale_bytes = nvfp4_wgmma.pack(weight.codes, weight.scales)
    (word_dtype, word_shape), (byte_dtype, byte_shape) = nvfp4_wgmma.parts(n, k)
    assert (words.dtype, words.shape, scale_bytes.dtype, scale_bytes.shape) == (
        word_dtype, word_shape, byte_dtype, byte_shape
    )  # fmt: skip
    values = decode(words, scale_bytes)
    expected = torch.zeros(values.shape)
    expected[:n, :k] = nvfp4.block_values(weight.codes, weight.scales)
    assert_same(values + 0.0, expected + 0.0)  # a zero scale loses the sign of its zeros


def test_all_codes_times_all_scales() -> None:
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8).repeat(127, 1))
    scales = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    values = decode(*nvfp4_wgmma.pack(codes, scales))[:127, :16]
    assert_same(values + 0.0, nvfp4.block_values(codes, scales) + 0.0)


@pytest.mark.parametrize(("n", "k"), [(128, 128), (1, 16), (130, 272)])
def test_the_fp8_steps_find_every_value(n: int, k: int) -> None:
    weight = nasty_weight(n, k)
    found = decode_fp8(*nvfp4_wgmma.pack(weight.codes, weight.scales)).float() + 0.0
    expected, tie = torch.zeros(found.shape), torch.zeros(found.shape, dtype=torch.bool)
    expected[:n, :k] = nvfp4.to_fp8(weight, fp8.OCP)[0].float()
    # A sixth of a scale is rounded to fp16, which turns one tie.
    tie[:n, :k] = nvfp4.block_values(weight.codes, weight.scales).abs() == 6 * 3.5 * 2**-9
    expected, tie = (
        tensor.unflatten(-1, (-1, 2, 8)).transpose(-1, -2).reshape(found.shape) for tensor in (expected, tie)
    )
    assert_same(found[~tie], expected[~tie] + 0.0)
    assert ((found[tie].abs() - 3.5 * 2**-9).abs() == 0.5 * 2**-9).all()


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 40, 32)], ids=str)
def test_empty_weights(shape: tuple[int, ...]) -> None:
    *leading, n, k = shape
    codes = torch.empty(*leading, n, k // 2, dtype=torch.uint8)
    scales = torch.empty(*leading, n, k // 16, dtype=torch.float8_e4m3fn)
    for tensor, (_, expected) in zip(nvfp4_wgmma.pack(codes, scales), nvfp4_wgmma.parts(n, k), strict=True):
        assert tensor.shape == (*leading, *expected) and not tensor.any()


def test_experts_are_packed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nasty_weight(70, 80, 2, 3)
    words, scale_bytes = nvfp4_wgmma.pack(weight.codes, weight.scales)
    for expert in ((0, 0), (1, 2)):
        alone = nvfp4_wgmma.pack(weight.codes[expert], weight.scales[expert])
        assert_same(words[expert], alone[0])
        assert_same(scale_bytes[expert], alone[1])
    monkeypatch.setattr(nvfp4_packing, "_ELEMENTS", 80 * 17)  # some rows at a time
    assert_same(nvfp4_wgmma.pack(weight.codes, weight.scales)[0], words)


def test_gate_and_up_take_turns() -> None:
    order = nvfp4_wgmma.gate_up_order(64, torch.device("cpu"))
    assert order.tolist() == [*range(8), *range(32, 40), *range(8, 16), *range(40, 48), *range(16, 24), *range(48, 56),
                              *range(24, 32), *range(56, 64)]  # fmt: skip
