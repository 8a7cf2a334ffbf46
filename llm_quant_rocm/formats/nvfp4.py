# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights: 4-bit E2M1 codes, one E4M3 scale for 16 codes, and one fp32 scale above them.

    value[n, k] = e2m1(code[n, k]) * e4m3(scale[n, k / 16]) * global[n]

A byte holds two codes, the even k in its low nibble. A code is sign << 3 | index into 0, 0.5, 1, 1.5, 2, 3, 4, 6. The
product e2m1 * e4m3 has at most 6 significant bits between 2^-10 and 2688, so bf16 and fp16 hold it exactly.

Checkpoints come in two conventions. ModelOpt stores the global scale to multiply by (`weight_scale_2` = amax / 2688),
compressed-tensors the one to divide by (`weight_global_scale` = 2688 / amax); 2688 = 6 * 448. Here it is always a
multiplier, one for every row, so layers fused from shards with global scales of their own (q, k, v; gate, up) stay
exact. Upstream takes the largest of the shards' scales for all of them, which is wrong for the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from llm_quant_rocm.formats import fp8

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
RANGE = E2M1_MAX * E4M3_MAX  # 2688: the largest value under a global scale of 1

# Weights are encoded and decoded this many elements at a time: fp32 temporaries of 4 MiB however large the weight.
_CHUNK_ELEMENTS = 1024 * 1024
# The scale that compressed-tensors gives a block whose own scale rounds to zero; all its codes are then zero.
_ZERO_BLOCK_SCALE = 0.125
# `quantize(search=True)` tries the E4M3 numbers so many steps from the scale that maps a block's largest value to 6:
# from 3/4 of it to 3/2, where the largest value becomes 4. Wider ranges left less than 1% of the error to gain.
_SEARCH = (-2, -1, 1, 2, 3, 4, 5)
# Global scales in this range have reciprocals in it: neither convention overflows or loses bits to denormals.
_GLOBAL_MIN, _GLOBAL_MAX = 1e-37, 1e37


def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 (uint8) of x (fp32), rounded to nearest, ties to even, saturating at 6. The sign of zero is kept.

    E2M1 has no NaN: it becomes 6, like infinity.
    """
    size = x.abs().clamp(max=E2M1_MAX).nan_to_num(nan=E2M1_MAX)
    # Steps of 0.5 below 2, of 1 below 4, of 2 above. torch.round takes ties to even, and even multiples are even codes.
    index = torch.where(size < 2, (size * 2).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    return index.to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """Values, fp32, of codes 0 to 15 (uint8)."""
    index = (codes & 7).float()
    size = torch.where(index < 4, index / 2, torch.where(index < 6, index - 2, index * 2 - 8))
    return torch.where(codes < 8, size, -size)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K/2] of codes [..., K], the even k in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Codes [..., K] of bytes [..., K/2]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def block_values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e2m1 * e4m3 [..., K], in fp32 and exact, of bytes [..., K/2] and block scales [..., K/16].

    Also exact in bf16 and fp16. Its temporaries are several times as large as its result: call it on a slice of rows.
    """
    blocks = e2m1_decode(unpack(packed)).view(*scales.shape, BLOCK) * scales.float().unsqueeze(-1)
    return blocks.flatten(-2)


