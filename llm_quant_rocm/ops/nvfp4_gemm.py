# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and NVFP4 weights."""

import logging
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from llm_quant_rocm import hardware, reference, tuning
from llm_quant_rocm.backends import Backend, Choice, choose
from llm_quant_rocm.formats import fp8, nvfp4
from llm_quant_rocm.ops._hipblaslt import lacks_kernel
from llm_quant_rocm.ops._register import register
from llm_quant_rocm.ops._row_call import HALF_OR_SINGLE, MAX_COLUMNS, rows_as, rows_of
from llm_quant_rocm.ops.nvfp4_weight import (
    MAX_RUNS,
    PreparedNvFp4Weight,
    check_weight,
    not_expanded,
    not_for_kernels,
    not_rows,
    rows_of_weight,
    runs_of,
)

logger = logging.getLogger("llm_quant_rocm")

NAME = "nvfp4_gemm"
# What was measured of prefill="fp8"; of its configurations `EXACT` stands for the 16-bit product as a backend.
FP8_NAME, EXACT = "nvfp4_gemm_fp8", "exact"
HALF = (torch.bfloat16, torch.float16)
PREFILLS = ("exact", "fp8")
# With prefill="fp8", calls of at most so many rows are decode: limited by reading the weight, and exact all the same.
DECODE_ROWS = 64
# Weights, by device, N and K, of which the vendor turned out to have no product in FP8: they are computed exactly.
_not_in_fp8: set[tuple[hardware.Hardware, int, int]] = set()
# On AMD, from so many rows of x on the weight is expanded to 16 bits and the vendor multiplies. Where a shape has been
# measured (`llm-quant-rocm tune nvfp4_gemm`), the winner counts instead.
#
# The number is derived, not measured: no AMD GPU was at hand. Expanding costs memory traffic, for every weight 4.5 bits
# read and 16 written, 2.56 bytes. It saves vector instructions: the kernel decodes every weight again for each 64 rows
# of x, with the instructions for 8 weights that tests/amd/operators counts, if matrix instructions hide none of them.
# By the rates of the data sheets:
#
#               TB/s   units x GHz   instructions (bf16)   rows at which cost and saving are equal
#     gfx90a    1.6    104 x 1.7     20                    464
#     gfx942    5.3    304 x 2.1     16.5                  613
#     gfx950    8.0    256 x 2.4     12.25                 526
#
# With half of the decoding hidden they are twice as many, about a thousand. Expanding then costs about a third of the
# time that gfx942 needs at the least for the product itself (2 * 1024 operations a weight, 1307 TFLOP/s), and 8% of it
# at 4096 rows.
VENDOR_ROWS = 1024


class GemmCall(NamedTuple):
    """A call's facts that decide its backend.

    Attributes:
        fp8: whether the product is to be computed in FP8: prefill="fp8" and more than `DECODE_ROWS` rows.
        bias: the bias's dtype, or None.
        runs: how many runs of rows under one global scale the host knows of, 0 if it does not.
        captured: whether the call is being recorded in a CUDA graph.
        ck: whether torch is told to prefer CK, today, to the vendor's other libraries.
    """

    hardware: hardware.Hardware
    m: int
    n: int
    k: int
    dtype: torch.dtype
    layout: str
    fp8: bool
    batch_invariant: bool
    bias: torch.dtype | None = None
    runs: int = 0
    captured: bool = False
    ck: bool = False


def _reference(x: torch.Tensor, weight: PreparedNvFp4Weight, bias: torch.Tensor | None, call: GemmCall) -> torch.Tensor:
    rows = rows_of_weight(weight)
    if call.fp8:
        return reference.nvfp4_gemm_fp8(x, rows, bias, x.dtype, fp8.of_dtype(call.hardware.fp8_dtype))
    return reference.nvfp4_gemm(x, rows, bias, x.dtype, call.batch_invariant)


@cache
def kernels_of(arch: str) -> ModuleType:
    """The NVFP4 kernels of an architecture; importing them imports Triton."""
    if arch == "sm_90":
        from llm_quant_rocm.kernels import nvfp4_hopper

        return nvfp4_hopper
    from llm_quant_rocm.kernels import nvfp4_cdna

    return nvfp4_cdna


def _in_fp8(call: GemmCall) -> bool:
    """Whether the kernels compute the call in FP8. Without FP8 units, or where the exact product is faster, that would
    save nothing."""
    if not call.fp8 or not call.hardware.fp8_units or call.k > MAX_COLUMNS:
        return False
    if (call.hardware, call.n, call.k) in _not_in_fp8:
        return False
    if not kernels_of(call.hardware.arch).serves_fp8(call.dtype, call.bias, call.n):
        return False
    return _fp8_config(call.hardware, call.m, call.n, call.k) is not None


