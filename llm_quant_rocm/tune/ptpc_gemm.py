# SPDX-License-Identifier: Apache-2.0
"""How the PTPC GEMM is tuned. Beside the best configuration stands who won the shape, torch._scaled_mm or ours."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from llm_quant_rocm import hardware, timing
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig
from llm_quant_rocm.ops._hipblaslt import lacks_kernel
from llm_quant_rocm.ops.ptpc_gemm import BACKENDS, ROW, GemmCall, kernels_of
from llm_quant_rocm.tune.workload import Calls, Tuner

_TORCH = next(backend for backend in BACKENDS if backend.name == "torch")
# Long products run at the clock that their power allows, which moves by some percent from run to run.
_MARGIN, _LONG = 1.05, 256

Weights = list[tuple[torch.Tensor, torch.Tensor]]


def candidates(device: hardware.Hardware, m: int, n: int, k: int) -> list[Any]:
    """Configurations worth trying for m rows, the default among them."""
    default = kernels_of(device.arch).default_config(device, m, n, k)
    found = _hopper(m) if device.arch == "sm_90" else _bulk(m) if device.tma else _others(m, n, k, default.split_k)
    return list(dict.fromkeys([default, *found]))


def _hopper(m: int) -> list[Any]:
    """Those of the kernels that Hopper has for few rows and for many, beside which the general one wins where tiles of
    neither fit."""
    from llm_quant_rocm.kernels import ptpc_wgmma, ptpc_wgmma_few

    found: list[Any] = []
    if m <= ptpc_wgmma_few.MAX_ROWS:
        found += itertools.starmap(ptpc_wgmma_few.Config, itertools.product(ptpc_wgmma_few.BLOCK_NS, (128, 256)))
    if m <= 64:
        return found
    for block_m, block_n in ((128, 256), (256, 128), (128, 128)):
        # A group of as many tiles as there are, or more, is the same as one of all.
        groups = {min(group, max(4, 1 << (-(-m // block_m) - 1).bit_length())) for group in (4, 8, 16, 32)}
        found += [ptpc_wgmma.Config(block_m, block_n, group) for group in sorted(groups) if m > 128 or block_m == 128]
    return found + _bulk(m)


def _bulk(m: int) -> list[GemmConfig]:
    """Of the general kernel, with the tensor memory accelerator."""
    found = []
    if m <= 64:
        block_m = max(16, 1 << (m - 1).bit_length())
        for block_n, block_k, stages in itertools.product((64, 128), (128, 256), (3, 4, 5, 6, 8)):
            if 32 * 1024 <= (block_m + block_n) * block_k * stages <= 200 * 1024:
                found.append(GemmConfig(block_m, block_n, block_k, stages, 4, 1, 1, True, True))
        for block_n, block_k, stages in itertools.product((16, 32, 64), (128, 256), (4, 6)):
            if (64 + block_n) * block_k * stages <= 200 * 1024:
                found.append(GemmConfig(64, block_n, block_k, stages, 4, 1, 1, False, True))
    if 64 <= m <= 512:
        tiles = ((64, 128), (64, 256), (128, 128), (64, 64), (128, 64), (128, 256), (256, 128))
        for (block_m, block_n), stages in itertools.product(tiles, (3, 4, 5, 6)):
            if (block_m + block_n) * 128 * stages > 220 * 1024:
                continue
            warps = 8 if block_m * block_n >= 128 * 256 else 4
            found.append(GemmConfig(block_m, block_n, 128, stages, warps, 8, 1, False, True))
            if block_m * block_n == 128 * 128:
                found.append(GemmConfig(block_m, block_n, 128, stages, 8, 8, 1, False, True))
            if block_m == 64 and m <= 128:
                found.append(GemmConfig(block_m, block_n, 128, stages, warps, 8, 1, True, True))
            if block_m * block_n >= 128 * 128:
                found.append(GemmConfig(block_m, block_n, 128, stages, warps, 8, 1, False, True, 1))
    if m >= 256:
        for (block_m, block_n), stages, group in itertools.product(
            ((128, 256), (256, 128), (128, 128)), (3, 4), (4, 8, 16)
        ):
            warps = 8 if block_m * block_n >= 128 * 256 else 4
            found.append(GemmConfig(block_m, block_n, 128, stages, warps, group, 1, False, True, 1))
            if m <= 1024 and group == 8:
                found.append(GemmConfig(block_m, block_n, 128, stages, warps, group, 1, False, True, 2))
                found.append(GemmConfig(block_m, block_n, 128, stages, 8, group, 1, False, True, 1))
        # As deep as shared memory allows: the loads of a program's next tile bridge the epilogue of this one.
        found += [GemmConfig(128, 128, 128, 6, warps, 8, 1, False, True, 1) for warps in (4, 8)]
    if m >= 128:
        for block_m, block_n, stages, warps in (
            (64, 128, 4, 4), (128, 128, 3, 4), (128, 128, 3, 8), (128, 256, 2, 8), (256, 128, 2, 8), (64, 256, 2, 4)
        ):  # fmt: skip
            found += [GemmConfig(block_m, block_n, 256, stages, warps, 8, 1, False, True, p) for p in (0, 1)]
    return found


def _others(m: int, n: int, k: int, default_split: int) -> list[GemmConfig]:
    """Without bulk copies: pipelines of two stages, as 64 KiB of local memory allow on CDNA, and sums in parts, the
    default's number among them, where these come to no more than half of the weight's bytes. By reasoning; compiled for
    AMD, and never measured there."""
    found = []
    splits = sorted({1, 2, 4, 8, 16, default_split})
    block_ms = [max(16, 1 << (m - 1).bit_length())] if m <= 64 else [64, 128, 256]
    for block_m, block_n, block_k, warps in itertools.product(block_ms, (32, 64, 128, 256), (64, 128, 256), (4, 8)):
        if (block_m + block_n) * block_k * 2 > 64 * 1024 or block_m * block_n > 256 * 128:
            continue
        programs = -(-m // block_m) * -(-n // block_n)
        for split_k in splits:
            few = programs * split_k <= 2048 and split_k * 16 * m <= k
            if split_k == 1 or (k >= 2 * split_k * block_k and few):
                found.append(GemmConfig(block_m, block_n, block_k, 2, warps, 1 if m <= 64 else 8, split_k))
    return found


def weights(n: int, k: int) -> Weights:
    """Random codes and scales."""
    return [(random_codes((n, k)), torch.rand(n, 1, device="cuda") * 1e-3 + 1e-4) for _ in range(timing.copies(n * k))]


def random_codes(shape: tuple[int, ...]) -> torch.Tensor:
    """Random FP8 of the GPU's flavour."""
    # Bytes below 0x70 are numbers in both flavours.
    codes = torch.randint(0, 0x70, shape, dtype=torch.uint8, device="cuda")
    codes |= torch.randint(0, 2, shape, dtype=torch.uint8, device="cuda") << 7
    return codes.masked_fill_(codes == 0x80, 0).view(fp8.for_device(torch.device("cuda")).dtype)


