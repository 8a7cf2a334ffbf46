# SPDX-License-Identifier: Apache-2.0
"""What the per-token quantization kernels share: a row in registers, in blocks, and its end as FP8 codes and a scale.

A row of COLUMNS values is a tuple of blocks of BLOCK values, each a tensor. Only a last block that COLUMNS does not
fill is masked, so that widths like 5120 or 28672 cost what they hold and not the next power of two. Between the passes
over a row its values stay in their 16 bits, which takes half the registers and lets two wide rows share a
multiprocessor.
"""

import triton
import triton.language as tl

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels.sizes import next_power_of_2


def row_launch(columns: int, hardware: Hardware, operands: int = 1) -> dict[str, int]:
    """`block_launch` of a row kernel that holds `operands` rows of `columns` values at once.

    A lane takes at most 128 values of all rows.
    """
    values = columns * operands
    threads = 128 if columns <= 8192 else 256 if values <= 32768 else 512 if values <= 65536 else 1024
    # Two programs fit into a multiprocessor, and one loads while the other computes. The compiler would take 255
    # registers. Of 1024 threads none has more than 64.
    return block_launch(columns, threads, hardware, min(128, 65536 // threads) if columns > 16384 else None)


def block_launch(columns: int, threads: int, hardware: Hardware, registers: int | None) -> dict[str, int]:
    """BLOCK and launch options of `threads` that take 8 values each of every block of a row.

    On NVIDIA's GPUs a thread has at most `registers`, or with None as many as the compiler likes. A compute unit of
    CDNA has four SIMDs, each of which issues its own waves alone: programs of fewer than four leave some idle.
    """
    if hardware.lanes == 64 and columns >= 2048:
        threads = max(threads, 256)
    options = {"BLOCK": min(threads * 8, next_power_of_2(max(columns, 16))), "num_warps": threads // hardware.lanes}
    if registers and hardware.arch.startswith("sm_"):
        options["maxnreg"] = registers
    return options


@triton.jit
def load_block(row_ptr, i: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr):
    """Block i of a row, zeros beyond the row."""
    column = i * BLOCK + tl.arange(0, BLOCK)
    if (i + 1) * BLOCK <= COLUMNS:
        return tl.load(row_ptr + column, eviction_policy=EVICTION)
    else:
        return tl.load(row_ptr + column, mask=column < COLUMNS, other=0.0, eviction_policy=EVICTION)


@triton.jit
def store_block(row_ptr, value, i: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores block i of a row."""
    column = i * BLOCK + tl.arange(0, BLOCK)
    if (i + 1) * BLOCK <= COLUMNS:
        tl.store(row_ptr + column, value)
    else:
        tl.store(row_ptr + column, value, mask=column < COLUMNS)


@triton.jit
def load_half_groups(
    row_ptr, i: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr
):  # fmt: skip
    """Eights of block i of 2 * BLOCK columns: the first (HALF 0) or second (HALF 1) eight of every sixteen."""
    place = tl.arange(0, BLOCK)
    column = i * (2 * BLOCK) + place // 8 * 16 + HALF * 8 + place % 8
    if (i + 1) * 2 * BLOCK <= COLUMNS:
        return tl.load(row_ptr + column, eviction_policy=EVICTION)
    else:
        return tl.load(row_ptr + column, mask=column < COLUMNS, other=0.0, eviction_policy=EVICTION)


@triton.jit
def widen(x):
    """x as fp32. Two bf16 of one register take two instructions; Triton's own conversion takes three."""
    if x.dtype == tl.bfloat16 and tl.target_info.is_cuda():
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 x rounded to `dtype`. Triton converts to bf16 one value at a time, on a pipe of a quarter of the rate.

    Where a kernel converts to FP8, Triton sets a mode of AMD's GPUs in which finite values do not become infinite in
    fp16, but its largest number; infinities stay. Hence they are made before.
    """
    if dtype == tl.bfloat16 and tl.target_info.is_cuda():
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif dtype == tl.float16 and tl.target_info.is_hip():
        return tl.where(tl.abs(x) >= 65520.0, x * float("inf"), x).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def larger(a, b):
    """Elementwise maximum of fp32 magnitudes; unlike tl.max and tl.maximum's default, keeps a NaN.

    Of AMD's GPUs only gfx950 has an instruction for that, and others take three. But the bits of magnitudes are in
    order as integers, those of NaN above all.
    """
    if tl.target_info.is_hip() and not tl.target_info.is_hip_cdna4():
        bits = tl.maximum(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True))
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(magnitudes, axis: tl.constexpr):
    """The largest along an axis of fp32 magnitudes, by `larger`. Integers pass between an AMD GPU's lanes without the
    LDS."""
    if tl.target_info.is_hip() and not tl.target_info.is_hip_cdna4():
        return tl.max(magnitudes.to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(magnitudes, axis, larger)


@triton.jit
def store_quantized_row(
    q_ptr, scale_ptr, row, largest, FP8_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, INTERLEAVE: tl.constexpr = False
):  # fmt: skip
    """Codes and scale of `row`, a tuple of blocks, zeros beyond the row.

    With INTERLEAVE the blocks are pairs of `load_half_groups`, COLUMNS is a multiple of 64, and of every 64 columns
    those first stored are 0, 8, 1 and 9 of each sixteen, then 2, 10, 3 and 11, and so on.

    `largest` [BLOCK] fp32 is the elementwise maximum of the blocks' magnitudes, taken before or after they were rounded
    to their dtype: rounding is monotonic, so the maximum of the rounded values is the rounded maximum.

    The quotients are correctly rounded, as the reference's are, at three instructions each instead of a division's
    ten: with r the correctly rounded reciprocal of the scale, q = x * r is within a unit of the quotient, and one
    step with the exact remainder rounds it correctly (Markstein, IBM J. Res. Dev. 34(1), 1990). The remainder is
    taken as q * scale - x and subtracted, because x - q * scale would turn a quotient of -0 into 0.

    Nothing is clamped: amax / scale exceeds FP8_MAX by a rounding error at most, and casts to FP8_MAX.
    """
    amax = largest_of(largest, 0)
    if len(row) > 0:
        dtype: tl.constexpr = row[0].dtype
        # To fp16 by `narrow`, as the row was: AMD's own conversion stops at 65504 here, and a row with inf would have a
        # finite scale. bf16 knows no such mode, and `narrow` converts it by pairs on NVIDIA.
        amax = (narrow(amax, dtype) if dtype == tl.float16 else amax.to(dtype)).to(tl.float32)
    scale = tl.math.div_rn(amax, FP8_MAX)
    scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)  # false for NaN, which stays
    reciprocal = tl.math.div_rn(1.0, scale)
    # A scale of inf has quotients of 0, and NaN for inf: x * reciprocal is right, and the remainder must not undo it.
    divisor = tl.where(scale == float("inf"), 0.0, scale)
    if INTERLEAVE:
        for i in tl.static_range(len(row) // 2):
            first = quotients(row[2 * i], divisor, reciprocal)
            second = quotients(row[2 * i + 1], divisor, reciprocal)
            both = tl.join(first, second).to(q_ptr.dtype.element_ty).reshape(BLOCK // 32, 4, 4, 4)
            both = both.permute(0, 2, 1, 3).reshape(2 * BLOCK)
            store_block(q_ptr, both, i, COLUMNS, 2 * BLOCK)
    else:
        for i in tl.static_range(len(row)):
            quotient = quotients(row[i], divisor, reciprocal)
            store_block(q_ptr, quotient.to(q_ptr.dtype.element_ty), i, COLUMNS, BLOCK)
    tl.store(scale_ptr, scale)


@triton.jit
def quotients(x, divisor, reciprocal):
    """x / divisor, correctly rounded, with the correctly rounded reciprocal (`store_quantized_row`)."""
    x = widen(x)
    quotient = x * reciprocal
    # x * -1.0 is a sign in the fma; Triton 3.6's -x is 0 - x, an instruction, and of a reciprocal of 0, that of a scale
    # of inf, it has the wrong sign: it would make a quotient of -0 a 0.
    return tl.fma(tl.fma(quotient, divisor, x * -1.0), reciprocal * -1.0, quotient)
