# SPDX-License-Identifier: Apache-2.0
"""What engines do to Triton, under which our kernels have to compile."""

from typing import Any

import triton

from llm_quant_rocm.kernels.sizes import next_power_of_2


def take_on(told: Any = lambda **facts: None) -> None:
    """Has Triton in this process be as in vLLM and in SGLang.

    vLLM has itself, here `told`, be told of what is compiled: Triton then describes every argument in JSON, and fails
    where it cannot. SGLang puts a function of the host in the place of one that kernels can call.
    """
    engine: Any = triton
    engine.knobs.runtime.jit_post_compile_hook = told
    engine.next_power_of_2 = next_power_of_2
