# SPDX-License-Identifier: Apache-2.0
"""E4M3 in its two flavours, with one scale a row (PTPC: per token for activations, per channel for weights).

    scale = max(amax / FP8_MAX, 1 / (FP8_MAX * 512))        fp32, one a row
    code  = RNE(clamp(value / scale, -FP8_MAX, FP8_MAX))    true division

These are the bytes of vLLM's `fp8_per_channel` and of llm-compressor's FP8_DYNAMIC recipe. NaN and inf are not
hidden: a row that holds one gets a NaN or inf scale. The floor of the scale keeps an all-zero row exact.

FP8_MAX of the FNUZ flavour is 224, although its largest code is 240: 2 * 224 = 448, so every code within the bound
is also an OCP code at half the scale. Checkpoints then convert between the flavours without rounding, and both
flavours spend the same resolution on a row.
"""

from dataclasses import dataclass
from math import prod

import torch

from llm_quant_rocm import hardware

# Rows are quantized this many elements at a time, in one buffer however large the weight: of 2 MiB, on a GPU of 12 MiB.
# Smaller ones would cost more there: vLLM has torch's allocator cut no piece of 20 MiB while weights load, and torch
# takes such a piece for any request of 1 to 10 MiB. Once that is freed, only a request for as much gets it again. On a
# CPU 12 MiB would only raise a load's peak.
_CHUNK_ELEMENTS = 512 * 1024
_CHUNK_ELEMENTS_ON_GPU = 3 * 1024 * 1024


@dataclass(frozen=True, eq=False)
class Fp8Format:
    """One flavour of E4M3: `OCP` or `FNUZ`, there are no others.

    Attributes:
        name: "ocp" (NVIDIA, gfx950) or "fnuz" (gfx942).
        dtype: torch's dtype of the codes.
        max: FP8_MAX, the largest magnitude that quantization produces.
    """

    name: str
    dtype: torch.dtype
    max: float

    @property
    def min_scale(self) -> float:
        """The smallest scale a row may have."""
        return 1.0 / (self.max * 512.0)


OCP = Fp8Format("ocp", torch.float8_e4m3fn, 448.0)
FNUZ = Fp8Format("fnuz", torch.float8_e4m3fnuz, 224.0)
_BY_DTYPE = {fmt.dtype: fmt for fmt in (OCP, FNUZ)}


def of_dtype(dtype: torch.dtype) -> Fp8Format:
    """The flavour whose codes have `dtype`; TypeError for any other dtype."""
    if dtype not in _BY_DTYPE:
        raise TypeError(f"{dtype} is not an E4M3 dtype: use float8_e4m3fn (OCP) or float8_e4m3fnuz (FNUZ)")
    return _BY_DTYPE[dtype]


def for_device(device: torch.device) -> Fp8Format:
    """The flavour that `device` computes in."""
    return of_dtype(hardware.detect(device).fp8_dtype)


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of every row, fp32 [..., 1] of x [..., K]; 0 where K is 0; NaN where the row holds one."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
    low, high = x.aminmax(dim=-1, keepdim=True)  # unlike abs().amax(), makes no copy of x
    return torch.maximum(low.abs(), high.abs()).float()


def scale_from_amax(amax: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Scales, fp32, of rows whose largest magnitudes are `amax`."""
    # Division by a Python number becomes a multiplication by its reciprocal on some devices; by a tensor it does not.
    # torch.full, unlike torch.tensor, copies nothing from the host: a CUDA graph can capture it.
    bound = torch.full((), fmt.max, dtype=torch.float32, device=amax.device)
    return (amax.float() / bound).clamp_min(fmt.min_scale)


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Codes of x [..., K] under fp32 scales that broadcast to it."""
    return _divide(x.to(torch.float32, copy=True), scale, fmt).to(fmt.dtype)


@torch.no_grad()  # of a parameter, a gradient would keep what is temporary
def quantize_rows(
    x: torch.Tensor, fmt: Fp8Format, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., K] and fp32 scales [..., 1] of x [..., K] (bf16, fp16 or fp32).

    `amax` [..., 1] takes the place of the rows' own largest magnitudes: the maximum over a tensor-parallel group
    makes the scales of a sharded weight those of the whole one. Temporaries stay small however large x is.
    """
    scale = scale_from_amax(row_amax(x) if amax is None else amax, fmt)
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    count, width = prod(x.shape[:-1]), x.shape[-1]
    rows, row_codes, row_scale = x.reshape(count, width), codes.view(count, width), scale.reshape(count, 1)
    chunk_elements = _CHUNK_ELEMENTS_ON_GPU if x.is_cuda else _CHUNK_ELEMENTS
    step = max(1, chunk_elements // max(1, width))
    buffer = torch.empty((step, width), dtype=torch.float32, device=x.device)
    for start in range(0, count, step):
        chunk = slice(start, start + step)
        row_codes[chunk] = _divide(buffer[: count - start].copy_(rows[chunk]), row_scale[chunk], fmt)
    return codes, scale


def _divide(values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """What is rounded to codes, in the place of `values`, fp32."""
    return values.div_(scale).clamp_(-fmt.max, fmt.max)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of `codes` under fp32 scales that broadcast to them, computed in fp32 and rounded once to `dtype`."""
    return (codes.float() * scale).to(dtype)


def ocp_to_fnuz(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values in FNUZ: the OCP bytes read as FNUZ are half as large, so the scale doubles.

    Byte 0x80 is -0 in OCP and NaN in FNUZ: it becomes 0. Bytes 0x7f and 0xff are NaN in OCP and numbers in FNUZ.

    Raises:
        TypeError: `codes` are not OCP.
        ValueError: `codes` hold a NaN.
    """
    if codes.dtype != OCP.dtype:
        raise TypeError(f"ocp_to_fnuz converts float8_e4m3fn codes, not {codes.dtype}")
    raw = codes.view(torch.uint8)
    if bool(((raw & 0x7F) == 0x7F).any()):
        raise ValueError("ocp_to_fnuz: the codes hold a NaN, which FNUZ would read as a number")
    return raw.masked_fill(raw == 0x80, 0).view(FNUZ.dtype), scale * 2
