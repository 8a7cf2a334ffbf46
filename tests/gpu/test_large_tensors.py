# SPDX-License-Identifier: Apache-2.0
"""Tensors of more than 2^31 elements: what stands at their end is found, whatever an offset is computed in.

Their first rows are all the same; the last ones are not, and are compared with a call that has nothing else.
"""

import pytest
import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.formats import nvfp4
from tests.inputs import assert_same, integer_product, product64, random_rows
from tests.ops.test_nvfp4_gemm import exact_operands

ROOMY = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 60 * 2**30
HOPPER = torch.cuda.is_available() and hardware.detect(torch.device("cuda")).arch == "sm_90"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ROOMY, reason="needs a GPU with 60 GiB")]
nvfp4_kernels = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

LAST = 40


def padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[count, K] on the GPU that ends with `rows`; those before are the first of them again and again."""
    raw = rows.cuda().view(torch.uint8)
    whole = torch.empty((count, raw.shape[1]), dtype=torch.uint8, device="cuda")
    whole[: -len(raw)] = raw[0]
    whole[-len(raw) :] = raw
    return whole.view(rows.dtype)


def over(elements: int) -> int:
    """How many rows of so many elements are more than 2^31, and not a multiple of anything."""
    return 2**31 // elements + 1001


def test_quantization_and_norm() -> None:
    rows, weight = random_rows(LAST, 8192, torch.bfloat16), torch.linspace(-2, 2, 8192).bfloat16().cuda()
    x = padded(rows, over(8192))
    for found, expected in (
        (ops.per_token_quant_fp8(x), ops.per_token_quant_fp8(rows.cuda())),
        (ops.rms_norm_quant_fp8(x, weight), ops.rms_norm_quant_fp8(rows.cuda(), weight)),
        (
            ops.rms_norm_quant_fp8(x, weight, residual=x),
            ops.rms_norm_quant_fp8(rows.cuda(), weight, residual=rows.cuda()),
        ),
    ):
        for part, whole in zip(found, expected, strict=True):
            assert_same(part[-LAST:], whole)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_ptpc_gemm_of_many_rows_of_x(out_dtype: torch.dtype) -> None:
    xq, xscale, wq, wscale, _ = integer_product(LAST, 64, 2048, hardware.detect(torch.device("cuda")).fp8_dtype)
    found = ops.ptpc_gemm(padded(xq, over(2048)), padded(xscale, over(2048)), wq.cuda(), wscale.cuda(), None, out_dtype)
    assert_same(found[-LAST:], product64(xq, xscale, wq, wscale, None).float().to(out_dtype))


def test_ptpc_gemm_of_many_rows_of_the_weight() -> None:
    xq, xscale, wq, wscale, _ = integer_product(16, LAST, 2048, hardware.detect(torch.device("cuda")).fp8_dtype)
    found = ops.ptpc_gemm(
        xq.cuda(), xscale.cuda(), padded(wq, over(2048)), padded(wscale, over(2048)), None, torch.float32
    )
    assert_same(found[:, -LAST:], product64(xq, xscale, wq, wscale, None).float())


def test_ptpc_gemm_of_a_large_result() -> None:
    xq, xscale, wq, wscale, _ = integer_product(LAST, LAST, 64, hardware.detect(torch.device("cuda")).fp8_dtype)
    n = 50_000
    operands = (padded(xq, over(n)), padded(xscale, over(n)), padded(wq, n), padded(wscale, n))
    found = ops.ptpc_gemm(*operands, None, torch.float16)
    assert_same(found[-LAST:, -LAST:], product64(xq, xscale, wq, wscale, None).float().half())


@nvfp4_kernels
def test_nvfp4_gemm_of_many_rows_of_x() -> None:
    x, weight, bias = exact_operands(LAST, 96, 4096, torch.bfloat16)
    prepared = ops.prepare_nvfp4_weight(cuda(weight))
    found = ops.nvfp4_gemm(padded(x, over(4096)), prepared, bias.cuda())
    assert_same(found[-LAST:], ops.nvfp4_gemm(x.cuda(), prepared, bias.cuda()))


@nvfp4_kernels
@pytest.mark.parametrize("m", [3, 40, 300])
def test_nvfp4_gemm_of_many_rows_of_the_weight(m: int) -> None:
    x, weight, _ = exact_operands(m, LAST, 4096, torch.bfloat16)
    expected = ops.nvfp4_gemm(x.cuda(), ops.prepare_nvfp4_weight(cuda(weight)))
    n = over(4096)
    scales = padded(weight.scales.view(torch.uint8), n).view(weight.scales.dtype)
    large = nvfp4.NvFp4Weight(padded(weight.codes, n), scales, padded(weight.global_scale[:, None], n)[:, 0])
    assert_same(ops.nvfp4_gemm(x.cuda(), ops.prepare_nvfp4_weight(large))[:, -LAST:], expected)


@nvfp4_kernels
def test_nvfp4_gemm_of_a_large_result() -> None:
    x, weight, _ = exact_operands(LAST, 50_000, 64, torch.bfloat16)
    prepared = ops.prepare_nvfp4_weight(cuda(weight))
    found = ops.nvfp4_gemm(padded(x, over(50_000)), prepared)
    assert_same(found[-LAST:], ops.nvfp4_gemm(x.cuda(), prepared))


def cuda(weight: nvfp4.NvFp4Weight) -> nvfp4.NvFp4Weight:
    return nvfp4.NvFp4Weight(weight.codes.cuda(), weight.scales.cuda(), weight.global_scale.cuda())
