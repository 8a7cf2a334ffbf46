# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with quantization: the reference's bits."""

from collections.abc import Callable
from functools import partial

import torch

from llm_quant_rocm import ops, reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.hardware import Hardware
from tests.amd.budget import FP8_CAST, Budget
from tests.amd.operators import four_waves, shared_out
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, nasty_rows, random_rows

# The widest row there may be spills with Triton 3.9. No model has it: the widest hidden size, Llama 3 405B's, is 16384.
BUDGETS = {"rms_norm_quant_kernel": Budget(uses=FP8_CAST, may_spill=frozenset({"65536 columns"}), more=four_waves)}
WIDTHS = (4096, 5120, 8192, 16384)  # hidden sizes of Llama 3 8B, Qwen3 32B, Llama 3 70B and Llama 3 405B


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def launch(width: int, with_residual: bool) -> None:
        x, weight = torch.empty(8, width, dtype=torch.bfloat16), torch.empty(width, dtype=torch.bfloat16)
        ops.rms_norm_quant_fp8(x, weight, residual=torch.empty_like(x) if with_residual else None)

    return {
        f"{width} columns{', residual' * with_residual}": partial(launch, width, with_residual)
        for width in WIDTHS
        for with_residual in (False, True)
    }


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    fmt = fp8.of_dtype(hardware.fp8_dtype)

    def check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-6) -> None:
        found = ops.rms_norm_quant_fp8(x, weight, eps, residual)
        expected = reference.rms_norm_quant_fp8(x, weight, eps, residual, fmt)
        for result, value in zip(found, expected, strict=False):  # without a residual the operator returns no sum
            assert_same(result, value)

    def dtypes(dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
        x, weight = nasty_rows(width, dtype), torch.linspace(-2, 2, width).to(weight_dtype)
        check(x, weight)
        check(x, weight, x.flip(0))

    def random(width: int, without_residual: bool = True) -> None:
        x, weight = random_rows(2, width, torch.bfloat16), 1 + random_rows(1, width, torch.bfloat16, seed=1)[0] / 8
        check(x, weight, random_rows(2, width, torch.bfloat16, seed=2))
        if without_residual:
            check(x, weight)

    def strided() -> None:
        wide = random_rows(6, 1024, torch.bfloat16)
        check(wide[:, :500], torch.linspace(-2, 2, 1000, dtype=torch.bfloat16)[::2], wide[:, 507:1007])

    def eps() -> None:
        for value in (1e-8, 1e-2):
            check(torch.full((2, 64), 1e-3, dtype=torch.bfloat16), torch.ones(64), eps=value)

    def beyond_fp16() -> None:
        """The largest number that is rounded to a finite one, and the least that is not: then the scale is infinite."""
        weight = torch.linspace(-2, 2, 96)
        weight[5] = 65520.0
        for value in (1e-6, 1e-12):  # the root of 1 + 1e-6 makes it 65519.97
            check(torch.ones(2, 96, dtype=torch.float16), weight, eps=value)

    cases = {
        **{
            f"{width} columns of {name}": partial(dtypes, dtype, dtype, width)
            for dtype, name in zip(DTYPES, DTYPE_IDS, strict=True)
            for width in (1, 7, 1000, 1025)
        },
        "an fp32 weight": partial(dtypes, torch.bfloat16, torch.float32, 96),
        **{f"{width} columns": partial(random, width) for width in WIDTHS},
        # Two kernels of this width take as long to compile as all others.
        "65536 columns": partial(random, 65536, without_residual=False),
        "strided views": strided,
        "eps": eps,
        "beyond fp16": beyond_fp16,
    }
    return shared_out(cases, hardware)
