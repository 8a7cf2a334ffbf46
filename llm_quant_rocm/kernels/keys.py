# SPDX-License-Identifier: Apache-2.0
"""Keys of kernels in Triton's cache on disk that do not depend on what a process compiled before.

In Triton 3.6 (no longer in 3.9) a function's key has the globals of a function that it calls only if that one's key was
asked for earlier. Processes that begin with different kernels do not find what the others compiled.
"""

from importlib import import_module

import torch

from llm_quant_rocm.hardware import detect

# Those whose keys depend on it, in an order that is the same in all processes; on AMD there are no others
# (tests/kernels/test_keys.py).
_MODULES = ("pdl", "fp8_row", "norm_row", "wire_units", "quick_reduce", "reduce_norm_quant", "rms_norm_quant")
# On Hopper these as well.
_HOPPER = (
    "hopper", "cluster", "decode_hopper", "stretches", "wgmma_parts", "activate", "nvfp4_wgmma",
    "nvfp4_wgmma_split_tiles", "nvfp4_wgmma_split_epilogue", "nvfp4_wgmma_split",
    "nvfp4_wgmma_large_tiles", "nvfp4_wgmma_large_mainloop", "nvfp4_wgmma_large_epilogue", "nvfp4_wgmma_large",
    "nvfp4_expand", "per_token_quant", "act_and_mul_quant", "ptpc_gemm", "ptpc_wgmma", "ptpc_wgmma_few",
    "ptpc_wgmma_grouped", "ptpc_moe", "ptpc_moe_hopper",
)  # fmt: skip


def settle() -> None:
    """Asks for all keys in one order, where there is a GPU. To be called before the first kernel of a process, by those
    that compile and by those that launch."""
    if not torch.cuda.is_available():
        return
    from triton.runtime.jit import JITFunction

    hopper = detect(torch.device("cuda")).arch == "sm_90"
    for name in (*_MODULES, *(_HOPPER if hopper else ())):
        module = import_module(f"llm_quant_rocm.kernels.{name}")
        for function in vars(module).values():
            if isinstance(function, JITFunction) and function.__module__ == module.__name__:
                _ = function.cache_key
