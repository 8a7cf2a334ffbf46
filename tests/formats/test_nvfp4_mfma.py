# SPDX-License-Identifier: Apache-2.0
"""The packed layouts of the CDNA kernel, read back on the CPU in the order of its lanes and bits."""

import pytest
import torch

from llm_quant_rocm.formats import nvfp4, nvfp4_mfma, nvfp4_packing
from tests.inputs import assert_same, temporaries
from tests.nvfp4_inputs import nasty_weight

LAYOUTS = pytest.mark.parametrize("layout", [nvfp4_mfma.LAYOUT, nvfp4_mfma.LAYOUT_FP4])


def reversed_bits(words: torch.Tensor) -> torch.Tensor:
    return sum(((words >> bit) & 1) << (31 - bit) for bit in range(32))


def bytes_as_bf8(words: torch.Tensor) -> torch.Tensor:
    """The four masked bytes [..., 4] of words (int64), as E5M2 times what makes a code of them."""
    masked = torch.stack([(words >> (8 * byte)) & 0x8E for byte in range(4)], dim=-1)
    return masked.to(torch.uint8).view(torch.float8_e5m2).float() * 2.0**14


def decode(words: torch.Tensor, scale_bytes: torch.Tensor, layout: str) -> torch.Tensor:
    """Values [N, K] in fp32 of packed words [K/128, N/32, 512] and scale bytes, by the steps of `decode_cdna`."""
    word = words.long() & 0xFFFFFFFF
    if layout == nvfp4_mfma.LAYOUT_FP4:
        codes = nvfp4.e2m1_decode(torch.stack([(word >> (4 * i)) & 15 for i in range(8)], dim=-1).to(torch.uint8))
    else:
        front, back = bytes_as_bf8(word), bytes_as_bf8(reversed_bits(word))
        codes = torch.cat([front[..., [0, 2, 1, 3]], back[..., [0, 2, 1, 3]]], dim=-1)
    columns, rows = words.shape[0] * 128, words.shape[1] * 32
    # chunk, piece, row tile, group, row, step, column
    codes = codes.view(*words.shape[:2], 2, 4, 16, 4, 8).permute(1, 2, 4, 0, 3, 5, 6)
    # chunk, piece, group, row, row tile, block
    scales = scale_bytes.view(torch.float8_e4m3fn).float().view(*words.shape[:2], 4, 16, 2, 2)
    scales = scales.permute(1, 4, 3, 0, 2, 5).reshape(rows, columns // 16)
    return codes.reshape(rows, columns) * scales.repeat_interleave(16, -1)


@LAYOUTS
@pytest.mark.parametrize(("n", "k"), [(128, 128), (32, 64), (1, 16), (130, 272), (300, 16)])
def test_the_lanes_find_every_value(n: int, k: int, layout: str) -> None:
    weight = nasty_weight(n, k)
    words, scale_bytes = nvfp4_mfma.pack(weight.codes, weight.scales, layout)
    (word_dtype, word_shape), (byte_dtype, byte_shape) = nvfp4_mfma.parts(n, k)
    assert (words.dtype, words.shape, scale_bytes.dtype, scale_bytes.shape) == (
        word_dtype, word_shape, byte_dtype, byte_shape
    )  # fmt: skip
    values = decode(words, scale_bytes, layout)
    assert values.shape == (-(-n // 128) * 128, -(-k // 256) * 256), "kernels read whole tiles, and pairs of steps"
    expected = torch.zeros(values.shape)
    expected[:n, :k] = nvfp4.block_values(weight.codes, weight.scales)
    assert_same(values + 0.0, expected + 0.0)  # -0 codes became +0


@LAYOUTS
def test_no_byte_is_a_nan_of_gfx942(layout: str) -> None:
    """A sign with nothing behind it is NaN in FNUZ formats: neither -0 codes nor -0 scales may be left."""
    codes = torch.full((32, 64), 0x88, dtype=torch.uint8)
    scales = torch.full((32, 8), 0x80, dtype=torch.uint8).view(torch.float8_e4m3fn)
    words, scale_bytes = nvfp4_mfma.pack(codes, scales, layout)
    assert not words.any() and not scale_bytes.any()


@LAYOUTS
@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 40, 32)], ids=str)
def test_empty_weights(shape: tuple[int, ...], layout: str) -> None:
    *leading, n, k = shape
    codes = torch.empty(*leading, n, k // 2, dtype=torch.uint8)
    scales = torch.empty(*leading, n, k // 16, dtype=torch.float8_e4m3fn)
    for tensor, (_, expected) in zip(nvfp4_mfma.pack(codes, scales, layout), nvfp4_mfma.parts(n, k), strict=True):
        assert tensor.shape == (*leading, *expected) and not tensor.any()


@LAYOUTS
def test_experts_are_packed_as_if_alone(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nasty_weight(70, 80, 2, 3)
    words, scale_bytes = nvfp4_mfma.pack(weight.codes, weight.scales, layout)
    for expert in ((0, 0), (1, 2)):
        alone = nvfp4_mfma.pack(weight.codes[expert], weight.scales[expert], layout)
        assert_same(words[expert], alone[0])
        assert_same(scale_bytes[expert], alone[1])
    monkeypatch.setattr(nvfp4_packing, "_ELEMENTS", 80 * 33)  # some rows at a time
    for part, whole in zip(nvfp4_mfma.pack(weight.codes, weight.scales, layout), (words, scale_bytes), strict=True):
        assert_same(part, whole)


def test_the_layout_of_an_architecture() -> None:
    assert [nvfp4_mfma.layout(arch) for arch in ("gfx90a", "gfx942", "gfx950")] == ["mfma", "mfma", "mfma_fp4"]
    assert nvfp4_mfma.layout("gfx950", gate_up=True) == "mfma_fp4_gate_up"
    assert {nvfp4_mfma.layout(arch, both) for arch in ("gfx942", "gfx950") for both in (False, True)} == set(
        nvfp4_mfma.LAYOUTS
    )


def test_temporaries_stay_small() -> None:
    """Of a weight of four slices, none is larger than a slice's codes."""
    codes = torch.zeros(8192, 8192, dtype=torch.uint8)
    scales = torch.zeros(8192, 1024, dtype=torch.float8_e4m3fn)
    with temporaries(codes, scales) as sizes:
        nvfp4_mfma.pack(codes, scales, nvfp4_mfma.LAYOUT)
    assert 2 * codes.numel() == 4 * nvfp4_packing._ELEMENTS
    assert max(sizes) == nvfp4_packing._ELEMENTS // 2 <= 16 * 2**20


def test_gate_and_up_take_turns() -> None:
    order = nvfp4_mfma.gate_up_order(96, torch.device("cpu"))
    assert order.tolist() == [*range(16), *range(48, 64), *range(16, 32), *range(64, 80), *range(32, 48),
                              *range(80, 96)]  # fmt: skip
