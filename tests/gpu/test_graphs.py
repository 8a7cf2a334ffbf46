# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and torch.compile over every operator."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats import fp8, nvfp4
from tests.inputs import assert_same, random_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

Function = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def functions(width: int) -> dict[str, Function]:
    """Every operator as a function of x [M, width]."""
    weight = random_rows(1, width, torch.bfloat16, seed=3)[0].cuda()
    w = random_rows(96, width, torch.bfloat16, seed=4).cuda()
    wq, wscale = fp8.quantize_rows(w, fp8.for_device(w.device))
    bias = random_rows(1, 96, torch.bfloat16, seed=5)[0].cuda()
    codes = ops.prepare_nvfp4_weight(nvfp4.quantize(w))
    # A tensor of the host among those of the GPU, as AMD's kernels have it.
    with_runs = replace(codes, runs=torch.tensor([[96.0, codes.global_scale[0].item()]] + [[0.0, 0.0]] * 7).double())

    def gemm(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        xq, xscale = ops.per_token_quant_fp8(x)
        return (ops.ptpc_gemm(xq, xscale, wq, wscale, bias, torch.float32),)

    return {
        "per_token_quant_fp8": ops.per_token_quant_fp8,
        "act_and_mul_quant_fp8": ops.act_and_mul_quant_fp8,
        "rms_norm_quant_fp8": lambda x: ops.rms_norm_quant_fp8(x, weight),
        "add_rms_norm_quant_fp8": lambda x: ops.rms_norm_quant_fp8(x, weight, residual=x * 2),
        "ptpc_gemm": gemm,
        "ptpc_linear": lambda x: (ops.ptpc_linear(x, wq, wscale, bias),),
        "nvfp4_gemm": lambda x: (ops.nvfp4_gemm(x, codes, bias),),
        "nvfp4_gemm_with_runs": lambda x: (ops.nvfp4_gemm(x, with_runs, bias),),
    }


NAMES = [
    "per_token_quant_fp8",
    "act_and_mul_quant_fp8",
    "rms_norm_quant_fp8",
    "add_rms_norm_quant_fp8",
    "ptpc_gemm",
    "ptpc_linear",
    "nvfp4_gemm",
    "nvfp4_gemm_with_runs",
]


def assert_replays(function: Function, rows: int, width: int) -> None:
    """A captured graph gives, for inputs that came after the capture, what eager execution gives."""
    x = random_rows(rows, width, torch.bfloat16).cuda()
    function(x)  # compiles the kernels, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(x)
    for seed in (1, 2, 3):
        x.copy_(random_rows(rows, width, torch.bfloat16, seed=seed))
        graph.replay()
        for found, expected in zip(outputs, function(x), strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("name", NAMES)
def test_graph_replays_on_new_inputs(name: str, rows: int) -> None:
    assert_replays(functions(2048)[name], rows, 2048)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_can_be_captured_too(name: str) -> None:
    """Rows too wide for the Triton kernels, which the reference serves."""
    assert_replays(functions(65552)[name], 3, 65552)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_to_one_graph(name: str) -> None:
    function = functions(512)[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (3, 20, 77):
        x = random_rows(rows, 512, torch.bfloat16, seed=rows).cuda()
        for found, expected in zip(compiled(x), function(x), strict=True):
            assert_same(found, expected)
