# SPDX-License-Identifier: Apache-2.0
"""The activation of a gated layer with per-token FP8 quantization of its result: one read of the row, one write of the
codes. Of a dense layer's rows, and of the slots of experts."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.hip import libdevice

from llm_quant_rocm.formats.fp8 import Fp8Format
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.fp8_row import (
    block_launch,
    larger,
    load_block,
    narrow,
    row_launch,
    store_quantized_row,
    widen,
)
from llm_quant_rocm.kernels.launch import launch
from llm_quant_rocm.kernels.pdl import pdl_option, programmatic_launch

# Of rows, at most, that run together: sixteen for each multiprocessor of an H100 or an MI300X.
PROGRAMS = 4096


@triton.jit
def _over_one_and_exp(x, z):
    """x / (1 + exp(z)). Triton's own exp and division take 17 instructions on CDNA GPUs: for subnormal results, which 1
    swallows here, and for the last bit of a quotient, whose exponential has an error as large."""
    if tl.target_info.is_hip():
        return libdevice.fast_dividef(x, 1.0 + libdevice.fast_expf(z))
    else:
        return x / (1.0 + tl.exp(z))


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """silu, gelu (with erf) or gelu_tanh of fp32 values."""
    if ACTIVATION == "silu":
        return _over_one_and_exp(gate, -gate)
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # x / 2 * (1 + tanh u) is x * sigmoid(2 u)
        return _over_one_and_exp(gate, -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


# The number of rows changes with every batch: specializing on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["slots"])
def act_and_mul_quant_kernel(
    h_ptr, q_ptr, scale_ptr, slot_row_ptr, slots,
    IN_TILES: tl.constexpr, ACTIVATION: tl.constexpr, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Codes and scale of T(activation(gate) * up) for each row h = [gate, up] of dtype T; of h itself without an
    ACTIVATION. With slot_row_ptr of the slots whose expert is here, at their numbers or IN_TILES of the schedule."""
    if PDL:
        programmatic_launch()
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    # Programs for all rows would take longer to launch, where they are short, than what they do.
    for number in range(tl.program_id(0), slots, tl.num_programs(0)):
        slot = tl.cast(number, tl.int64)
        # Dense rows are all here.
        tile_row = 0 if slot_row_ptr is None else tl.load(slot_row_ptr + slot).to(tl.int64)
        if tile_row >= 0:
            row = tile_row if IN_TILES else slot
            row_ptr = h_ptr + row * (COLUMNS if ACTIVATION is None else 2 * COLUMNS)
            largest = tl.zeros([BLOCK], tl.float32)
            rounded = tl.tuple([])
            for i in tl.static_range(BLOCKS):
                block = load_block(row_ptr, i, COLUMNS, BLOCK, "evict_first")
                value = widen(block)
                if ACTIVATION is not None:
                    up = widen(load_block(row_ptr + COLUMNS, i, COLUMNS, BLOCK, "evict_first"))
                    value = activate(value, ACTIVATION) * up
                    block = narrow(value, h_ptr.dtype.element_ty)
                largest = larger(largest, tl.abs(value))
                rounded += (block,)
            store_quantized_row(
                q_ptr + row * COLUMNS, scale_ptr + row, rounded, largest, FP8_MAX, MIN_SCALE, COLUMNS, BLOCK
            )  # fmt: skip


def act_and_mul_quant_fp8(
    h: torch.Tensor,
    activation: str | None,
    fmt: Fp8Format,
    hardware: Hardware,
    slot_row: torch.Tensor | None = None,
    *,
    in_tiles: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, I] and fp32 scales [rows, 1] of T(activation(gate) * up), h [rows, 2I] of dtype T, contiguous, being
    [gate, up]; of h [rows, I] itself without an activation. I <= per_token_quant.MAX_COLUMNS.

    With a schedule's slot_row, int32 [slots], rows are of slots, as `routing.sum_rows` takes them. Those of slots whose
    expert is not here are left as torch.empty makes them.
    """
    rows, inner = h.shape[0], h.shape[1] if activation is None else h.shape[1] // 2
    codes = torch.empty((rows, inner), dtype=fmt.dtype, device=h.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=h.device)
    slots = rows if slot_row is None else slot_row.numel()
    if slots:
        launch(
            act_and_mul_quant_kernel, (min(slots, PROGRAMS),),
            h, codes, scale, slot_row, slots, IN_TILES=in_tiles, **_constants(inner, activation, fmt, hardware),
        )  # fmt: skip
    return codes, scale


@cache
def _constants(columns: int, activation: str | None, fmt: Fp8Format, hardware: Hardware) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "ACTIVATION": activation,
        "FP8_MAX": fmt.max,
        "MIN_SCALE": fmt.min_scale,
        "COLUMNS": columns,
        "PDL": hardware.pdl,
        **(row_launch(columns, hardware) if activation is None else _gated_launch(columns, hardware)),
        **pdl_option(hardware),
    }


def _gated_launch(columns: int, hardware: Hardware) -> dict[str, int]:
    """What was fastest on an H100. Two values are read for one that stays, so that a thread takes fewer than of a plain
    row, and gets few registers: four programs of 8192 columns share a multiprocessor, or two of 24576. On CDNA GPUs 16
    waves of a program have 128 registers each, and wait for one block after the other; 8 of them ask for all at once.
    """
    cdna = hardware.lanes == 64
    threads = 128 if columns <= 5120 else 256 if columns <= 8192 else 512 if columns <= 24576 or cdna else 1024
    return block_launch(columns, threads, hardware, 64 if columns > 5120 else None)
