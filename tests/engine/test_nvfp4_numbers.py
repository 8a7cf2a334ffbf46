# SPDX-License-Identifier: Apache-2.0
"""Our numbers beside those of vLLM's own emulation of NVFP4."""

import pytest
import torch
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    dequantize_to_dtype,
    ref_nvfp4_quant_dequant,
)

from llm_quant_rocm import ops
from llm_quant_rocm.formats import nvfp4

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@HALF
@pytest.mark.parametrize("m", [1, 64])
def test_products_are_nearer_to_float64(m: int, dtype: torch.dtype) -> None:
    """vLLM rounds every weight to 16 bits before it multiplies; here nothing is rounded before the sum."""
    weight = nvfp4.quantize(normal(192, 1024))
    x = normal(m, 1024, seed=1).to(dtype)
    exact = x.double() @ weight.dequantize(torch.float32).double().t()
    emulated = x @ dequantize_to_dtype(weight.codes, weight.scales, weight.global_scale[0], dtype, swizzle=False).t()
    ours = ops.nvfp4_gemm(x, ops.prepare_nvfp4_weight(weight))
    # What is left of ours is the one rounding of the result.
    assert (ours.double() - exact).abs().mean() < 0.8 * (emulated.double() - exact).abs().mean()
    assert ((ours.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() * 1.01 + 1e-4).all()


@HALF
@pytest.mark.parametrize("divisor", [128.0, 137.31, 2688 / 40])
def test_activations_round_like_upstreams(divisor: float, dtype: torch.dtype) -> None:
    x = normal(64, 256).to(dtype)
    x[0] = 0
    x[1, :16] = 1e-6
    x[2] *= 1e4  # far beyond what was calibrated
    x[3, ::16] *= 100
    x[4] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(32)  # ties, for a block scale of 1
    input_global = torch.tensor(divisor)
    ours = nvfp4.fake_quantize_activation(x, input_global)
    upstream = ref_nvfp4_quant_dequant(x, input_global.reshape(1), 16)
    # The same formula; where vLLM multiplies by two reciprocals, a value at a boundary may go to the other side.
    assert (ours != upstream).float().mean() < 1e-3
    step = x.float().unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True) / 3
    assert ((ours.float() - upstream.float()).unflatten(-1, (-1, 16)).abs() <= step).all()
