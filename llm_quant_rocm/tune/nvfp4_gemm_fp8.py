# SPDX-License-Identifier: Apache-2.0
"""How the NVFP4 GEMM with prefill="fp8" is tuned: decoded on the way or expanded in memory, and where the exact product
is faster than both."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.kernels.nvfp4_slices import Expanded
from llm_quant_rocm.ops.nvfp4_gemm import EXACT, FP8_NAME, kernels_of
from llm_quant_rocm.tune.nvfp4_gemm import NvFp4Workload, compiled_rows, random_weight, weights
from llm_quant_rocm.tune.workload import Calls, Tuner

_SLICES = tuple(2**exponent for exponent in (23, 24, 25, 26, 27, 28))  # values of a weight at a time
_COMPILED = (320, 512, 8192)


def candidates(device: hardware.Hardware, m: int, n: int, k: int) -> list[Any]:
    """Configurations worth trying for m rows, the default among them unless it is the exact product."""
    default = kernels_of(device.arch).default_fp8_config(m, n, k, device)
    decoding = []
    if device.arch == "sm_90":
        from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import configs

        decoding = configs(m, n, k, fp8=True)
    by_count = {-(-n * k // values): Expanded(values) for values in reversed(_SLICES)}
    # The vendor's product wants a weight of a multiple of 16 rows; slices have at least 128 of them.
    expanding = [config for count, config in by_count.items() if n % 16 == 0 and count <= max(1, n // 128)]
    # The slices that serve where nobody measured are among them, whoever is estimated to win.
    plain = [Expanded()] if expanding else []
    return list(dict.fromkeys([*([default] if default else []), *plain, *decoding, *expanding]))


class Fp8Workload(NvFp4Workload):
    """x [M, K] in bf16 and rotating weights."""

    def ours(self, config: Any) -> Calls:
        kernels = kernels_of(self._device.arch)
        return [
            partial(kernels.gemm_fp8, self._x, w.codes, w.scales, w.global_scale, None, w.n, self._device, config)
            for w in self._weights
        ]

    def peers(self) -> Mapping[str, Calls]:
        exact: Calls = [partial(ops.nvfp4_gemm, self._x, w) for w in self._weights]
        return {"bf16": super().peers()["bf16"], EXACT: exact}


def compile_one(config: Any) -> None:
    """Compiles for the cache on disk, and runs."""
    m, n, k = _COMPILED
    m = compiled_rows(config, m)
    dense = torch.empty(n, k, dtype=torch.bfloat16, device="cuda")
    Fp8Workload(([ops.prepare_nvfp4_weight(random_weight((n, k)))], [dense]), m).ours(config)[0]()


def backend(m: int, us: Mapping[str, float]) -> str:
    """Who serves the shape."""
    return EXACT if us[EXACT] <= us["ours"] else "triton"


TUNER = Tuner(
    FP8_NAME, (128, 256, 512, 1024, 2048, 4096, 8192, 16384), candidates, compile_one, weights, Fp8Workload, backend
)
