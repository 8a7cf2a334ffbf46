# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 product of CDNA: every code times every scale, exact on integers, ragged, split, experts, nasty rows."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats import nvfp4, nvfp4_mfma
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import nvfp4_moe
from llm_quant_rocm.kernels.nvfp4_mfma import Config, default_config, gemm
from llm_quant_rocm.kernels.routing import Schedule
from llm_quant_rocm.kernels.sizes import next_power_of_2
from llm_quant_rocm.ops.nvfp4_weight import rows_of_weight
from tests.amd import isa
from tests.amd.budget import Budget
from tests.amd.operators import shared_out
from tests.inputs import DTYPES, assert_same, broken_rows
from tests.moe_inputs import relative_error
from tests.nvfp4_inputs import experts as nvfp4_experts
from tests.nvfp4_inputs import moe64, nasty_weight, weight64
from tests.ops.test_nvfp4_gemm import exact_operands

MATRIX = {
    "gfx90a": r"v_mfma_f32_16x16x16_?(bf16_1k|f16)",
    "gfx942": r"v_mfma_f32_16x16x16_(bf16|f16)",
    "gfx950": r"v_mfma_f32_16x16x32_(bf16|f16)",
}
# Vector instructions for 8 weights of a lane, everything in the loop over K counted, moves of accumulators included: at
# the most on each architecture, and by architecture and x what both Tritons need with 16 rows and whole steps.
ALLOWED = {"gfx942": 21.0, "gfx950": 18.0, "gfx90a": 28.0}
VECTOR = {
    ("gfx942", "bf16"): 16.5,
    ("gfx942", "fp16"): 12.5,
    ("gfx950", "bf16"): 12.25,
    ("gfx950", "fp16"): 9.75,
    ("gfx90a", "bf16"): 20.0,
    ("gfx90a", "fp16"): 17.0,
}
STEPS = 2  # of 128 columns, written out in the loop


