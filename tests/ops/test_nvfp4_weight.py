# SPDX-License-Identifier: Apache-2.0
"""ops.prepare_nvfp4_weight where no kernel wants another layout: on the CPU."""

import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats import nvfp4
from tests.nvfp4_inputs import nasty_weight


def test_a_weight_stays_as_it_is() -> None:
    for weight in (nasty_weight(10, 32), nasty_weight(6, 48, 3)):
        prepared = ops.prepare_nvfp4_weight(weight)
        assert prepared.codes is weight.codes
        assert prepared.scales is weight.scales
        assert prepared.global_scale is weight.global_scale
        assert (prepared.layout, prepared.n, prepared.k) == ("row", weight.n, weight.k)


def test_a_view_becomes_contiguous() -> None:
    whole = nasty_weight(20, 64)
    view = nvfp4.NvFp4Weight(whole.codes[::2, :16], whole.scales[::2, :2], whole.global_scale[::2])
    prepared = ops.prepare_nvfp4_weight(view)
    assert prepared.codes.is_contiguous() and prepared.scales.is_contiguous() and prepared.global_scale.is_contiguous()
    x = torch.randn(3, 32).bfloat16()
    assert torch.equal(ops.nvfp4_gemm(x, prepared), ops.nvfp4_gemm(x, view))
