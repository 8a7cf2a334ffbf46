# SPDX-License-Identifier: Apache-2.0
"""The operators of PTPC FP8 in ten lines. Runs on a CPU as on a GPU: ``python examples/operators.py``."""

import torch

from llm_quant_rocm import ops

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(4, 256, dtype=torch.bfloat16, device=device)
weight = torch.randn(512, 256, dtype=torch.bfloat16, device=device)

# Once, at load: a scale for each output channel (row of the weight).
wq, wscale = ops.per_token_quant_fp8(weight)
wq, layout = ops.prepare_ptpc_weight(wq)

# Every forward: a scale for each token, then one GEMM with both scales in its epilogue.
y = ops.ptpc_linear(x, wq, wscale, None, layout)

exact = x.float() @ weight.float().T
print(f"output {tuple(y.shape)} {y.dtype}, relative error {((y - exact).norm() / exact.norm()).item():.2%}")

# As a served layer does it: the norm and the quantization are one kernel, its output feeds the GEMM.
xq, xscale = ops.rms_norm_quant_fp8(x, torch.ones(256, dtype=torch.bfloat16, device=device))
print(f"normed and quantized: {tuple(xq.shape)} {xq.dtype}, scales {tuple(xscale.shape)}")
