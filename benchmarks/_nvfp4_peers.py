# SPDX-License-Identifier: Apache-2.0
"""What the NVFP4 GEMM is compared with: two CUDA libraries that multiply the same weights.

A peer is made once a run; `prepare` arranges one weight for it, and gives what multiplies x [M, K] by it. Marlin comes
from vLLM's operator library alone (vLLM itself is not imported), Humming from its Python package.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks._harness import vllm_library
from llm_quant_rocm.formats.nvfp4 import BLOCK, E4M3_MAX, NvFp4Weight

Product = Callable[[torch.Tensor], torch.Tensor]

# vLLM's name of the type E2M1: 2 exponent bits, 1 mantissa bit, a sign, finite values only, no NaN.
_E2M1_ID = 2 | 1 << 8 | 1 << 16 | 1 << 49
# What Marlin's decoding of bf16 leaves out: 2^126 between the exponents of E2M1 and bf16, and 2^7 of its block scales.
_MARLIN_GLOBAL = 2.0 ** (126 - 7)


class Marlin:
    """vLLM's Marlin, 16-bit activations and NVFP4 weights. `folder` holds `_C_stable_libtorch.abi3.so` at any depth."""

    def __init__(self, folder: Path) -> None:
        torch.ops.load_library(vllm_library(folder))
        count = torch.cuda.get_device_properties(0).multi_processor_count
        self.locks = torch.zeros(count, dtype=torch.int32, device="cuda")

    def prepare(self, weight: NvFp4Weight) -> Product:
        n, k = weight.n, weight.k
        words = weight.codes.view(torch.int32).t().contiguous()
        no_order = torch.empty(0, dtype=torch.int32, device="cuda")
        words = torch.ops._C.gptq_marlin_repack(words, no_order, k, n, 4, False)
        scales, factor = marlin_scales(weight.scales)
        global_scale = weight.global_scale[0] * (_MARLIN_GLOBAL / factor)

        def product(x: torch.Tensor) -> torch.Tensor:
            none = None
            return torch.ops._C.marlin_gemm(
                x, none, words, none, scales, none, global_scale, none, none, none, self.locks, _E2M1_ID,
                x.shape[0], n, k, True, False, True, False,
            )  # fmt: skip

        return product


def marlin_scales(scales: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Block scales e4m3 [N, K/16] as Marlin reads them, fp8 bytes [K/16, N], and the power of two they were given.

    A byte is the scale's exponent and mantissa without a sign (5 and 3 bits of its fp16); the scales are raised so that
    the largest is close to E4M3's. Columns come in groups of 64, transposed as 8 x 8, then in pairs.
    """
    factor = 2.0 ** (E4M3_MAX / scales.float().amax()).log2().floor().clamp(min=0).item()
    values = (scales.t().float() * factor * 2**7).to(torch.float16)
    values = torch.where(values < 2, 0, values)
    values = values.unflatten(-1, (-1, 8, 8)).transpose(-1, -2).reshape(-1, 2, 2).transpose(-1, -2)
    high_bytes = values.contiguous().view(torch.int16) >> 7
    return high_bytes.to(torch.uint8).view(torch.float8_e4m3fn).view(-1, scales.shape[0]), factor


class Humming:
    """`humming-kernels`, padded as vLLM pads for it, with the kernels that its own heuristics choose for `ms`.

    `folder` holds the unpacked wheel. It compiles with NVRTC and the CUDA headers of the machine (torch 2.11 and later
    need no C++ compiler), and asks for cuda-bindings, jinja2, filelock, numpy, safetensors, tabulate and tqdm.
    """

    def __init__(self, folder: Path, ms: Sequence[int]) -> None:
        sys.path.append(str(folder))
        import humming.layer  # noqa: F401  # fails here where something is missing

        self.ms = sorted(ms)

    def prepare(self, weight: NvFp4Weight) -> Product:
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        format = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        layer = HummingLayer(
            weight.n, weight.k, format, pad_n_to_multiple=256, pad_k_to_multiple=128, torch_dtype=torch.bfloat16
        ).cuda()
        tensors = {"weight": weight.codes, "weight_scale": weight.scales, "weight_scale_2": weight.global_scale[:1]}
        layer.load_from_tensors(tensors)
        layer.transform()
        bounds = zip([0, *self.ms], self.ms, strict=False)
        chosen = [[low, m, get_heuristics_config(layer.humming_config, shape_m=m)] for low, m in bounds]
        kernels = json.dumps(chosen)
        return lambda x: layer(x, tuning_config=kernels)


def reading_bytes(n: int, k: int, m: int) -> int:
    """The least traffic of a product: codes, block scales and global scales of the weight, and x and the result in 16
    bits, each once."""
    return n * k // 2 + n * k // BLOCK + 4 * n + 2 * m * (k + n)