@lru_cache(tuning.KEPT)
def _fp8_config(device: hardware.Hardware, m: int, n: int, k: int) -> Any:
    """How to compute in FP8; None where the exact product is faster."""
    kernels, measured = kernels_of(device.arch), tuning.lookup_product(FP8_NAME, device.arch, m, n, k)
    # Not as far as tuning.FARTHEST, within which a configuration serves other weights too: here a measurement says
    # whether FP8 pays at all, and where it does not, it costs more than tiles that fit badly.
    if measured is None or measured.weight != (n, k) or measured.m >= 2 * m:
        return kernels.default_fp8_config(m, n, k, device)
    if measured.backend == EXACT:
        return None
    return tuning.configured(FP8_NAME, device.arch, measured, kernels.fp8_config_of)


def _run_triton(
    x: torch.Tensor, weight: PreparedNvFp4Weight, bias: torch.Tensor | None, call: GemmCall
) -> torch.Tensor:
    kernels = kernels_of(call.hardware.arch)
    tensors = (weight.codes, weight.scales, weight.global_scale)
    if _in_fp8(call):
        config = _fp8_config(call.hardware, call.m, call.n, call.k)
        try:
            return kernels.gemm_fp8(x, *tensors, bias, call.n, call.hardware, config)
        except RuntimeError as error:
            if not lacks_kernel(error):
                raise
            logger.warning("%s: %d x %d stays exact, as FP8 fails here: %s", NAME, call.n, call.k, error)
        _not_in_fp8.add((call.hardware, call.n, call.k))
        _choose.cache_clear()
        return _choose(call).backend.run(x, weight, bias, call)
    config = _config(call.hardware, call.m, call.n, call.k, call.batch_invariant)
    return kernels.gemm(x, *tensors, bias, call.n, call.hardware, config)


@lru_cache(tuning.KEPT)
def _config(device: hardware.Hardware, m: int, n: int, k: int, batch_invariant: bool = False) -> Any:
    kernels, measured = kernels_of(device.arch), tuning.lookup_product(NAME, device.arch, m, n, k)
    if measured is None:
        config = kernels.default_config(m, n, k, device)
    else:
        config = tuning.configured(NAME, device.arch, measured, kernels.config_of)
    return kernels.batch_invariant(config) if batch_invariant else config


def _torch_refusal(call: GemmCall) -> str | None:
    if reason := not_expanded(call.hardware.arch, call.layout):
        return reason
    if call.batch_invariant:
        return "the vendor's product may add up a row differently when other rows are beside it"
    if _in_fp8(call):
        return "prefill='fp8' is another product"
    if call.bias not in (None, call.dtype):
        return f"its bias is of x's dtype, {call.dtype}, not {call.bias}"
    if not call.runs:
        return f"it takes up to {MAX_RUNS} runs of rows under one global scale, which `runs` on the CPU tells"
    if call.captured:
        return "the CUDA graph would keep today's global scales when weights are loaded anew"
    if call.ck:
        return "torch is told to prefer CK, which rounds before it scales"
    return None


def _run_torch(x: torch.Tensor, weight: PreparedNvFp4Weight, bias: torch.Tensor | None, call: GemmCall) -> torch.Tensor:
    kernels = kernels_of(call.hardware.arch)
    return kernels.gemm_expanded(x, weight.codes, weight.scales, runs_of(weight), bias, call.n, call.hardware)


# A backend runs (x [M, K], weight, bias or None, call) -> [M, N] in x's dtype, with nothing of size 0.
BACKENDS = (
    Backend("triton", lambda call: not_for_kernels(call.hardware.arch, call.layout), _run_triton),
    Backend("torch", _torch_refusal, _run_torch),
    Backend("reference", lambda call: not_rows(call.layout), _reference),
)


@lru_cache(tuning.KEPT)
def _choose(call: GemmCall) -> Choice:
    measured = tuning.lookup_product(NAME, call.hardware.arch, call.m, call.n, call.k)
    usual = "torch" if call.m >= VENDOR_ROWS and not not_expanded(call.hardware.arch, call.layout) else None
    return choose(NAME, BACKENDS, call, measured.backend if measured else usual)


