# SPDX-License-Identifier: Apache-2.0
"""How the NVFP4 GEMM is tuned; cuBLAS or hipBLASLt in bf16 is timed beside, to see where it wins.

On AMD many rows may be the vendor's, who multiplies a weight that is expanded in memory. Where is found here.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from llm_quant_rocm import hardware, timing
from llm_quant_rocm.formats.nvfp4 import BLOCK, NvFp4Weight
from llm_quant_rocm.ops.nvfp4_gemm import DECODE_ROWS, kernels_of
from llm_quant_rocm.ops.nvfp4_weight import not_expanded, prepare_nvfp4_weight, runs_of
from llm_quant_rocm.tune.workload import Calls, Tuner

_COMPILED_K = 8192
# Where warps multiply alone, steps are longer if a consumer has many: none has with the one, all have with the other.
_COMPILED_KS_BY_WARPS = (256, 2**18)
# Of an H100: what a multiprocessor's programs share, and how many multiprocessors there are.
_SHARED_BYTES, SMS = 227 * 1024, 132


def candidates(device: hardware.Hardware, m: int, n: int, k: int) -> list[Any]:
    """Configurations worth trying for m rows, the default among them."""
    found = _hopper(m, n, k) if device.arch == "sm_90" else _cdna(m, k)
    return list(dict.fromkeys([kernels_of(device.arch).default_config(m, n, k, device), *found]))


def _hopper(m: int, n: int, k: int) -> list[Any]:
    """Enough programs to fill the GPU, not so many that their parts cost more."""
    from llm_quant_rocm.kernels import nvfp4_estimate

    small = _small_tiles(m, n) if m <= (1024 if n * k < 2**24 else 128) else []
    return [*small, *nvfp4_estimate.configs(m, n, k)]


def _small_tiles(m: int, n: int) -> list[Any]:
    """Of the kernel with several programs on a multiprocessor."""
    from llm_quant_rocm.kernels.nvfp4_wgmma import Config

    if m <= 64:
        shapes = [(max(16, m), 64, 4), *([(8, 64, 4)] if m <= 8 else []), *([(m, 128, 8)] if m >= 32 else [])]
    else:
        shapes = [(128, 64, 4), (128, 128, 8), *([(64, 128, 8)] if m <= 128 else [(256, 64, 4), (256, 128, 8)])]
    # block_k, unroll, stages
    steps = ((128, 2, 2), (64, 2, 3), (64, 2, 5)) if m > 32 else ((128, 2, 2), (128, 2, 3), (128, 2, 5), (64, 4, 3))
    found = []
    for block_m, block_n, warps in shapes:
        tiles = -(-n // block_n) * -(-m // block_m)
        # Eight warps on half of the registers, for two programs on a multiprocessor, would spill with deep steps.
        shallow = [step for step in steps if step[0] == 64] if (block_m, warps) == (64, 8) else steps
        for block_k, unroll, stages in (*shallow, *([(64, 2, 2)] if block_m * block_n == 128 * 128 else [])):
            group_bytes = unroll * block_k * (block_m * 2 + block_n * 9 // 16)
            together = min(4 if warps == 4 else 2, _SHARED_BYTES // (group_bytes * stages))
            # Sums of 256 rows and of others' parts would spill.
            shares = [0] if block_m == 256 else _shares(tiles, together)
            for programs in shares if together else ():
                # They go through shared memory in 16 bits at a time.
                fits = group_bytes * stages + (block_m * block_n * 2 if programs else 0) <= _SHARED_BYTES
                if fits and 60 <= (programs or tiles) <= 10000:
                    found.append(Config(block_m, block_n, block_k, programs, unroll, stages, warps))
    return found


def _shares(tiles: int, together: int) -> list[int]:
    """Numbers of programs that share the steps of so many tiles: multiples of the tiles, which cut all alike, and of
    the multiprocessors."""
    alike = [tiles * each for each in (2, 3, 4, 6, 8, 16)]
    everywhere = [SMS * each for each in range(1, together + 1)]
    return [0, *(programs for programs in (*alike, *everywhere) if programs <= SMS * together)]


def _cdna(m: int, k: int) -> list[Any]:
    """Every tile that the kernel has, with K split as far as parts have four steps of 128 columns or more. By
    reasoning; never measured on an AMD GPU."""
    from llm_quant_rocm.kernels.nvfp4_mfma import Config

    covering = min(128, max(16, 1 << (m - 1).bit_length()))
    return [
        Config(block_m, block_n, split_k, warps)
        for block_m in (16, 32, 64, 128)
        if covering // 4 <= block_m <= covering
        for block_n, warps in ((64, 2), (128, 2), (128, 4))
        for split_k in (1, 2, 3, 4, 6, 8, 12, 16)
        if split_k == 1 or (m <= 256 and k >= split_k * 512)
    ]


class NvFp4Workload:
    """x [M, K] in bf16 and rotating weights, in NVFP4 and in bf16."""

    def __init__(self, weights: tuple[list[Any], list[torch.Tensor]], m: int) -> None:
        self._weights, self._dense = weights
        self._device = hardware.detect(torch.device("cuda"))
        self._x = torch.randn(m, self._dense[0].shape[1], dtype=torch.bfloat16, device="cuda")

    def ours(self, config: Any) -> Calls:
        kernels = kernels_of(self._device.arch)
        return [
            partial(kernels.gemm, self._x, w.codes, w.scales, w.global_scale, None, w.n, self._device, config)
            for w in self._weights
        ]

    def peers(self) -> Mapping[str, Calls]:
        peers = {"bf16": [partial(torch.nn.functional.linear, self._x, w) for w in self._dense]}
        if self._x.shape[0] > DECODE_ROWS and not not_expanded(self._device.arch, self._weights[0].layout):
            kernels = kernels_of(self._device.arch)
            peers["torch"] = [
                partial(kernels.gemm_expanded, self._x, w.codes, w.scales, runs_of(w), None, w.n, self._device)
                for w in self._weights
            ]
        return peers


def weights(n: int, k: int) -> tuple[list[Any], list[torch.Tensor]]:
    """Random weights as the kernel reads them, and as many in bf16 as are too large for a cache."""
    count, dense = timing.copies(n * k * 9 // 16), timing.copies(n * k * 2)
    return (
        [prepare_nvfp4_weight(random_weight((n, k))) for _ in range(count)],
        [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(dense)],
    )


def random_weight(shape: tuple[int, ...]) -> NvFp4Weight:
    """A weight [..., N, K] of random codes and block scales."""
    *leading, n, k = shape
    return NvFp4Weight(
        torch.randint(0, 256, (*leading, n, k // 2), dtype=torch.uint8, device="cuda"),
        torch.randint(60, 120, (*leading, n, k // BLOCK), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn),
        torch.full((*leading, n), 1e-3, device="cuda"),
    )


def compile_one(config: Any) -> None:
    """Compiles for the cache on disk: N and K are specialized, M is not. How many programs share the steps matters only
    in that there are none, as many as multiprocessors at most, or more."""
    n = 512
    m = compiled_rows(config, max(config.block_m, 16))
    for k in _COMPILED_KS_BY_WARPS if getattr(config, "by_warps", False) else (_COMPILED_K,):
        weight = prepare_nvfp4_weight(random_weight((n, k)))
        dense = torch.empty(n, k, dtype=torch.bfloat16, device="cuda")
        NvFp4Workload(([weight], [dense]), m).ours(config)[0]()


def compiled_rows(config: Any, m: int) -> int:
    """m rows, or as many as a product with a weight of 512 rows has a tail with, if `config` has one: that comes only
    behind a wave, here of four tiles across N. A row more than that has."""
    return SMS // 4 * config.block_m + 1 if getattr(config, "tail_m", 0) else m


def backend(m: int, us: Mapping[str, float]) -> str:
    """Who serves the shape."""
    return "torch" if "torch" in us and us["torch"] < us["ours"] else "triton"


TUNER = Tuner(
    "nvfp4_gemm",
    (8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096),
    candidates,
    compile_one,
    weights,
    NvFp4Workload,
    backend,
)
