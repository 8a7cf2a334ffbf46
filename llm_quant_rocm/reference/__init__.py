# SPDX-License-Identifier: Apache-2.0
"""What each operator computes: pure torch on any device, the oracle of the kernels."""

from llm_quant_rocm.reference.act_and_mul_quant import act_and_mul_quant_fp8 as act_and_mul_quant_fp8
from llm_quant_rocm.reference.nvfp4_gemm import nvfp4_gemm as nvfp4_gemm
from llm_quant_rocm.reference.nvfp4_gemm import nvfp4_gemm_fp8 as nvfp4_gemm_fp8
from llm_quant_rocm.reference.nvfp4_moe import nvfp4_moe as nvfp4_moe
from llm_quant_rocm.reference.per_token_quant import per_token_quant_fp8 as per_token_quant_fp8
from llm_quant_rocm.reference.ptpc_gemm import ptpc_gemm as ptpc_gemm
from llm_quant_rocm.reference.ptpc_moe import ptpc_moe as ptpc_moe
from llm_quant_rocm.reference.reduce_norm_quant import norm_quant as norm_quant
from llm_quant_rocm.reference.reduce_norm_quant import reduce_norm_quant as reduce_norm_quant
from llm_quant_rocm.reference.reduce_norm_quant import reduce_rows as reduce_rows
from llm_quant_rocm.reference.rms_norm_quant import rms_norm_quant_fp8 as rms_norm_quant_fp8
