# SPDX-License-Identifier: Apache-2.0
"""The FP8 products find their operands in the LDS without waiting for its banks."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from llm_quant_rocm import hardware, ops
from tests.amd import isolated, tritons
from tests.amd.lds_banks import clocks
from tests.amd.virtual_gpu import activate


def _dense(arch: str, rows: int) -> tuple[int, int]:
    os.environ["LLM_QUANT_ROCM_PTPC_GEMM"] = "triton"
    activate(arch)
    dtype = hardware.amd(arch).fp8_dtype
    x, w = torch.zeros(rows, 256).to(dtype), torch.zeros(128, 256).to(dtype)
    return clocks(arch, partial(ops.ptpc_gemm, x, torch.ones(rows, 1), w, torch.ones(128, 1)))


def _experts(arch: str, tokens: int) -> tuple[int, int]:
    os.environ["LLM_QUANT_ROCM_PTPC_MOE"] = "triton"
    activate(arch)
    dtype = hardware.amd(arch).fp8_dtype
    w13, w2 = torch.zeros(2, 128, 256).to(dtype), torch.zeros(2, 256, 64).to(dtype)
    ids = torch.arange(2, dtype=torch.int32).repeat(tokens, 1)
    run = partial(
        ops.ptpc_moe, torch.zeros(tokens, 256).bfloat16(), w13, torch.ones(2, 128, 1), w2, torch.ones(2, 256, 1),
        torch.ones(tokens, 2), ids,
    )  # fmt: skip
    return clocks(arch, run)


PRODUCTS = pytest.mark.parametrize(("product", "rows"), [(_dense, 16), (_dense, 64), (_dense, 128), (_experts, 4)])


@pytest.mark.parametrize("triton", tritons.VERSIONS)
@PRODUCTS
def test_fp8_on_gfx942(triton: str, product: Callable[..., object], rows: int) -> None:
    taken, least = isolated.call(triton, product, "gfx942", rows)
    assert taken == least


@pytest.mark.parametrize("triton", tritons.VERSIONS)
@PRODUCTS
def test_fp8_on_gfx90a(triton: str, product: Callable[..., object], rows: int) -> None:
    """Where codes become fp16 behind the LDS: rows of 64 bytes of x have some conflicts left."""
    taken, least = isolated.call(triton, product, "gfx90a", rows)
    assert taken < 1.7 * least
