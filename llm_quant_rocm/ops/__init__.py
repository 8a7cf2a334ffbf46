# SPDX-License-Identifier: Apache-2.0
"""The operators: torch.library operators with fakes, safe under torch.compile and CUDA graphs, on CPU and GPU.

They are for inference and have no gradients. The experts' references read on the host which experts have tokens, so a
GPU that has no kernel for experts captures no graph of them. `nvfp4_moe_w4a4` is a plain function, for evaluation.
"""

from llm_quant_rocm.ops.act_and_mul_quant import act_and_mul_quant_fp8 as act_and_mul_quant_fp8
from llm_quant_rocm.ops.nvfp4_gemm import nvfp4_gemm as nvfp4_gemm
from llm_quant_rocm.ops.nvfp4_moe import nvfp4_moe as nvfp4_moe
from llm_quant_rocm.ops.nvfp4_moe_w4a4 import nvfp4_moe_w4a4 as nvfp4_moe_w4a4
from llm_quant_rocm.ops.nvfp4_weight import PreparedNvFp4Weight as PreparedNvFp4Weight
from llm_quant_rocm.ops.nvfp4_weight import prepare_nvfp4_weight as prepare_nvfp4_weight
from llm_quant_rocm.ops.per_token_quant import per_token_quant_fp8 as per_token_quant_fp8
from llm_quant_rocm.ops.ptpc_gemm import prepare_ptpc_weight as prepare_ptpc_weight
from llm_quant_rocm.ops.ptpc_gemm import ptpc_gemm as ptpc_gemm
from llm_quant_rocm.ops.ptpc_gemm import ptpc_linear as ptpc_linear
from llm_quant_rocm.ops.ptpc_moe import ptpc_moe as ptpc_moe
from llm_quant_rocm.ops.reduce_norm_quant import reduce_norm_quant as reduce_norm_quant
from llm_quant_rocm.ops.rms_norm_quant import rms_norm_quant_fp8 as rms_norm_quant_fp8
