# SPDX-License-Identifier: Apache-2.0
"""Measures launch configurations on the GPU that is here: `llm-quant-rocm tune`. Importing a tuner imports Triton."""

from llm_quant_rocm.tune.workload import Tuner

# By operator, the module that tunes it.
OPERATORS = ("ptpc_gemm", "nvfp4_gemm")


def tuner(operator: str) -> Tuner:
    """The tuner of one of `OPERATORS`."""
    from llm_quant_rocm.tune import nvfp4_gemm, ptpc_gemm

    return {"ptpc_gemm": ptpc_gemm.TUNER, "nvfp4_gemm": nvfp4_gemm.TUNER}[operator]
