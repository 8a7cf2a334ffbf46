# SPDX-License-Identifier: Apache-2.0
"""The packed layout of Hopper's kernel, read back on the CPU by the instructions that the kernel decodes with."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llm_quant_rocm.formats import fp8, nvfp4, nvfp4_packing, nvfp4_wgmma
from tests.inputs import assert_same, temporaries
from tests.nvfp4_inputs import nasty_weight

# Where the bytes of a word begin.
BYTES = torch.tensor([0, 8, 16, 24])


def halves(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The two 16-bit values [..., 2], in fp32, in the bits of each 32-bit word, the lower half first."""
    return (words.unsqueeze(-1) >> BYTES[::2] & 0xFFFF).to(torch.int16).view(dtype).float()


def both(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """32-bit words in int64 of two values [..., 2] each, rounded to this 16-bit dtype."""
    return ((values.to(dtype).view(torch.int16).long() & 0xFFFF) << BYTES[::2]).sum(-1)


def fp8_table() -> torch.Tensor:
    """The bytes [scale byte, 8] that `fill_fp8_table` fills its table with, in fp32 as it does."""
    scales = (torch.arange(256)[:, None] << 7).to(torch.int16).view(torch.float16).float()
    sixth = torch.tensor(0x3E2AAAAB, dtype=torch.int32).view(torch.float32)
    half, three_halves = scales * 2.0**-8 * sixth, scales * 3 * 2.0**-8 * sixth
    magnitudes = (0 * half, half, 2 * half, three_halves, 4 * half, 2 * three_halves, 8 * half, 4 * three_halves)
    return torch.cat(magnitudes, 1).to(torch.float8_e4m3fn).view(torch.uint8).long()


def executed(assembly: str, registers: dict[str, torch.Tensor], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """The registers, 32-bit words in int64, after PTX of the few instructions that decoding takes; `memory` is the
    shared one, in words."""

    def value(operand: str) -> Any:
        return registers[operand] if operand in registers else int(operand, 0)

    def prmt(low: torch.Tensor, high: Any, selector: Any) -> torch.Tensor:
        words = (low, torch.as_tensor(high).expand_as(low))
        numbers = torch.as_tensor(selector).expand_as(low).unsqueeze(-1) >> torch.tensor([0, 4, 8, 12]) & 15
        assert (numbers < 8).all(), "another mode of the instruction"
        either = torch.stack([word >> shift & 255 for word in words for shift in BYTES.tolist()], -1)
        return (either.gather(-1, numbers) << BYTES).sum(-1)

    def lop3(a: Any, b: Any, c: Any, table: int) -> Any:
        terms = ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1)
        return sum(terms)  # of bits that no two terms have

    def product_in(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return lambda a, b: both(halves(a, dtype) * halves(b, dtype), dtype)

    steps: dict[str, Callable[..., Any]] = {
        "prmt.b32": prmt, "lop3.b32": lop3, "and.b32": lambda a, b: a & b, "shr.u32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: a << b, "shf.r.wrap.b32": lambda low, high, by: (high << 32 | low) >> by,
        "mad.lo.u32": lambda a, b, c: a * b + c,
        "mul.bf16x2": product_in(torch.bfloat16), "mul.f16x2": product_in(torch.float16),
    }  # fmt: skip
    for statement in assembly.strip(" {}\n").split(";"):
        name, _, operands = statement.strip().partition(" ")
        if name == "ld.shared.v2.b32":
            first, second, address = re.findall(r"[\w$]+", operands)
            place = registers[address] // 4
            registers[first], registers[second] = memory[place], memory[place + 1]
        elif name == "mov.b32":
            first, second, third = re.findall(r"[\w$]+", operands)
            if operands.startswith("{"):
                registers[first], registers[second] = registers[third] & 0xFFFF, registers[third] >> 16
            else:
                registers[first] = registers[second] | registers[third] << 16
        elif name and name != ".reg":
            target, *sources = re.findall(r"[\w$]+", operands)
            registers[target] = steps[name](*map(value, sources)) & 0xFFFFFFFF
    return registers


def assembly(name: str) -> str:
    return getattr(pytest.importorskip("llm_quant_rocm.kernels.decode_hopper"), name).value


def two_words(words: torch.Tensor, scale_bytes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two words of a lane at a time, those of its steps 0 and 1, or 2 and 3, and their scale bytes, two each: [K/64,
    N/16, 8, 4, 2] in int64."""
    first, second = (words.long() & 0xFFFFFFFF).view(*words.shape[:2], 8, 4, 2, 2).unbind(-1)
    scales = scale_bytes.view(*scale_bytes.shape[:2], 8, 1, 2, 4).expand(-1, -1, -1, 4, -1, -1).long()
    return first, second, (scales << BYTES).sum(-1)


def decode(words: torch.Tensor, scale_bytes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [N, K] in fp32 of packed words [K/64, N/16, 128] and scale bytes, by the text of `decode_words`."""
    # Word lane * 4 + step belongs to rows lane / 4 and lane / 4 + 8; a scale byte stands at [row % 8][step][row / 8].
    first, second, scales = two_words(words, scale_bytes)
    text = assembly("_WORDS_TO_FP16" if dtype == torch.float16 else "_WORDS_TO_BF16")
    found = executed(text, {"$8": first, "$9": second, "$10": scales}, torch.empty(0))
    pairs = (torch.stack([found[f"${2 * pair}"], found[f"${2 * pair + 1}"]], -1).flatten(4) for pair in range(4))
    values = [halves(pair, dtype) * 2.0**7 for pair in pairs]
    # [piece, tile, row, lane % 4, step, column] of each (row half, column half)
    stacked = torch.stack([torch.stack(values[:2], -2), torch.stack(values[2:], -2)], -3)
    # piece, tile, row, quarter, step, row half, column half, column
    return stacked.permute(1, 5, 2, 0, 4, 6, 3, 7).reshape(words.shape[1] * 16, words.shape[0] * 64)


def decode_fp8(words: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """E4M3 [N, K], columns in the order of `in_kernels_order`, by the text of `decode_words_fp8`."""
    # A lane takes the words of a row's blocks from the places of four: piece, tile, row, block
    taken = (words.long() & 0xFFFFFFFF).view(*words.shape[:2], 8, 4, 4).unbind(-2)
    scales = scale_bytes.view(*scale_bytes.shape[:2], 8, 4, 2).long()
    # An entry of the table is six words, of which two are used.
    memory = torch.nn.functional.pad((fp8_table().view(-1, 2, 4) << BYTES).sum(-1), (0, 4)).flatten()
    start = {f"${8 + i}": word for i, word in enumerate(taken)}
    start |= {"$12": (scales << BYTES[:2]).sum(-1), "$16": torch.zeros_like(taken[0])}
    found = executed(assembly("_WORDS_TO_FP8"), start, memory)
    rows = torch.stack([torch.stack([found[f"${4 * row + i}"] for i in range(4)], -1) for row in (0, 1)], -1)
    # piece, tile, row, block, word, row half, column
    values = (rows.unsqueeze(-1) >> BYTES & 255).permute(1, 5, 2, 0, 4, 3, 6).to(torch.uint8)
    return values.reshape(words.shape[1] * 16, words.shape[0] * 64).view(torch.float8_e4m3fn)


def in_kernels_order(values: torch.Tensor) -> torch.Tensor:
    """Of every 64 columns first 0, 8, 1 and 9 of each sixteen, then 2, 10, 3 and 11, and so on to 6, 14, 7 and 15."""
    # block, column half, pair, column of it
    return values.unflatten(-1, (-1, 4, 2, 4, 2)).permute(0, 1, 4, 2, 5, 3).reshape(values.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(128, 128), (16, 64), (1, 16), (130, 272), (3000, 16)])
def test_the_kernels_steps_find_every_value(n: int, k: int, dtype: torch.dtype) -> None:
    weight = nasty_weight(n, k)
    words, scale_bytes = nvfp4_wgmma.pack(weight.codes, weight.scales)
    (word_dtype, word_shape), (byte_dtype, byte_shape) = nvfp4_wgmma.parts(n, k)
    assert (words.dtype, words.shape, scale_bytes.dtype, scale_bytes.shape) == (
        word_dtype, word_shape, byte_dtype, byte_shape
    )  # fmt: skip
    values = decode(words, scale_bytes, dtype)
    assert values.shape == (-(-n // 128) * 128, -(-k // 128) * 128), "kernels read whole tiles"
    expected = torch.zeros(values.shape)
    expected[:n, :k] = nvfp4.block_values(weight.codes, weight.scales)
    assert_same(values + 0.0, expected + 0.0)  # a zero scale loses the sign of its zeros


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_codes_times_all_scales(dtype: torch.dtype) -> None:
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8).repeat(128, 2))
    scales = torch.arange(128, dtype=torch.uint8)[:, None].repeat(1, 2).view(torch.float8_e4m3fn)  # the last is NaN
    values = decode(*nvfp4_wgmma.pack(codes, scales), dtype)[:128, :32]
    assert_same(values + 0.0, nvfp4.block_values(codes, scales) + 0.0)


def assert_fp8_of(weight: nvfp4.NvFp4Weight) -> None:
    """The kernel's steps give `to_fp8` of the weight."""
    found = decode_fp8(*nvfp4_wgmma.pack(weight.codes, weight.scales)).float()
    expected = torch.zeros(found.shape)
    expected[: weight.n, : weight.k] = nvfp4.to_fp8(weight, fp8.OCP)[0].float()
    assert_same(found + 0.0, in_kernels_order(expected) + 0.0)  # a zero scale loses the sign of its zeros


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
