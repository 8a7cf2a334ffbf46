# SPDX-License-Identifier: Apache-2.0
"""The FP8 matrix product: exact on integers, within fp32's accumulation on random codes, all codes one by one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from llm_quant_rocm import hardware as facts
from llm_quant_rocm import ops, tuning
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.hardware import Hardware
from tests.amd.budget import FP8_MATRIX, Budget
from tests.amd.operators import decoding, shared_out
from tests.inputs import (
    DTYPE_IDS,
    DTYPES,
    assert_same,
    broken_rows,
    integer_product,
    product64,
    random_rows,
)

BUDGETS = {"ptpc_gemm_kernel": Budget(matrix=FP8_MATRIX, more=decoding), "split_k_kernel": Budget()}
# Decode and prefill over projections of Llama 3 70B: whole, and sharded over 8 GPUs; and over one of Qwen3-32B's, whose
# K is an odd multiple of 128.
SHAPES = [(m, 8192, 8192) for m in (16, 32, 64, 128, 256, 512, 4096)] + [
    (16, 1280, 8192), (128, 1280, 8192), (16, 57344, 8192), (16, 5120, 3200), (64, 5120, 3200),
]  # fmt: skip
# Every tile of default_config, with even and ragged edges, in one and in several parts of K: (M, N, K), and of how many
# compute units, where those of the whole GPU would have smaller tiles.
SMALL_SHAPES = [
    (1, 1, 1), (1, 64, 128), (5, 1, 33), (9, 70, 512), (20, 96, 256), (20, 77, 1001), (33, 64, 2048), (3, 48, 2064),
    (65, 7, 100), (130, 160, 256), (130, 100, 333), (70, 80, 4096),
    (65, 7, 100, 1), (130, 160, 256, 1), (130, 100, 333, 1), (130, 160, 256, 5), (130, 100, 333, 3),
]  # fmt: skip


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return torch.empty(m, k, dtype=dtype), torch.empty(m, 1), torch.empty(n, k, dtype=dtype), torch.empty(n, 1)


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    shapes = SHAPES + [(shape.m, shape.n, shape.k) for shape in tuning.shapes("ptpc_gemm", hardware.arch)]
    return {
        f"{m} x {n} x {k}": lambda m=m, n=n, k=k: ops.ptpc_gemm(*operands(m, n, k, hardware.fp8_dtype))
        for m, n, k in shapes
    }


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    dtype = hardware.fp8_dtype
    fmt = fp8.of_dtype(dtype)
    dtypes = dict(zip(DTYPE_IDS, DTYPES, strict=True))

    def exact(m: int, n: int, k: int, out: torch.dtype = torch.bfloat16, bias: torch.dtype | None = None) -> None:
        *codes, integers = integer_product(m, n, k, dtype)
        added = None if bias is None else integers.to(bias)
        assert_same(ops.ptpc_gemm(*codes, added, out), product64(*codes, added).float().to(out))

    def exact_of_units(m: int, n: int, k: int, units: int) -> None:
        with patch.object(facts, "CPU", replace(hardware, units=units)):
            exact(m, n, k)

    def random(m: int, n: int, k: int) -> None:
        x, w = random_rows(m, k, torch.bfloat16, seed=1), random_rows(n, k, torch.bfloat16, seed=2)
        codes = *fp8.quantize_rows(x, fmt), *fp8.quantize_rows(w, fmt)
        expected = product64(*codes, None)
        error = (ops.ptpc_gemm(*codes, None, torch.float32).double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() <= k**0.5 * 2**-23

    def every_code() -> None:
        """x is the identity, so the product is the weight: every code but NaN, -0 as 0."""
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
        codes = torch.where(codes.float().isnan(), 0.0, codes.float()).to(dtype).view(16, 16)
        ones = torch.ones(16, 1)
        found = ops.ptpc_gemm(torch.eye(16).to(dtype), ones, codes, ones, None, torch.float32)
        assert_same(found, codes.float().t() + 0.0)

    def broken() -> None:
        """A row with NaN or inf is NaN all over; the rows beside it are not touched.

        Where FP8 is decoded to FP16 a NaN code counts as 480: the row of an inf has a scale of inf, and is inf or NaN.
        """
        x = torch.cat([broken_rows(64, torch.bfloat16), random_rows(3, 64, torch.bfloat16)])
        codes = *fp8.quantize_rows(x, fmt), *fp8.quantize_rows(random_rows(32, 64, torch.bfloat16, seed=2), fmt)
        found = ops.ptpc_gemm(*codes, None, torch.float32)
        expected = product64(*codes, None)
        assert expected[:6].isnan().all()
        assert (found[:6].isnan() if hardware.fp8_units else ~found[:6].isfinite()).all()
        torch.testing.assert_close(found[6:].double(), expected[6:], rtol=1e-4, atol=1e-4 * expected[6:].abs().max())

    def views() -> None:
        *codes, _ = integer_product(20, 40, 160, dtype)
        xq, wq = (torch.cat([rows] * 2, dim=1)[:, 160:] for rows in (codes[0], codes[2]))
        found = ops.ptpc_gemm(xq, codes[1], wq, codes[3], None, torch.float32)
        assert_same(found, product64(*codes, None).float())

    def other_flavour() -> None:
        other = fp8.FNUZ if fmt is fp8.OCP else fp8.OCP
        with pytest.raises(TypeError, match=f"{other.dtype}.*computes in {dtype}"):
            ops.ptpc_gemm(*operands(4, 16, 16, other.dtype))

    cases = {
        **{f"{m} x {n} x {k}": partial(exact, m, n, k) for m, n, k, *units in SMALL_SHAPES if not units},
        **{
            f"{m} x {n} x {k}, {units[0]} units": partial(exact_of_units, m, n, k, *units)
            for m, n, k, *units in SMALL_SHAPES
            if units
        },
        **{
            f"{out} with {bias or 'no'} bias": partial(exact, 20, 48, 256, dtypes[out], dtypes.get(bias))
            for out, bias in (("bf16", "bf16"), ("fp16", ""), ("fp16", "fp32"), ("fp32", ""), ("fp32", "fp16"))
        },
        "a bias after several parts of K": partial(exact, 20, 80, 2048, torch.float16, torch.bfloat16),
        "random codes, few rows": partial(random, 7, 80, 2048),
        "random codes, many rows": partial(random, 70, 80, 384),
        "every code": every_code,
        "NaN and inf": broken,
        "views": views,
        "the other flavour is refused": other_flavour,
    }
    return shared_out(cases, hardware)
