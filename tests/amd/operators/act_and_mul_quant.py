# SPDX-License-Identifier: Apache-2.0
"""A gated layer's activation with quantization: the reference's numbers, and its bits where exp rounds none."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from llm_quant_rocm import ops, reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import act_and_mul_quant
from llm_quant_rocm.kernels.sizes import cdiv
from tests.amd import isa
from tests.amd.budget import FP8_CAST, Budget
from tests.amd.operators import four_waves, shared_out
from tests.inputs import DTYPE_IDS, DTYPES, assert_close_codes, assert_same, nasty_rows, random_rows
from tests.routing_inputs import check_activations

# Vector instructions for each value of a lane: silu, product, rounding, maximum, quotient, code, and what a row takes
# beside them, as both Tritons need at most. gfx90a's code is made in software.
VECTOR = {"gfx90a": 49, "gfx942": 21, "gfx950": 16}


def silu(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    """What a row's loop does too much."""
    hot = assembly.hot_loop
    if constants["ACTIVATION"] != "silu" or not hot:
        return []
    values = cdiv(constants["COLUMNS"], constants["BLOCK"]) * constants["BLOCK"] / (64 * constants["num_warps"])
    vector = isa.count(hot.instructions)["vector"] / values
    return [f"it takes {vector:.1f} vector instructions for a value"] if vector > VECTOR[arch] else []


def budgeted(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    return four_waves(assembly, arch, constants) + silu(assembly, arch, constants)


BUDGETS = {"act_and_mul_quant_kernel": Budget(uses=FP8_CAST, more=budgeted)}
# Of MLPs: Qwen3 4B, Llama 3 8B, Qwen3 32B, Llama 3 70B and Llama 3 405B.
WIDTHS = (9728, 14336, 25600, 28672, 53248)


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def launch(width: int, activation: str) -> None:
        ops.act_and_mul_quant_fp8(torch.empty(8, 2 * width, dtype=torch.bfloat16), activation)

    cases = {f"{width} columns": partial(launch, width, "silu") for width in WIDTHS}
    return cases | {f"14336 columns, {name}": partial(launch, 14336, name) for name in ("gelu", "gelu_tanh")}


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    fmt = fp8.of_dtype(hardware.fp8_dtype)

    def check(x: torch.Tensor, activation: str = "silu") -> None:
        found = ops.act_and_mul_quant_fp8(x, activation)
        assert_close_codes(found, reference.act_and_mul_quant_fp8(x, activation, fmt), x.dtype)

    def random(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, activation: str = "silu") -> None:
        check(random_rows(rows, 2 * width, dtype), activation)

    def nasty(width: int, dtype: torch.dtype) -> None:
        """Infinities and NaN in the gate and in the value; and a gate beyond which silu is the identity, or 0."""
        rows = nasty_rows(width, dtype)
        for gate in (torch.full_like(rows, 64), torch.full_like(rows, -1000)):
            x = torch.cat([gate, rows], dim=1)
            expected = reference.act_and_mul_quant_fp8(x, "silu", fmt)
            for result, value in zip(ops.act_and_mul_quant_fp8(x), expected, strict=True):
                assert_same(result, value)
        check(torch.cat([rows, torch.ones_like(rows)], dim=1))

    def strided() -> None:
        wide = random_rows(6, 512, torch.bfloat16)
        check(wide[:, :100])
        check(wide[::3])

    def fewer_programs_than_rows() -> None:
        with patch.object(act_and_mul_quant, "PROGRAMS", 3):
            random(20, 48)

    def beyond_fp16() -> None:
        """silu(gate) * up of 65520 is infinite and makes the row's scale so, 65516 is not."""
        gate, up = torch.full((3, 32), 64.0), torch.linspace(-1, 1, 32).repeat(3, 1)  # silu(64) is 64
        gate[:, 5] = torch.tensor([273.0, 273.0, 44.0])
        up[:, 5] = torch.tensor([240.0, -240.0, 1489.0])
        h = torch.cat([gate, up], dim=1).half()
        found, expected = ops.act_and_mul_quant_fp8(h), reference.act_and_mul_quant_fp8(h, "silu", fmt)
        assert expected[1].isinf().flatten().tolist() == [True, True, False]
        for result, value in zip(found, expected, strict=True):
            assert_same(result, value)

    cases = {
        **{
            f"{width} nasty columns of {name}": partial(nasty, width, dtype)
            for dtype, name in zip(DTYPES, DTYPE_IDS, strict=True)
            for width in (1, 64, 1000)
        },
        **{f"{width} columns": partial(random, 2, width) for width in WIDTHS},
        **{name: partial(random, 6, 96, activation=name) for name in ("gelu", "gelu_tanh")},
        "slots": partial(check_activations, hardware),
        "strided views": strided,
        "fewer programs than rows": fewer_programs_than_rows,
        "beyond fp16": beyond_fp16,
    }
    return shared_out(cases, hardware)
