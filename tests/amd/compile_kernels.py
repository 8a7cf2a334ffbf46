# SPDX-License-Identifier: Apache-2.0
"""Compiles every Triton kernel of the library for one AMD architecture, without a GPU: `compile_kernels.py ARCH`.

The library's own launch functions run on CPU tensors with a driver that says it is ARCH, and every launch is turned
into a compilation: so what is compiled is what production compiles, alignment and 32-bit pointer ranges included.
Prints one JSON object: for every case the kernels it launched, each with its assembly and resources, or "aborted".
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from tempfile import NamedTemporaryFile, TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from llm_quant_rocm import hardware
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.kernels import per_token_quant, ptpc_gemm, ptpc_moe, rms_norm_quant

WIDTHS = (1, 64, 5120, 8192, 28672)


def gemm(arch: str, m: int, n: int = 8192, k: int = 8192, split_k: int = 1) -> None:
    device = hardware.amd(arch)
    config = replace(ptpc_gemm.default_config(device, m, n, k), split_k=split_k)
    xq, wq = torch.empty(m, k, dtype=device.fp8_dtype), torch.empty(n, k, dtype=device.fp8_dtype)
    xscale, wscale, bias = torch.empty(m, 1), torch.empty(n, 1), torch.empty(n)
    ptpc_gemm.ptpc_gemm(xq, xscale, wq, wscale, bias, torch.bfloat16, device, config)


def quant(arch: str, width: int) -> None:
    fmt = fp8.of_dtype(hardware.amd(arch).fp8_dtype)
    per_token_quant.per_token_quant_fp8(torch.empty(16, width, dtype=torch.bfloat16), fmt)


def norm(arch: str, width: int, with_residual: bool) -> None:
    fmt = fp8.of_dtype(hardware.amd(arch).fp8_dtype)
    x = torch.empty(16, width, dtype=torch.bfloat16)
    rms_norm_quant.rms_norm_quant_fp8(x, x[0], 1e-6, x if with_residual else None, fmt)


def moe(
    arch: str, tokens: int, hidden: int = 4096, inner: int = 1536, experts: int = 64, activation: str = "silu"
) -> None:
    device = hardware.amd(arch)
    fmt = fp8.of_dtype(device.fp8_dtype)
    w13 = torch.empty(experts, 2 * inner, hidden, dtype=fmt.dtype)
    w2 = torch.empty(experts, hidden, inner, dtype=fmt.dtype)
    scales = torch.empty(experts, 2 * inner, 1), torch.empty(experts, hidden, 1)
    ids = torch.zeros(tokens, 4, dtype=torch.int32)
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    ptpc_moe.ptpc_moe(x, w13, scales[0], w2, scales[1], torch.empty(tokens, 4), ids, None, activation, fmt, device)


CASES: dict[str, Callable[[str], None]] = {
    **{f"ptpc_gemm-m{m}": lambda arch, m=m: gemm(arch, m) for m in (1, 16, 32, 64, 65, 4096)},
    "ptpc_gemm-split_k": lambda arch: gemm(arch, 16, split_k=4),
    "ptpc_gemm-ragged-m16": lambda arch: gemm(arch, 16, n=77, k=1001),
    "ptpc_gemm-ragged-m300": lambda arch: gemm(arch, 300, n=77, k=1001),
    "ptpc_gemm-one": lambda arch: gemm(arch, 1, n=1, k=1),
    # Few tokens, a middling number and many: the tiles of ptpc_moe.default_config.
    **{f"ptpc_moe-t{tokens}": lambda arch, tokens=tokens: moe(arch, tokens) for tokens in (1, 512, 4096)},
    "ptpc_moe-ragged": lambda arch: moe(arch, 33, hidden=77, inner=51, experts=5, activation="gelu"),
    "ptpc_moe-wide": lambda arch: moe(arch, 16, inner=14336, experts=8, activation="gelu_tanh"),
    **{f"per_token_quant-{width}": lambda arch, width=width: quant(arch, width) for width in WIDTHS},
    **{f"rms_norm_quant-{width}": lambda arch, width=width: norm(arch, width, False) for width in WIDTHS},
    **{f"add_rms_norm_quant-{width}": lambda arch, width=width: norm(arch, width, True) for width in WIDTHS},
}


def compiled(case: Callable[[str], None], arch: str) -> list[dict[str, Any]]:
    """The kernels that `case` launches."""
    kernels = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        kernel = run(self, *args, **options | {"warmup": True})
        kernels.append({"name": kernel.name, "assembly": kernel.asm["amdgcn"], "lds": kernel.metadata.shared})

    JITFunction.run = compile_only
    case(arch)
    return kernels


def isolated(case: Callable[[str], None], arch: str) -> list[dict[str, Any]] | str:
    """`compiled` in a child process: LLVM aborts the process on what it cannot compile."""
    with NamedTemporaryFile("r") as file:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                kernels = compiled(case, arch)
                with open(file.name, "w") as out:
                    json.dump(kernels, out)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        return json.load(file) if status == 0 else "aborted"


def main(arch: str) -> None:
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("hip", arch, 64),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    with TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        json.dump({name: isolated(case, arch) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