def loop_over_k(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    """What the loop does too much or too early."""
    hot = assembly.hot_loop
    if not hot:
        return ["it has no loop"]
    loop, lanes = hot.instructions, 64 * constants["num_warps"]
    block_m, block_n = constants["BLOCK_M"], constants["BLOCK_N"]
    count = isa.count(loop)
    found = []
    dtype = "bf16" if any("bf16" in name for name in count) else "fp16"
    tight = block_m == 16 and constants["EVEN_K"]
    vector = 8 * (count["vector"] + count["move"]) / (STEPS * block_n * 128 / lanes)
    if vector > (VECTOR[arch, dtype] if tight else ALLOWED[arch]):
        found.append(f"it takes {vector:.2f} vector instructions for 8 weights")
    # All that is written to the LDS is x, and nothing passes between lanes in another way.
    written = sum({"ds_write_b64": 8, "ds_write_b128": 16}.get(i.opcode, 64) for i in loop if "ds_write" in i.opcode)
    if written != STEPS * block_m * 128 * 2 / lanes:
        found.append(f"{written} bytes a lane go to the LDS")
    crossing = [i.text for i in loop if re.search(r"permute|swizzle|swap|dpp|row_|quad_perm|lane", i.text)]
    found += [f"values pass between lanes: {text}" for text in crossing]
    # While the loop waits for codes, those of the step after are on their way: three loads at least.
    waits = [int(number) for i in loop for number in re.findall(r"vmcnt\((\d+)\)", i.text)]
    if not waits or min(waits) < 3:
        found.append(f"it waits until fewer than three loads are on their way: {waits}")
    return found


BUDGETS = {
    "nvfp4_mfma_kernel": Budget(matrix=MATRIX, more=loop_over_k),
    "nvfp4_mfma_add_kernel": Budget(),
}
HALF = (torch.bfloat16, torch.float16)
# Projections of Llama 3 70B: whole, and sharded over 8 GPUs.
SHAPES = [(m, 8192, 8192) for m in (1, 16, 32, 64, 256)] + [(16, 1280, 8192), (16, 57344, 8192), (64, 8192, 3584)]


def packed(weight: NvFp4Weight, arch: str, gate_up: bool = False) -> tuple[torch.Tensor, ...]:
    codes, scales, global_scale = weight.codes, weight.scales, weight.global_scale
    if gate_up:
        order = nvfp4_mfma.gate_up_order(weight.n, codes.device)
        codes, global_scale = codes[..., order, :], global_scale[..., order]
        scales = scales.view(torch.uint8)[..., order, :].view(scales.dtype)
    return *nvfp4_mfma.pack(codes, scales, nvfp4_mfma.layout(arch, gate_up)), global_scale.contiguous()


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def run(m: int, n: int, k: int, dtype: torch.dtype, config: Config) -> None:
        (word_dtype, words), (byte_dtype, scales) = nvfp4_mfma.parts(n, k)
        weight = torch.empty(words, dtype=word_dtype), torch.empty(scales, dtype=byte_dtype), torch.empty(n)
        gemm(torch.empty(m, k, dtype=dtype), *weight, None, n, hardware, config)

    def experts(n: int, k: int, block_m: int, activation: str | None) -> None:
        """128 experts of Qwen3-30B-A3B, each with a tile of its own."""
        (word_dtype, words), (byte_dtype, scales) = nvfp4_mfma.parts(n, k)
        weight = torch.empty(128, *words, dtype=word_dtype), torch.empty(128, *scales, dtype=byte_dtype)
        slots, topk = 128 * block_m, 8 if activation else 1
        numbers = partial(torch.empty, dtype=torch.int32)
        routing = Schedule(
            numbers(slots), numbers(128), numbers(128), numbers(1), None if activation else torch.empty(slots),
            numbers(slots),
        )  # fmt: skip
        gemm(
            torch.empty(slots // topk, k).bfloat16(), *weight, torch.empty(128, n), None, n, hardware, Config(block_m),
            routing, row_weight=routing.row_weight, activation=activation,
        )  # fmt: skip

    return {
        f"{m} x {n} x {k} {dtype}": partial(run, m, n, k, dtype, default_config(m, n, k, hardware.units))
        for m, n, k in SHAPES
        for dtype in HALF
    } | {
        **{f"experts up, {m} rows": partial(experts, 1536, 2048, m, "silu") for m in (16, 64)},
        **{f"experts down, {m} rows": partial(experts, 2048, 768, m, None) for m in (16, 64)},
        "K that ends early": partial(run, 16, 8192, 8192 + 128, torch.bfloat16, Config(16)),
        **{f"128 rows {dtype}": partial(run, 128, 8192, 8192, dtype, Config(128)) for dtype in HALF},
    }


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    arch = hardware.arch

    def product(x: torch.Tensor, weight: NvFp4Weight, bias: Any = None, config: Config | None = None) -> torch.Tensor:
        # Tiles as high as a larger weight's would be: of these few `default_config` has all of 16 rows.
        config = config or Config(min(64, max(16, next_power_of_2(x.shape[0]))))
        return gemm(x, *packed(weight, arch), bias, weight.n, hardware, config)

    def every_code(dtype: torch.dtype) -> None:
        """x picks single weights, so the products themselves are seen."""
        codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8).repeat(127, 8))
        scales = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 8).view(torch.float8_e4m3fn)
        found = product(torch.eye(128).to(dtype), NvFp4Weight(codes, scales, torch.ones(127)))
        assert_same(found.t().float() + 0.0, nvfp4.block_values(codes, scales) + 0.0)

    def exact(m: int, n: int, k: int, dtype: torch.dtype, config: Config | None = None, bias: Any = None) -> None:
        x, weight, added = exact_operands(m, n, k, dtype)
        expected = x.double() @ weight64(weight).t()
        if bias is not None:
            expected += added.double()
        found = product(x, weight, None if bias is None else added.to(bias), config)
        assert_same(found, expected.float().to(dtype))

    def nasty(dtype: torch.dtype) -> None:
        """Scales from subnormal to the largest, rows of zeros, global scales that differ by a million."""
        weight = nasty_weight(70, 400)
        if dtype == torch.float16:
            weight = replace(weight, global_scale=weight.global_scale * 1e-6)  # sums stay in its range
        x = torch.randn(9, 400, generator=torch.Generator().manual_seed(1)).to(dtype)
        terms = x.double().abs() @ weight64(weight).abs().t()
        expected = x.double() @ weight64(weight).t()
        found = product(x, weight, config=Config(16, split_k=2)).double()
        rounding = expected.abs() * torch.finfo(dtype).eps / 2 + terms * 400 * 2.0**-24
        assert ((found - expected).abs() <= rounding + torch.finfo(dtype).tiny).all()

    def tiny(dtype: torch.dtype) -> None:
        """x just above the subnormals of its type: no intermediate value underflows."""
        x, weight, _ = exact_operands(16, 64, 256, dtype)
        small = 2.0**-100 if dtype == torch.bfloat16 else 2.0**-14
        weight = NvFp4Weight(weight.codes, weight.scales, torch.ones(64))
        found = product(x * small, weight)
        assert_same(found, (x.double() * small @ weight64(weight).t()).float().to(dtype))

    def broken(dtype: torch.dtype) -> None:
        """A row with NaN or inf does not touch the rows beside it."""
        x, weight, _ = exact_operands(12, 48, 256, dtype)
        x[:6] = broken_rows(256, dtype)
        expected = x.double() @ weight64(weight).t()
        found = product(x, weight)
        assert_same(found[6:], expected[6:].float().to(dtype))
        assert not found[:6].isfinite().any(dim=1).all() and found[[0, 1, 2, 5]].isnan().any(dim=1).all()

    def views(dtype: torch.dtype) -> None:
        """Rows that lie apart, with NaN where x ends."""
        x, weight, _ = exact_operands(20, 40, 144, dtype)
        for spare, start in ((32, 0), (7, 3)):
            wide = torch.full((20, 144 + spare), float("nan"), dtype=dtype)
            wide[:, start : start + 144] = x
            found = product(wide[:, start : start + 144], weight)
            assert_same(found, (x.double() @ weight64(weight).t()).float().to(dtype))

    def other_rows(dtype: torch.dtype) -> None:
        """With one split_k a row has the same bits in every tile size, whatever stands beside it."""
        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(130, 656, generator=generator).to(dtype), nasty_weight(40, 656)
        first = product(x[:3], weight, config=Config(16, split_k=2))
        for config in (Config(32, split_k=2), Config(64, split_k=2), Config(128, 64, 2, 2)):
            assert_same(product(x, weight, config=config)[:3], first)

    def experts(dtype: torch.dtype, split_k: int) -> None:
        """Tiles of three experts and of none, full ones and others; two slots a row of x, with weights."""
        x, weight, _ = exact_operands(50, 3 * 96, 272, dtype)
        tensors = (part.unflatten(0, (3, 96)) for part in (weight.codes, weight.scales, weight.global_scale))
        weight = NvFp4Weight(*tensors)
        tile_expert = torch.tensor([2, 0, -1, 0, 1], dtype=torch.int32)
        tile_rows = torch.tensor([16, 5, 0, 16, 1], dtype=torch.int32)
        row_map = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:80].int()
        row_weight = torch.randint(-2, 3, (80,)).float()
        expected = torch.full((100, 96), 77.0).to(dtype)
        for row, slot in enumerate(row_map):
            if row % 16 < tile_rows[row // 16]:
                values = weight64(weight)[tile_expert[row // 16]] @ x[slot // 2].double() * row_weight[row]
                expected[slot] = values.float().to(dtype)
            else:
                row_map[row] = -1
        routing = Schedule(row_map, tile_expert, tile_rows, torch.tensor([4]), row_weight, torch.empty(100))

        def filled(*size: Any, **options: Any) -> torch.Tensor:
            return torch.full(size[0] if isinstance(size[0], tuple) else size, 77, **options)

        # What the kernel does not store shows.
        with patch.object(torch, "empty", filled):
            found = gemm(
                x, *packed(weight, arch), None, 96, hardware, Config(16, split_k=split_k), routing,
                row_weight=row_weight,
            )  # fmt: skip
        assert_same(found, expected)

    def activated(activation: str, split_k: int) -> None:
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(2 * 80, 256, generator=generator) / 16
        gate, up = (nvfp4.quantize(part) for part in w.chunk(2))
        weight = NvFp4Weight(*(torch.cat([getattr(gate, part), getattr(up, part)]) for part in vars(gate)))
        x = torch.randn(21, 256, generator=generator).bfloat16()
        functions = {
            "silu": torch.nn.functional.silu,
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        }
        gate, up = (x.double() @ weight64(weight).t()).bfloat16().double().chunk(2, dim=1)
        expected = functions[activation](gate) * up
        found = gemm(
            x, *packed(weight, arch, True), None, 160, hardware, Config(32, split_k=split_k), activation=activation
        )
        assert found.shape == (21, 80)
        # gate and up are rounded where float64 may round the other way: two steps of bf16 at the most.
        torch.testing.assert_close(found.double(), expected, rtol=2.0**-6, atol=2.0**-8)
        # Nearly all are the same bits; of gates that were not rounded a quarter would not be.
        assert (found == expected.bfloat16()).float().mean() > 0.95

    def operator(dtype: torch.dtype) -> None:
        """As an engine calls it: the weight arranged at load, the backend and the configuration chosen."""
        x, weight, bias = exact_operands(33, 70, 272, dtype)
        prepared = ops.prepare_nvfp4_weight(weight)
        assert prepared.layout == nvfp4_mfma.layout(arch)
        for batch_invariant in (False, True):
            found = ops.nvfp4_gemm(x, prepared, bias, batch_invariant=batch_invariant)
            assert_same(found, (x.double() @ weight64(weight).t() + bias.double()).float().to(dtype))

    def routed(dtype: torch.dtype, most_bytes: int = nvfp4_moe.MOST_BYTES, tokens: int = 21, hidden: int = 96) -> None:
        """Experts as an engine calls them; one of them is on another rank, one has no token."""
        arguments = nvfp4_experts(tokens, 5, 2, hidden, 48, dtype)
        expected = moe64(arguments)
        for name in ("w13", "w2"):
            rows = rows_of_weight(arguments[name])
            arguments[name] = ops.prepare_nvfp4_weight(rows, gate_up=name == "w13")
        with patch.object(nvfp4_moe, "MOST_BYTES", most_bytes):
            found = ops.nvfp4_moe(**arguments)
        assert relative_error(found, expected) < (6e-3 if dtype == torch.bfloat16 else 8e-4)

    cases: dict[str, Callable[[], object]] = {}
    for dtype in HALF:
        cases |= {
            f"every code and scale, {dtype}": partial(every_code, dtype),
            **{
                f"{m} x {n} x {k}, {dtype}": partial(exact, m, n, k, dtype)
                for m, n, k in ((1, 1, 16), (3, 5, 48), (20, 67, 528), (33, 130, 272), (130, 32, 640))
            },
            f"nasty weight, {dtype}": partial(nasty, dtype),
            f"tiny, {dtype}": partial(tiny, dtype),
            f"NaN and inf, {dtype}": partial(broken, dtype),
            f"views, {dtype}": partial(views, dtype),
            f"other rows, {dtype}": partial(other_rows, dtype),
            f"experts, {dtype}": partial(experts, dtype, 1),
            f"operator, {dtype}": partial(operator, dtype),
            f"operator of experts, {dtype}": partial(routed, dtype),
        }
    base = Config(16)
    cases |= {
        **{
            f"{config}": partial(exact, 20, 150, 1200, torch.bfloat16, config)
            for config in (
                replace(base, split_k=3), replace(base, split_k=16), replace(base, block_n=32, warps=1, split_k=2),
                replace(base, block_n=128, warps=2), replace(base, block_n=64, warps=2),
                Config(64, 128, 5, 2), Config(128, 128, 2, 4),
            )
        },
        **{f"{bias} bias": partial(exact, 20, 48, 256, torch.float16, base, bias) for bias in DTYPES},
        "a bias after parts": partial(exact, 20, 150, 528, torch.bfloat16, replace(base, split_k=2), torch.float16),
        "experts in parts": partial(experts, torch.bfloat16, 2),
        "operator of experts, nine tokens at a time": partial(routed, torch.bfloat16, 9 * 2 * 96 * 2 + 1),
        "operator of experts, whose sums are cut": partial(routed, torch.float16, tokens=4, hidden=1056),
        **{activation: partial(activated, activation, 1) for activation in ("silu", "gelu", "gelu_tanh")},
        "silu after parts": partial(activated, "silu", 2),
    }  # fmt: skip
    return shared_out(cases, hardware)
