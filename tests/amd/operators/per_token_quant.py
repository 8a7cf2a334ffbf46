# SPDX-License-Identifier: Apache-2.0
"""Per-token quantization: codes and scales are the reference's, bit for bit."""

from collections.abc import Callable
from functools import partial

import torch

from llm_quant_rocm import ops, reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.hardware import Hardware
from tests.amd.budget import FP8_CAST, Budget
from tests.amd.operators import four_waves, shared_out
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, nasty_rows, random_rows

BUDGETS = {"per_token_quant_kernel": Budget(uses=FP8_CAST, more=four_waves)}
# Hidden sizes of Llama 3 8B, Qwen3 32B, Llama 3 405B, an MLP of Llama 3 70B, and the widest row there may be.
WIDTHS = (4096, 5120, 16384, 28672, 65536)


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    """Few rows, which may stay in caches, and so many that they do not."""
    return {
        f"{width} columns, {rows} rows": lambda rows=rows, width=width: ops.per_token_quant_fp8(
            torch.empty(rows, width, dtype=torch.bfloat16)
        )
        for width in WIDTHS
        for rows in (8, 8192)
    }


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    fmt = fp8.of_dtype(hardware.fp8_dtype)

    def check(make: Callable[[], torch.Tensor]) -> None:
        x = make()
        q, scale = ops.per_token_quant_fp8(x)
        expected_q, expected_scale = reference.per_token_quant_fp8(x, fmt)
        assert_same(scale, expected_scale)
        assert_same(q, expected_q)

    wide = random_rows(6, 512, torch.bfloat16)
    cases = {
        **{
            f"{width} columns of {name}": partial(nasty_rows, width, dtype)
            for dtype, name in zip(DTYPES, DTYPE_IDS, strict=True)
            for width in (1, 64, 1000)
        },
        **{f"{width} columns": partial(random_rows, 2, width, torch.bfloat16) for width in WIDTHS},
        "a narrow view": lambda: wide[:, :100],
        "an unaligned view": lambda: wide[:, 3:260],
        "every third row": lambda: wide[::3],
        "every second column": lambda: wide[:, ::2],
        "either sign beside inf": lambda: torch.tensor(
            [[torch.inf, 1.0, -1.0, 0.0, -0.0], [1.0, -1.0, 0.0, -0.0, -torch.inf]]
        ),
    }
    return shared_out({name: partial(check, make) for name, make in cases.items()}, hardware)