@dataclass(frozen=True, eq=False)
class NvFp4Weight:
    """A weight [..., N, K]; leading dimensions are experts.

    Attributes:
        codes: uint8 [..., N, K/2], the even k in the low nibble.
        scales: float8_e4m3fn [..., N, K/16], neither negative nor NaN.
        global_scale: fp32 [..., N], a multiplier for every row.

    The constructor checks shapes, dtypes and devices only. `from_modelopt` and `from_compressed_tensors` check the
    values too.

    Raises:
        TypeError: a dtype.
        ValueError: shapes or devices that do not fit, or a K that is no multiple of 16.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor

    def __post_init__(self) -> None:
        _check_codes(self.codes, self.scales, "codes", "scales")
        if self.global_scale.dtype != torch.float32:
            raise TypeError(f"global_scale is {self.global_scale.dtype}; it must be fp32")
        if self.global_scale.shape != self.codes.shape[:-1]:
            raise ValueError(
                f"global_scale has shape {tuple(self.global_scale.shape)}; codes {tuple(self.codes.shape)} need one "
                f"value a row, {tuple(self.codes.shape[:-1])}"
            )
        if self.global_scale.device != self.codes.device:
            raise ValueError(
                f"global_scale is on {self.global_scale.device}, codes on {self.codes.device}; move them to one device"
            )

    @property
    def n(self) -> int:
        """Rows: output features."""
        return self.codes.shape[-2]

    @property
    def k(self) -> int:
        """Columns: input features."""
        return self.codes.shape[-1] * 2

    @classmethod
    def from_modelopt(
        cls,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        weight_scale_2: torch.Tensor,
        shards: Sequence[int] | None = None,
        name: str = "weight",
    ) -> Self:
        """The weight that ModelOpt's three tensors hold.

        Args:
            weight: uint8 [..., N, K/2].
            weight_scale: float8_e4m3fn [..., N, K/16], in rows; not swizzled.
            weight_scale_2: what to multiply by: one value, one for each leading index, for each of the `shards`
                [..., len(shards)], or for each row [..., N].
            shards: how many rows each shard of a fused layer has.
            name: the checkpoint's name of `weight`, for messages; the others are called NAME_scale and NAME_scale_2.

        Raises:
            TypeError: a dtype.
            ValueError: shapes that do not fit; K no multiple of 16; a negative or NaN block scale; a missing, zero,
                negative, infinite or NaN global scale. The message names the tensor and the cure.
        """
        scale_name, global_name = f"{name}_scale", f"{name}_scale_2"
        _require({name: weight, scale_name: weight_scale, global_name: weight_scale_2})
        _check_codes(weight, weight_scale, name, scale_name)
        scales = _positive_scales(weight_scale, scale_name)
        return cls(weight, scales, _row_scales(weight_scale_2, weight.shape[:-1], shards, global_name))

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: torch.Tensor,
        weight_scale: torch.Tensor,
        weight_global_scale: torch.Tensor,
        shards: Sequence[int] | None = None,
        name: str = "weight",
    ) -> Self:
        """The weight that compressed-tensors' three tensors (`nvfp4-pack-quantized`) hold.

        As `from_modelopt`, but `weight_global_scale` is what to divide by. `name` is the checkpoint's name of the
        weight; the tensors are called NAME_packed, NAME_scale and NAME_global_scale.
        """
        packed_name, scale_name, global_name = f"{name}_packed", f"{name}_scale", f"{name}_global_scale"
        _require({packed_name: weight_packed, scale_name: weight_scale, global_name: weight_global_scale})
        _check_codes(weight_packed, weight_scale, packed_name, scale_name)
        scales = _positive_scales(weight_scale, scale_name)
        divisor = _row_scales(weight_global_scale, weight_packed.shape[:-1], shards, global_name)
        return cls(weight_packed, scales, divisor.reciprocal())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values [..., N, K]: e2m1 * e4m3, exact, times the global scale in fp32, rounded once to `dtype`."""
        out = torch.empty((*self.codes.shape[:-1], self.k), dtype=dtype, device=self.codes.device)
        rows = out.view(prod(out.shape[:-1]), self.k)
        for chunk, values in self.chunks():
            rows[chunk] = values
        return out

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """(rows, their fp32 values [rows, K]) slice by slice, all leading dimensions flattened into the rows."""
        count = prod(self.codes.shape[:-1])
        codes = self.codes.reshape(count, self.k // 2)
        scales, global_scale = self.scales.reshape(count, self.k // BLOCK), self.global_scale.reshape(count, 1)
        for chunk in row_slices(count, self.k):
            yield chunk, block_values(codes[chunk], scales[chunk]) * global_scale[chunk]


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover `rows` rows, of about a million elements each."""
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def amax_of(w: torch.Tensor, name: str = "weight") -> torch.Tensor:
    """The largest magnitude in each matrix of w [..., N, K], fp32 [...].

    Raises:
        ValueError: w holds NaN or infinity.
    """
    amax = fp8.row_amax(w).flatten(-2).amax(-1) if w.numel() else w.new_zeros(w.shape[:-2], dtype=torch.float32)
    if not bool(amax.isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinity, which NVFP4 cannot: mend the checkpoint, or keep this layer")
    return amax


def global_scale_of(amax: torch.Tensor) -> torch.Tensor:
    """The global scale, a multiplier, of matrices with `amax_of` amax: amax / 2688, fp32 of amax's shape.

    That of the largest amax of several shards serves them all. Of their scales the largest may not: an all-zero shard
    has 1.
    """
    return _divisor(amax).reciprocal()


@torch.no_grad()  # of a parameter, scales would have one
def quantize(
    w: torch.Tensor, global_scale: torch.Tensor | None = None, name: str = "weight", *, search: bool = False
) -> NvFp4Weight:
    """NVFP4 of w [..., N, K] (bf16, fp16 or fp32), the bytes that compressed-tensors makes of it in fp32:

        divisor = 2688 / amax of the matrix                            1 where that is above 1e37: an all-zero matrix
        scale   = e4m3(divisor * (amax of 16 / 6))                     0.125 where that is 0: all its codes are 0
        code    = e2m1(value / (scale / divisor))                      ties to even

    Each matrix [N, K] of the leading dimensions has a global scale of its own. `global_scale` takes its place: fp32, a
    multiplier, one value or one for each matrix or row (`global_scale_of` for shards that are to share one). fp32
    temporaries stay small however large w is. With `search` a block's scale is, of that one and its neighbours in E4M3,
    the one that leaves the least squared error: any reader of NVFP4 reads it, and eight times the work makes it.

    Raises:
        TypeError: w's dtype.
        ValueError: K is no multiple of 16, w holds NaN or infinity, or a global scale is not positive and finite.
    """
    if w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"{name} is {w.dtype}; NVFP4 is made of bf16, fp16 or fp32 weights")
    if w.dim() < 2:
        raise ValueError(f"{name} has shape {tuple(w.shape)}; a weight is [..., N, K]")
    *rows_shape, k = w.shape
    _check_columns(k, name)
    divisor = _divisor(amax_of(w, name)).unsqueeze(-1).expand(rows_shape)
    if global_scale is None:
        multiplier = divisor.reciprocal()
    else:
        multiplier = _row_scales(global_scale, rows_shape, None, f"the global scale of {name}")
        divisor = multiplier.reciprocal()
    count = prod(rows_shape)
    rows, row_divisor = w.reshape(count, k), divisor.reshape(count, 1)
    # A tensor: a GPU would multiply by a Python number's reciprocal, and round otherwise.
    largest_code = torch.full((), E2M1_MAX, dtype=torch.float32, device=w.device)
    codes = torch.empty((count, k // 2), dtype=torch.uint8, device=w.device)
    scales = torch.empty((count, k // BLOCK), dtype=torch.float8_e4m3fn, device=w.device)
    for chunk in row_slices(count, k):
        blocks = rows[chunk].float().unflatten(-1, (k // BLOCK, BLOCK))
        scale = row_divisor[chunk] * (blocks.abs().amax(-1) / largest_code)
        scale = scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
        scale = torch.where(scale == 0, _ZERO_BLOCK_SCALE, scale)
        if search:
            scale = _best_scales(blocks, scale, row_divisor[chunk])
        quotient = blocks / (scale / row_divisor[chunk]).unsqueeze(-1)
        # Adding 0 turns -0 into 0, as compressed-tensors does; a negative value that rounds to zero keeps its sign.
        codes[chunk] = pack(e2m1_encode(quotient + 0.0).flatten(-2))
        scales[chunk] = scale.to(torch.float8_e4m3fn)
    return NvFp4Weight(codes.view(*rows_shape, k // 2), scales.view(*rows_shape, k // BLOCK), multiplier.contiguous())


def quantize_activation(x: torch.Tensor, input_global: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as hardware with NVFP4 units wants it: bytes [..., K/2] and block scales, float8_e4m3fn [..., K/16].

        SF   = e4m3(input_global * (amax of 16 / 6)), at most 448, never -0
        code = e2m1(x * (input_global / SF))                                 +-0 where SF is 0

    `input_global` is one fp32 value, the ENCODING scale 2688 / amax: compressed-tensors' `input_global_scale` as it
    is, ModelOpt's `input_scale` inverted. Under a negative one block scales are negative. A NaN makes the scale of its
    block NaN, and all its codes 6.

    Raises:
        ValueError: K is no multiple of 16.
    """
    _check_columns(x.shape[-1], "x")
    blocks = x.float().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    # Division by a Python number becomes a multiplication by its reciprocal on some devices; by a tensor it does not.
    largest_code = torch.full((), E2M1_MAX, dtype=torch.float32, device=x.device)
    scale = (input_global * (blocks.abs().amax(-1, keepdim=True) / largest_code)).clamp(-E4M3_MAX, E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float() + 0.0
    scales = scale.to(torch.float8_e4m3fn)
    encode = torch.where(scale == 0, 0.0, input_global / scale)
    codes = torch.where(scale.isnan(), 7, e2m1_encode(blocks * encode))
    return pack(codes.flatten(-2)), scales.squeeze(-1)


def fake_quantize_activation(x: torch.Tensor, input_global: torch.Tensor) -> torch.Tensor:
    """x [..., K] as hardware with NVFP4 units would see it: `quantize_activation` and back, in x's dtype.

        value = e2m1(code) * (SF / input_global)

    A NaN makes its block NaN.

    Raises:
        ValueError: K is no multiple of 16.
    """
    codes, scales = quantize_activation(x, input_global)
    blocks = e2m1_decode(unpack(codes)).view(*scales.shape, BLOCK)
    return (blocks * (scales.float() / input_global).unsqueeze(-1)).flatten(-2).to(x.dtype)


def to_fp8(weight: NvFp4Weight, fmt: fp8.Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` as PTPC FP8: codes [..., N, K] and fp32 scales [..., N, 1].

        code  = e4m3(e2m1 * block scale / (2688 / FP8_MAX))         rounded once, to 4 significant bits
        scale = global scale * (2688 / FP8_MAX)                     times 6 for OCP, 12 for FNUZ

    The factor is the one that 2688 wants, whatever a row holds. Under it the codes 1.5, 3 and 6 stay exact, because
    they are a power of two times 6, and most of a block's magnitude is in them: the error is half of what it is under
    a scale from the row's largest magnitude. Products below 6 * 2^-6 become denormal and may be rounded: of these codes
    some under block scales below 2^-4.
    """
    factor = RANGE / fmt.max
    count = prod(weight.codes.shape[:-1])
    block_codes = weight.codes.reshape(count, weight.k // 2)
    block_scales = weight.scales.reshape(count, weight.k // BLOCK)
    codes = torch.empty((count, weight.k), dtype=fmt.dtype, device=weight.codes.device)
    for chunk in row_slices(count, weight.k):
        codes[chunk] = (block_values(block_codes[chunk], block_scales[chunk]) / factor).to(fmt.dtype)
    return codes.view(*weight.codes.shape[:-1], weight.k), (weight.global_scale * factor).unsqueeze(-1)


def _best_scales(blocks: torch.Tensor, scale: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """The scales [R, B] near `scale` (E4M3's numbers, in fp32) that leave the least squared error in blocks
    [R, B, 16]; of equals the one that was given."""

    def error(candidate: torch.Tensor) -> torch.Tensor:
        unit = (candidate / divisor).unsqueeze(-1)
        return (e2m1_decode(e2m1_encode(blocks / unit)) * unit - blocks).square().sum(-1)

    given = scale.to(torch.float8_e4m3fn).view(torch.uint8).int()
    best, least = scale, error(scale)
    for step in _SEARCH:
        candidate = (given + step).clamp(1, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn).float()
        found = error(candidate)
        best, least = torch.where(found < least, candidate, best), torch.minimum(found, least)
    return best


def _divisor(amax: torch.Tensor) -> torch.Tensor:
    """2688 / amax, fp32 of amax's shape."""
    divisor = RANGE / amax
    return torch.where(divisor <= _GLOBAL_MAX, divisor, 1.0)


def _require(tensors: dict[str, torch.Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            raise ValueError(f"{name} is missing: an NVFP4 weight is codes, block scales and a global scale")


def _check_columns(k: int, name: str) -> None:
    if k % BLOCK:
        raise ValueError(
            f"{name} has {k} columns, no multiple of {BLOCK}: NVFP4 scales blocks of {BLOCK}; keep this layer in 16 "
            "bits, or shard it over fewer ranks"
        )


def _check_codes(codes: torch.Tensor, scales: torch.Tensor, codes_name: str, scales_name: str) -> None:
    """Raises unless codes and scales are the two parts of one weight [..., N, K]."""
    if codes.dtype != torch.uint8:
        raise TypeError(f"{codes_name} is {codes.dtype}; NVFP4 codes are uint8, two in a byte")
    if scales.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{scales_name} is {scales.dtype}; the block scales of NVFP4 are float8_e4m3fn")
    if codes.dim() < 2:
        raise ValueError(f"{codes_name} has shape {tuple(codes.shape)}; it must be [..., N, K/2]")
    _check_columns(codes.shape[-1] * 2, codes_name)
    expected = (*codes.shape[:-1], codes.shape[-1] * 2 // BLOCK)
    if scales.shape != expected:
        raise ValueError(
            f"{scales_name} has shape {tuple(scales.shape)}; {codes_name} {tuple(codes.shape)} needs {expected}, one "
            f"scale for {BLOCK} codes, in rows (neither padded nor swizzled)"
        )
    if scales.device != codes.device:
        raise ValueError(
            f"{scales_name} is on {scales.device}, {codes_name} on {codes.device}; move them to one device"
        )


def _positive_scales(scales: torch.Tensor, name: str) -> torch.Tensor:
    """The scales with -0 as 0; raises where one is negative or NaN."""
    raw = scales.view(torch.uint8)
    if not raw.numel() or int(raw.max()) <= 0x7E:
        return scales
    nan = int(((raw & 0x7F) == 0x7F).sum())
    negative = int((scales.float() < 0).sum())
    for count, what in ((nan, "NaN"), (negative, "negative")):
        if count:
            raise ValueError(
                f"{name} holds {count} {what} block scales of {raw.numel()}: the checkpoint is broken, or its scales "
                "are not E4M3; download or quantize it again"
            )
    return raw.masked_fill(raw == 0x80, 0).view(torch.float8_e4m3fn)


def _row_scales(scale: torch.Tensor, rows: Sequence[int], shards: Sequence[int] | None, name: str) -> torch.Tensor:
    """One fp32 global scale for every row [..., N] of what a checkpoint or a caller gives; raises on broken values."""
    if not scale.is_floating_point():
        raise TypeError(f"{name} is {scale.dtype}; a global scale is fp32")
    scale = scale.float()
    wrong = ~((scale >= _GLOBAL_MIN) & (scale <= _GLOBAL_MAX))
    if bool(wrong.any()):
        raise ValueError(
            f"{name} is {scale[wrong].flatten()[0].item():g}; a global scale is positive and finite "
            f"({_GLOBAL_MIN:g} to {_GLOBAL_MAX:g}): the checkpoint lacks it or is broken; download or quantize it again"
        )
    *leading, n = rows
    if shards is not None and sum(shards) != n:
        raise ValueError(f"{name}: the shards {list(shards)} have {sum(shards)} rows, the weight has {n}")
    if scale.numel() == 1:
        return scale.reshape(()).repeat(*rows)
    if shards is not None and scale.shape == (*leading, len(shards)):
        return scale.repeat_interleave(torch.tensor(list(shards), dtype=torch.int64, device=scale.device), dim=-1)
    if scale.shape == tuple(leading):
        return scale.unsqueeze(-1).repeat(*[1] * len(leading), n)
    if scale.shape == (*leading, 1):
        return scale.repeat(*[1] * len(leading), n)
    if scale.shape == tuple(rows):
        return scale
    raise ValueError(
        f"{name} has shape {tuple(scale.shape)}, which fits no weight with rows {tuple(rows)}: give one value, one a "
        "row, or one a shard together with shards=[rows of each]"
    )
