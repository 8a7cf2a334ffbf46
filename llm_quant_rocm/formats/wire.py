# SPDX-License-Identifier: Apache-2.0
"""What a quantized all-reduce sends: groups of 32 neighbouring values, a code each and one scale.

| codec | code                          | limit | planes | bytes a group | bits a value | largest error / amax       |
|-------|-------------------------------|-------|--------|---------------|--------------|----------------------------|
| FP    | the value itself              |       |        | 64            | 16           | 0                          |
| INT8  | integer -128 to 127, plus 128 | 128   | 8      | 34            | 8.5          | 1/256, clipped 1/128       |
| FP8   | E4M3 (OCP), no -0             | 256   | 8      | 34            | 8.5          | 1/32; 1/16 of the value    |
| INT6  | integer -32 to 31, plus 32    | 32    | 4, 2   | 26            | 6.5          | 1/64, clipped 1/32         |
| INT4  | integer -8 to 7, plus 8       | 8     | 4      | 18            | 4.5          | 1/16, clipped 1/8          |
| FP4   | E2M1 (0 .5 1 1.5 2 3 4 6)     | 6     | 4      | 18            | 4.5          | 1/6; 1/24 below amax / 3   |
| INT3  | integer -4 to 3, plus 4       | 4     | 2, 1   | 14            | 3.5          | 1/8, clipped 1/4           |

**Numbers.** T is the type of the values, bf16 or fp16; amax the largest magnitude of a group; arithmetic in fp32, every
operation rounded to nearest even, subnormal numbers kept.

    size  = amax * (1 / limit)              1 / limit rounded to fp32
    scale = size rounded up to T            but 6 * scale stays in T's range: at most 10912 for FP4 in fp16
    e     = 1 / scale                       0 where amax is 0
    FP4, FP8:  code = nearest(x * e)        ties to even; the product rounded to fp32 first
    INT:       code = nearest(x * e)        ties to even, of the exact product (one FMA), clipped to [-limit, limit - 1]
    value = code * scale                    exact in fp32: at most 8 + 11 bits

A scale has the type of the values, so its range carries any finite group, and limits that are powers of two make it
exact. INT codes reach one further down than up: there the scale takes the sign that sends the extreme to -limit (of
-amax and amax, -amax is the extreme), and only values of the other sign within half a step of amax are clipped. The
product x * e is taken as (x * 2^64) * (1 / (scale * 2^64)) where |scale| < 2^-64 (bf16 only): the same number, but
1 / scale alone might overflow.

FP4's scale may be rounded up by 1/128 in bf16 and 1/1024 in fp16, and its errors with it. A group in which amax / limit
is subnormal in T has a scale up to one step of T's subnormals larger, which adds at most that step to its errors; those
of FP8 remain within 1/16 of the value, or amax / 2^18, half of its smallest code, where that is more.

**NaN and infinity.** A group that holds one has the scale +infinity. Infinities get the largest code of their sign, NaN
and the group's finite values the code of 0, so `code * scale` makes infinity, -infinity and NaN of them: a broken group
says so in every place. FP sends bits.

**Bytes.** A buffer of g groups (g a multiple of 8, so every part starts at a multiple of 16 bytes) is its planes one
after the other, then its scales:

    plane of b bits, low bits of the codes first: 4 * b bytes a group;     scales: 2 bytes a group, T's bits

Within a group, value 8w + 4h + i (h in 0, 1; i in 0..3) has its b bits in 32-bit word w * b / 4 (little-endian) of the
plane, from bit 16h + (4 * b * w mod 16) + b * i. That is the plain order for planes of 4 bits (the even value in the
low nibble), and lets every plane be unpacked two values at a time, into the halves of a word, by one mask:
(word >> shift) & 0x000f000f. Planes of 8 bits hold value i in byte i.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch

from llm_quant_rocm.formats import nvfp4

GROUP = 32
# Buffers are whole blocks: 8 groups, whose planes and scales are multiples of 16 bytes.
BLOCK = 8 * GROUP
DTYPES = (torch.bfloat16, torch.float16)

# Encoded and decoded this many values at a time: fp64 temporaries of 8 MiB.
_CHUNK_VALUES = 1024 * 1024
_SMALL_SCALE, _LIFT = 2.0**-64, 2.0**64


@dataclass(frozen=True)
class Codec:
    """One way to send a group of 32 values.

    Attributes:
        name: as in VLLM_ROCM_QUICK_REDUCE_QUANTIZATION.
        limit: the code that the largest magnitude of a group becomes; the lowest one of an integer codec.
        planes: bits of the planes, those with the low bits of a code first; none where values travel as they are.
    """

    name: str
    limit: float = 0.0
    planes: tuple[int, ...] = ()

    @property
    def quantizes(self) -> bool:
        """Whether values become codes."""
        return bool(self.planes)

    @property
    def integer(self) -> bool:
        """Whether codes are integers, with a signed scale."""
        return self.name.startswith("INT")

    @cached_property
    def group_bytes(self) -> int:
        """Bytes on the wire for 32 values."""
        return sum(4 * bits for bits in self.planes) + 2 if self.quantizes else 2 * GROUP


CODECS = {
    codec.name: codec
    for codec in (
        Codec("FP"),
        Codec("INT8", 128.0, (8,)),
        Codec("INT6", 32.0, (4, 2)),
        Codec("INT4", 8.0, (4,)),
        Codec("INT3", 4.0, (2, 1)),
        Codec("FP8", 256.0, (8,)),
        Codec("FP4", 6.0, (4,)),
    )
}


def codec_named(name: str) -> Codec:
    """The codec called `name`; ValueError for an unknown name."""
    if name not in CODECS:
        raise ValueError(f"{name!r} is no codec of the quantized all-reduce: use {', '.join(CODECS)}")
    return CODECS[name]


def encode(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The bytes, uint8 [..., V / 32 * group_bytes], of values x [..., V] (bf16 or fp16): a buffer for each row.

    Raises:
        TypeError: x is neither bf16 nor fp16.
        ValueError: V is no multiple of 256.
    """
    _check(x.dtype, x.shape[-1], BLOCK, "values")
    if not codec.quantizes:
        return x.contiguous().view(torch.uint8)
    groups = x.reshape(prod(x.shape[:-1]), x.shape[-1] // GROUP, GROUP)
    wire = torch.empty((groups.shape[0], groups.shape[1] * codec.group_bytes), dtype=torch.uint8, device=x.device)
    *planes, scales = _parts(wire, codec)
    for chunk in _chunks(groups):
        scale = _scale(groups[:, chunk], codec)
        codes = _codes(groups[:, chunk], scale, codec)
        scales[:, chunk] = scale.unsqueeze(-1).view(torch.uint8)
        for plane, bits, shift in zip(planes, codec.planes, _shifts(codec), strict=True):
            plane[:, chunk] = _pack((codes >> shift) & (2**bits - 1), bits)
    return wire.view(*x.shape[:-1], wire.shape[-1])


def decode(wire: torch.Tensor, codec: Codec, dtype: torch.dtype) -> torch.Tensor:
    """The values, fp32 [..., V], in the bytes `wire` that `encode` made of values of `dtype`. They fit `dtype`'s range.

    Zero is +0 except in FP and FP4, which keep its sign.

    Raises:
        TypeError: dtype is neither bf16 nor fp16.
        ValueError: no whole number of blocks.
    """
    _check(dtype, wire.shape[-1], BLOCK // GROUP * codec.group_bytes, f"bytes of {codec.name}")
    if not codec.quantizes:
        return _values(wire, dtype)
    rows = wire.reshape(prod(wire.shape[:-1]), wire.shape[-1])
    *planes, scales = _parts(rows, codec)
    out = torch.empty((rows.shape[0], scales.shape[1], GROUP), dtype=torch.float32, device=wire.device)
    for chunk in _chunks(out):
        codes = torch.zeros_like(out[:, chunk], dtype=torch.uint8)
        for plane, bits, shift in zip(planes, codec.planes, _shifts(codec), strict=True):
            codes |= _unpack(plane[:, chunk], bits) << shift
        out[:, chunk] = _numbers(codes, codec) * _values(scales[:, chunk], dtype)
    if codec.integer:
        out += 0.0  # the code 0 under a negative scale
    return out.view(*wire.shape[:-1], scales.shape[1] * GROUP)


def _values(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as `dtype`, in fp32."""
    values = values.contiguous()
    if values.storage_offset() % dtype.itemsize:
        values = values.clone()
    return values.view(dtype).float()


def _check(dtype: torch.dtype, count: int, multiple: int, what: str) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"the quantized all-reduce sends bf16 or fp16 values, not {dtype}")
    if count % multiple:
        raise ValueError(f"{count} {what} are no whole number of blocks of {multiple}; pad them")


def _chunks(groups: torch.Tensor) -> list[slice]:
    """Slices of the groups of [rows, groups, 32] that together hold about a million values each."""
    rows, count, _ = groups.shape
    step = max(1, _CHUNK_VALUES // max(1, rows * GROUP))
    return [slice(start, start + step) for start in range(0, count, step)]


def _parts(wire: torch.Tensor, codec: Codec) -> list[torch.Tensor]:
    """Views of a buffer [rows, bytes]: its planes [rows, groups, bytes of one], then its scales [rows, groups, 2]."""
    groups = wire.shape[1] // codec.group_bytes
    widths = [*(4 * bits for bits in codec.planes), 2]
    ends = accumulate(widths)
    return [
        wire[:, groups * (end - width) : groups * end].unflatten(1, (groups, width))
        for end, width in zip(ends, widths, strict=True)
    ]


def _shifts(codec: Codec) -> list[int]:
    """Where the bits of each plane stand in a code."""
    return list(accumulate(codec.planes, initial=0))[:-1]


def _pack(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes [..., 4 * bits] of fields [..., 32] of `bits` bits each."""
    if bits == 8:
        return fields
    # [word, 8 values of it, half, value of four] -> the halves of a word outermost within it
    halves = fields.unflatten(-1, (bits, 4 // bits, 2, 4)).transpose(-3, -2)
    bytes_of = halves.reshape(*fields.shape[:-1], 4 * bits, 8 // bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=fields.device)
    return (bytes_of << shifts).sum(-1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields [..., 32] of bytes [..., 4 * bits]."""
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    fields = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    halves = fields.reshape(*packed.shape[:-1], bits, 2, 4 // bits, 4)
    return halves.transpose(-3, -2).reshape(*packed.shape[:-1], GROUP)


def _scale(groups: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The scales [rows, groups], in T, of values [rows, groups, 32]."""
    wide, dtype = groups.float(), groups.dtype
    amax = wide.abs().amax(-1)  # NaN where the group holds one
    size = amax * _fp32(1.0 / codec.limit, amax)
    scale = size.to(dtype)
    scale = torch.where(scale.float() < size, (scale.view(torch.int16) + 1).view(dtype), scale)
    scale = scale.clamp(max=largest_scale(codec, dtype))
    if codec.integer:
        scale = torch.where(wide.amin(-1) == -amax, scale, -scale)
    return scale.masked_fill(~amax.isfinite(), torch.inf)


def largest_scale(codec: Codec, dtype: torch.dtype) -> float:
    """The largest scale under which the code `limit` is still in `dtype`'s range."""
    # Exact for powers of two. A sixth of bf16's largest value is a bf16 number; of fp16's, 10917.3, one rounds down.
    return 10912.0 if (codec.limit, dtype) == (6.0, torch.float16) else torch.finfo(dtype).max / codec.limit


def _codes(groups: torch.Tensor, scale: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The codes, uint8 [rows, groups, 32], of values under `scale` [rows, groups]."""
    wide, scale = groups.float(), scale.float().unsqueeze(-1)
    lift = torch.where(scale.abs() < _SMALL_SCALE, _fp32(_LIFT, scale), 1.0)
    factor = torch.where(scale == 0, 0.0, (scale * lift).reciprocal())
    # Two fp32 numbers have an exact product in fp64.
    product = (wide * lift).double() * factor.double()
    marks = torch.where(wide.isinf(), wide.sign() * codec.limit, 0.0)
    y = torch.where(scale.isinf(), marks.double(), product)
    if codec.integer:
        return (y.round().clamp(-codec.limit, codec.limit - 1) + codec.limit).to(torch.uint8)
    if codec.name == "FP4":
        return nvfp4.e2m1_encode(y.float())
    codes = y.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(codes == 0x80, 0)  # FNUZ has no -0 and reads this byte as NaN


def _numbers(codes: torch.Tensor, codec: Codec) -> torch.Tensor:
    """What codes (uint8) stand for, fp32."""
    if codec.integer:
        return codes.float() - codec.limit
    return nvfp4.e2m1_decode(codes) if codec.name == "FP4" else codes.view(torch.float8_e4m3fn).float()


def _fp32(value: float, like: torch.Tensor) -> torch.Tensor:
    """`value` rounded to fp32, on the device of `like`; torch might multiply by a Python number in fp64."""
    return torch.full((), value, dtype=torch.float32, device=like.device)
