# SPDX-License-Identifier: Apache-2.0
"""The packed layout of Hopper's kernel, read back on the CPU by the instructions that the kernel decodes with."""

import pytest
import torch

from llm_quant_rocm.formats import fp8, nvfp4, nvfp4_packing, nvfp4_wgmma
from tests.inputs import assert_same, temporaries
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


def e4m3_sixths(pairs: torch.Tensor, multiplier: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3, as the kernel's conversion makes them of the lower and the upper bf16 in a register."""
    products = bf16_pairs(pairs & 0xFFFFFFFF) * multiplier[..., None].bfloat16()
    sixths = products * torch.tensor(0x422B, dtype=torch.int16).view(torch.bfloat16)
    lower, upper = sixths.view(torch.int16).int().unbind(-1)
    registers = lower << 16, (upper << 16) | (lower & 0xFFFF)  # the upper one keeps the lower one below its last bit
    return tuple(register.view(torch.float32).to(torch.float8_e4m3fn) for register in registers)


def decode_fp8(words: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """E4M3 [N, K], columns in the order 0, 8, 1, 9, ... 7, 15 of every sixteen, by `decode_words_fp8`'s steps."""
    word = (words.long() & 0xFFFFFFFF).view(*words.shape[:2], 8, 4, 4)
    scales = scale_bytes.view(*scale_bytes.shape[:2], 8, 1, 4, 2).expand(-1, -1, -1, 4, -1, -1)
    multiplier = bf16_pairs(scales.long() * 16 + 0x6F80)[..., 0]
    rotated = ((word >> 4) | (word << 28)) & 0xFFFFFFFF
    rows = []
    for half, pairs in enumerate((
        ((word << 6) & 0x81C081C0, (word << 2) & 0x81C081C0),
        (rotated & 0x81C081C0, (word & 0x81808180) | ((word >> 8) & 0x00400040)),
    )):  # fmt: skip
        (first, second), (third, fourth) = (e4m3_sixths(pair, multiplier[..., half]) for pair in pairs)
        rows.append(torch.stack([part.view(torch.uint8) for part in (first, third, second, fourth)], -1))
    # piece, tile, row, quarter, step, row half, column
    values = torch.stack(rows, -2).permute(1, 5, 2, 0, 4, 3, 6)
    return values.reshape(words.shape[1] * 16, words.shape[0] * 64).view(torch.float8_e4m3fn)


def in_kernels_order(values: torch.Tensor) -> torch.Tensor:
    """Columns of every sixteen in the order 0, 8, 1, 9, ... 7, 15."""
    return values.unflatten(-1, (-1, 2, 8)).transpose(-1, -2).reshape(values.shape)


@pytest.mark.parametrize(("n", "k"), [(128, 128), (16, 64), (1, 16), (130, 272), (3000, 16)])
def test_the_kernels_steps_find_every_value(n: int, k: int) -> None:
    weight = nasty_weight(n, k)
    words, scale_bytes = nvfp4_wgmma.pack(weight.codes, weight.scales)
    (word_dtype, word_shape), (byte_dtype, byte_shape) = nvfp4_wgmma.parts(n, k)
    assert (words.dtype, words.shape, scale_bytes.dtype, scale_bytes.shape) == (
        word_dtype, word_shape, byte_dtype, byte_shape
    )  # fmt: skip
    values = decode(words, scale_bytes)
    assert values.shape == (-(-n // 128) * 128, -(-k // 128) * 128), "kernels read whole tiles"
    expected = torch.zeros(values.shape)
    expected[:n, :k] = nvfp4.block_values(weight.codes, weight.scales)
    assert_same(values + 0.0, expected + 0.0)  # a zero scale loses the sign of its zeros


def test_all_codes_times_all_scales() -> None:
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8).repeat(127, 1))
    scales = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    values = decode(*nvfp4_wgmma.pack(codes, scales))[:127, :16]
    assert_same(values + 0.0, nvfp4.block_values(codes, scales) + 0.0)


def assert_fp8_of(weight: nvfp4.NvFp4Weight) -> None:
    """The kernel's steps give `to_fp8` of the weight, but for ties among denormals, which may fall either way."""
    found = decode_fp8(*nvfp4_wgmma.pack(weight.codes, weight.scales)).float()
    expected, exact = torch.zeros(found.shape), torch.zeros(found.shape)
    expected[: weight.n, : weight.k] = nvfp4.to_fp8(weight, fp8.OCP)[0].float()
    exact[: weight.n, : weight.k] = nvfp4.block_values(weight.codes, weight.scales) / 6
    expected, exact = in_kernels_order(expected), in_kernels_order(exact)
    steps = exact.abs() * 2**9  # of denormals
    tie = (steps < 8) & (steps % 1 == 0.5)
    assert_same(found[~tie] + 0.0, expected[~tie] + 0.0)
    assert ((found[tie].abs() - exact[tie].abs()).abs() == 0.5 * 2**-9).all()


@pytest.mark.parametrize(("n", "k"), [(128, 128), (1, 16), (130, 272)])
def test_the_fp8_steps_find_every_value(n: int, k: int) -> None:
    assert_fp8_of(nasty_weight(n, k))


def test_the_fp8_steps_round_all_pairs_of_codes_under_all_scales() -> None:
    pairs = torch.arange(256, dtype=torch.uint8).repeat(127, 1)  # a byte is two codes, in one register of the kernel
    scales = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous().view(torch.float8_e4m3fn)
    assert_fp8_of(nvfp4.NvFp4Weight(pairs, scales, torch.ones(127)))


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 40, 32)], ids=str)
def test_empty_weights(shape: tuple[int, ...]) -> None:
    *leading, n, k = shape
    codes = torch.empty(*leading, n, k // 2, dtype=torch.uint8)
    scales = torch.empty(*leading, n, k // 16, dtype=torch.float8_e4m3fn)
    for tensor, (_, expected) in zip(nvfp4_wgmma.pack(codes, scales), nvfp4_wgmma.parts(n, k), strict=True):
        assert tensor.shape == (*leading, *expected) and not tensor.any()


def test_experts_are_packed_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nasty_weight(70, 80, 2, 3)
    words, scale_bytes = nvfp4_wgmma.pack(weight.codes, weight.scales)
    for expert in ((0, 0), (1, 2)):
        alone = nvfp4_wgmma.pack(weight.codes[expert], weight.scales[expert])
        assert_same(words[expert], alone[0])
        assert_same(scale_bytes[expert], alone[1])
    monkeypatch.setattr(nvfp4_packing, "_ELEMENTS", 80 * 17)  # some rows at a time
    assert_same(nvfp4_wgmma.pack(weight.codes, weight.scales)[0], words)


def test_temporaries_stay_small() -> None:
    """Of a weight of four slices, none is larger than a slice's codes."""
    codes = torch.zeros(8192, 8192, dtype=torch.uint8)
    scales = torch.zeros(8192, 1024, dtype=torch.float8_e4m3fn)
    with temporaries(codes, scales) as sizes:
        nvfp4_wgmma.pack(codes, scales, nvfp4_wgmma.LAYOUT)
    assert 2 * codes.numel() == 4 * nvfp4_packing._ELEMENTS
    assert max(sizes) == nvfp4_packing._ELEMENTS // 2 <= 16 * 2**20


def test_gate_and_up_take_turns() -> None:
    order = nvfp4_wgmma.gate_up_order(64, torch.device("cpu"))
    assert order.tolist() == [*range(8), *range(32, 40), *range(8, 16), *range(40, 48), *range(16, 24), *range(48, 56),
                              *range(24, 32), *range(56, 64)]  # fmt: skip
