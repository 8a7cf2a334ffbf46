# SPDX-License-Identifier: Apache-2.0
"""Tensors of a GPU that is not the current one."""

import pytest
import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats import fp8, nvfp4
from tests.inputs import assert_same, random_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def results(device: torch.device) -> list[torch.Tensor]:
    """Of every operator, on `device`."""
    x, w = random_rows(20, 512, torch.bfloat16).to(device), random_rows(96, 512, torch.bfloat16, seed=1).to(device)
    wq, wscale = fp8.quantize_rows(w, fp8.for_device(device))
    weight = ops.prepare_nvfp4_weight(nvfp4.quantize(w))
    return [
        *ops.per_token_quant_fp8(x),
        *ops.rms_norm_quant_fp8(x, w[0], residual=x * 2),
        ops.ptpc_linear(x, wq, wscale),
        ops.nvfp4_gemm(x, weight),
        ops.nvfp4_gemm(x.repeat(20, 1), weight, prefill="fp8"),
    ]


def test_operators_run_where_their_tensors_are() -> None:
    """While the current GPU is busy: a kernel in its stream would come too late."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    expected = results(first)
    results(second)  # compiles
    torch.cuda.synchronize(second)
    with torch.cuda.device(first):
        torch.cuda._sleep(10**9)
        found = results(second)
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(second)
        for one, other in zip(found, expected, strict=True):
            assert one.device == second
            assert_same(one, other)
