# SPDX-License-Identifier: Apache-2.0
"""Operators that were warmed up have nothing compiled by later calls, and compute as always."""

from collections.abc import Callable, Iterator

import pytest
import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats import fp8, nvfp4
from llm_quant_rocm.ops.warm_up import warm_up
from tests.nvfp4_inputs import weight64

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

N, K, ROWS = 640, 1024, 1100


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of kernels that Triton compiles."""
    from triton import knobs

    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **facts: names.append(fn.name)
    yield names
    knobs.runtime.jit_post_compile_hook = before


def x(rows: int) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16()


def weight() -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)) / K**0.5


def nvfp4_product() -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    quantized = nvfp4.quantize(weight().cuda())
    prepared = ops.prepare_nvfp4_weight(quantized)
    return lambda rows: ops.nvfp4_gemm(rows, prepared), weight64(quantized)


def ptpc_product() -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    codes, scale = fp8.quantize_rows(weight(), fp8.OCP)
    on_gpu = codes.cuda(), scale.cuda()
    return lambda rows: ops.ptpc_linear(rows, *on_gpu), codes.double() * scale.double()


@pytest.mark.parametrize("product", [nvfp4_product, ptpc_product])
def test_later_calls_compile_nothing(
    product: Callable[[], tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]], compiled: list[str]
) -> None:
    from llm_quant_rocm.kernels import compile_ahead

    multiply, exact = product()
    warm_up(
        lambda m: multiply(torch.empty(m, K, dtype=torch.bfloat16, device="cuda")), ROWS, torch.device("cuda"),
        product, "test",
    )  # fmt: skip
    compile_ahead.finish()
    del compiled[:]
    for m in (1, 3, 16, 17, 64, 65, 100, 129, 300, 512, 700, 1024, ROWS):
        rows = x(m)
        expected = rows.double() @ exact.t()
        error = (multiply(rows.cuda()).cpu().double() - expected).norm() / expected.norm()
        assert error < 0.05, m  # PTPC rounds x to 3 bits
    assert not compiled
