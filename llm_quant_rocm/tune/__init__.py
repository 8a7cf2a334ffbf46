# SPDX-License-Identifier: Apache-2.0
"""Measures launch configurations and crossovers on the GPUs that are here: `llm-quant-rocm tune`. Some of the
tuners import Triton as they are imported."""

from importlib import import_module

from llm_quant_rocm.tune.workload import Tuner

# Operators with launch configurations, each with a module of its name here.
OPERATORS = ("ptpc_gemm", "nvfp4_gemm", "nvfp4_gemm_fp8", "ptpc_moe", "nvfp4_moe")
# The all-reduce, which needs several GPUs.
QUICK_REDUCE = "quick_reduce"


def tuner(operator: str) -> Tuner:
    """The tuner of one of `OPERATORS`."""
    found: Tuner = import_module(f"llm_quant_rocm.tune.{operator}").TUNER
    return found