class PtpcWorkload:
    """x [M, K] in FP8 and rotating weights."""

    def __init__(self, weights: Weights, m: int) -> None:
        n, k = weights[0][0].shape
        self._weights = weights
        self._device = torch.device("cuda", torch.cuda.current_device())
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self._x = fp8.quantize_rows(x, fp8.for_device(self._device))
        self._call = GemmCall(self._device, m, n, k, torch.bfloat16, None, ROW)

    def ours(self, config: Any) -> Calls:
        device = hardware.detect(self._device)
        product = kernels_of(device.arch).ptpc_gemm
        codes, scale = self._x
        return [partial(product, codes, scale, *w, None, torch.bfloat16, device, config) for w in self._weights]

    def peers(self) -> Mapping[str, Calls]:
        if _TORCH.refusal(self._call):
            return {}
        calls = [partial(_TORCH.run, *self._x, *w, None, torch.bfloat16) for w in self._weights]
        try:
            calls[0]()
        except RuntimeError as error:
            if not lacks_kernel(error):
                raise
            return {}
        return {"torch": calls}


def compile_one(config: Any) -> None:
    """Compiles for the cache on disk; raises for a configuration that does not fit."""
    fmt = fp8.for_device(torch.device("cuda"))
    weight = (torch.zeros(8192, 4096, device="cuda").to(fmt.dtype), torch.ones(8192, 1, device="cuda"))
    for m in _rows(config):
        PtpcWorkload([weight], m).ours(config)[0]()


def _rows(config: Any) -> tuple[int, ...]:
    """Numbers of rows for which a configuration's kernels are compiled separately."""
    if not hasattr(config, "block_m"):  # for few rows
        return 8, 16, 32, 64, 128
    # A short product and, of tiles that many rows have too, a long one: their launches differ, and the persistent and
    # the plain variant of a kernel are two.
    return (config.block_m, 4096) if config.block_m >= 64 else (config.block_m,)


def backend(m: int, us: Mapping[str, float]) -> str:
    """Who serves the shape."""
    margin = _MARGIN if m > _LONG else 1.0
    return "torch" if "torch" in us and us["torch"] < us["ours"] * margin else "triton"


TUNER = Tuner(
    "ptpc_gemm",
    (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    candidates,
    compile_one,
    weights,
    PtpcWorkload,
    backend,
)
