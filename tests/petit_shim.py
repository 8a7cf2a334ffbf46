# SPDX-License-Identifier: Apache-2.0
"""The four functions of the package petit_kernel by our operator: whoever calls those can call these.

Petit arranges codes and scales one after the other, before it sees the other part; here they pass as they are, and
`mul_nvfp4_a16` arranges both.
"""

from collections.abc import Sequence

import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight


def repack_nvfp4(qw: torch.Tensor, size_n: int, size_k: int) -> torch.Tensor:
    """Codes [N, K/8] int32, eight in each, the first k in the lowest bits."""
    assert qw.shape == (size_n, size_k // 8)
    return qw


def process_nvfp4_scales(scales: torch.Tensor, size_n: int, size_k: int) -> torch.Tensor:
    """Block scales [N, K/16] float8_e4m3fn."""
    assert scales.shape == (size_n, size_k // 16)
    return scales


def mul_nvfp4_a16(
    a: torch.Tensor,
    b: torch.Tensor,
    s: torch.Tensor,
    global_scale: torch.Tensor,
    size_m: int,
    size_n: int,
    size_k: int,
    solution_id: int,
) -> torch.Tensor:
    """a [M, K] . weight^T -> [M, N] in a's dtype. There is one solution a shape, so `solution_id` says nothing."""
    assert a.shape == (size_m, size_k)
    weight = NvFp4Weight.from_modelopt(b.view(torch.uint8), s, global_scale)
    assert (weight.n, weight.k) == (size_n, size_k)
    return ops.nvfp4_gemm(a, ops.prepare_nvfp4_weight(weight))


def get_fp4_solutions(size_m: int, size_n: int, size_k: int, a_type: torch.dtype, c_type: torch.dtype) -> Sequence[int]:
    """Solution ids for a shape: -1, the operator's own choice."""
    return (-1,)