def _validate(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    n: int,
    k: int,
    prefill: str,
    batch_invariant: bool,
    runs: torch.Tensor | None = None,
) -> None:
    if x.dtype not in HALF:
        raise TypeError(f"{NAME}: x is {x.dtype}, not bf16 or fp16")
    check_weight(NAME, "weight", PreparedNvFp4Weight(codes, scales, global_scale, layout, n, k, runs), ())
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(
            f"{NAME}: x {tuple(x.shape)} and the weight [{n}, {k}] do not fit: [..., K] and [N, K] are needed"
        )
    if bias is not None and (bias.shape != (n,) or bias.dtype not in HALF_OR_SINGLE):
        raise ValueError(
            f"{NAME}: bias must be bf16, fp16 or fp32 of shape ({n},), not {bias.dtype} of shape {tuple(bias.shape)}"
        )
    for label, tensor in (("weight", codes), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{NAME}: {label} is on {tensor.device}, x on {x.device}; move them to one device")
    if prefill not in PREFILLS:
        raise ValueError(f"{NAME}: prefill {prefill!r} is not one of {', '.join(PREFILLS)}")
    if batch_invariant and prefill == "fp8":
        raise ValueError(
            f"{NAME}: with prefill='fp8' a row's result depends on the number of rows; use 'exact' to be invariant"
        )


def _implementation(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    n: int,
    k: int,
    prefill: str,
    batch_invariant: bool,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = rows_of(x)
    m = rows.shape[0]
    if not (m and n and k):
        out = x.new_zeros((*x.shape[:-1], n))
        return out if bias is None else out + bias.to(x.dtype)
    in_fp8 = prefill == "fp8" and m > DECODE_ROWS
    weight = PreparedNvFp4Weight(codes, scales, global_scale, layout, n, k, runs)
    call = GemmCall(
        hardware.detect(x.device), m, n, k, x.dtype, layout, in_fp8, batch_invariant,
        bias=None if bias is None else bias.dtype,
        runs=len(runs_of(weight)),
        captured=runs is not None and x.is_cuda and torch.cuda.is_current_stream_capturing(),
        ck=runs is not None and torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Ck,
    )  # fmt: skip
    bias = None if bias is None else bias.contiguous()
    return rows_as(x, _choose(call).backend.run(rows, weight, bias, call))


_operator = register(
    "nvfp4_gemm(Tensor x, Tensor codes, Tensor scales, Tensor global_scale, Tensor? bias, str layout, SymInt n, "
    "SymInt k, str prefill, bool batch_invariant, Tensor? runs=None) -> Tensor",
    _validate,
    _implementation,
    lambda x, codes, scales, global_scale, bias, layout, n, *rest: x.new_empty((*x.shape[:-1], n)),
)


def nvfp4_gemm(
    x: torch.Tensor,
    weight: PreparedNvFp4Weight | nvfp4.NvFp4Weight,
    bias: torch.Tensor | None = None,
    *,
    prefill: str = "exact",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """x . weight^T + bias [..., N], in x's dtype, with the weight decoded on the way.

    The codes times their block scales are exact in 16 bits; they are multiplied by x, added in fp32, multiplied by the
    row's global scale and added to the bias in fp32, and rounded once. On AMD, with many rows, the vendor's product
    does that with a weight that is expanded in memory (`VENDOR_ROWS`).

    Args:
        x: bf16 or fp16 [..., K], any strides, any number of rows, none included. K is a multiple of 16.
        weight: what `prepare_nvfp4_weight` made at load, [N, K]. An `NvFp4Weight` is read as it is, which kernels that
            want another layout refuse.
        bias: bf16, fp16 or fp32 [N].
        prefill: "exact", or "fp8" for FP8's speed in calls of more than `DECODE_ROWS` rows: the weight then becomes
            FP8 (`formats.nvfp4.to_fp8`), and x FP8 with a scale a token (formats/fp8.py); both keep 3 mantissa bits.
            Shapes that FP8 does not make faster are computed exactly all the same.
        batch_invariant: a row's bits do not depend on the rows beside it.

    Raises:
        TypeError: the dtype of x or of the weight.
        ValueError: shapes, devices, strides, the bias's dtype, an unknown layout or prefill, or prefill="fp8" with
            batch_invariant.
    """
    if isinstance(weight, nvfp4.NvFp4Weight):
        weight = PreparedNvFp4Weight.in_rows(weight)
    tensors = (weight.codes, weight.scales, weight.global_scale)
    return _operator(x, *tensors, bias, weight.layout, weight.n, weight.k, prefill, batch_invariant, weight.runs)
