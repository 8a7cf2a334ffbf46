# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce of several ranks in one process.

Each rank splits its values into one segment an owner, encodes and sends them; an owner decodes what it gets, its own
segment included, adds in fp32 in the order of the ranks, rounds to the values' type, and sends the sum, encoded again,
to all. Every rank decodes the same bytes, so all end with the same bits:

    result = D(E(T(0 + D(E(x_0)) + D(E(x_1)) + ...)))        E, D: `formats.wire`; T: rounding to bf16 or fp16

As owners quantize their own values too, a result depends on the 32 values of its group alone: not on how many values
there are, nor on who owns which. Finite values give finite results: a sum beyond the largest value of the type arrives
as that value, in the codec FP as well, and so does one that passes fp32's range on its way. A plain all-reduce makes
them infinite. NaN and infinities arrive where they were, and the finite values of their groups as NaN (FP: as sums); so
an infinity arrives as NaN where another rank's group held one elsewhere.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import pad

from llm_quant_rocm.formats.wire import BLOCK, Codec, decode, encode


def two_shot(inputs: Sequence[torch.Tensor], codec: Codec, cast_bf16_to_fp16: bool = False) -> torch.Tensor:
    """What every rank ends with, of one tensor from each rank (bf16 or fp16, one shape). One rank keeps its own."""
    if len(inputs) == 1:
        return inputs[0].clone()
    return _two_shot([carried(x, cast_bf16_to_fp16) for x in inputs], codec, inputs[0])


def one_shot(inputs: Sequence[torch.Tensor], codec: Codec, cast_bf16_to_fp16: bool = False) -> torch.Tensor:
    """The same where everybody sends to everybody and adds for itself: nothing is encoded a second time."""
    if len(inputs) == 1:
        return inputs[0].clone()
    values = [carried(x, cast_bf16_to_fp16) for x in inputs]
    dtype = values[0].dtype
    return join(add([decode(encode(split(x, 1), codec), codec, dtype) for x in values], dtype), inputs[0])


def two_level(hosts: Sequence[Sequence[torch.Tensor]], codec: Codec, cast_bf16_to_fp16: bool = False) -> torch.Tensor:
    """The all-reduce over several hosts: owners add up their host, then a two-shot adds up the hosts' sums.

    The bytes of its second half are passed on inside the hosts, so nothing is encoded a third time. A host of one rank
    adds nothing and sends its values to the other hosts as they are.
    """
    sums = []
    for host in hosts:
        values = [carried(x, cast_bf16_to_fp16) for x in host]
        parts = [decode(encode(split(x, 1), codec), codec, x.dtype) for x in values]
        sums.append(join(add(parts, values[0].dtype), values[0]) if len(values) > 1 else values[0])
    if len(hosts) == 1:
        return two_shot(hosts[0], codec, cast_bf16_to_fp16)
    return _two_shot(sums, codec, hosts[0][0])


def carried(x: torch.Tensor, cast_bf16_to_fp16: bool) -> torch.Tensor:
    """x in the type in which it travels: fp16 where bf16 is cast, its finite values kept finite."""
    if not cast_bf16_to_fp16 or x.dtype != torch.bfloat16:
        return x
    limit = torch.finfo(torch.float16).max
    return torch.where(x.isfinite(), x.float().clamp(-limit, limit), x.float()).half()


def segment_values(count: int, world: int) -> int:
    """Values that each of `world` owners gets of `count`: whole blocks of 256. Zeros fill what is missing at the end,
    which may be the whole segments of the last owners."""
    return -(-count // (world * BLOCK)) * BLOCK


def split(x: torch.Tensor, world: int) -> torch.Tensor:
    """The segments [world, values] of x, in order."""
    values = segment_values(x.numel(), world)
    return pad(x.reshape(-1), (0, world * values - x.numel())).view(world, values)


def join(segments: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor of the shape and dtype of `like` whose segments [..., values] (fp32) these are."""
    return segments.flatten()[: like.numel()].view(like.shape).to(like.dtype)


def add(parts: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of fp32 tensors in their order, from +0, rounded to `dtype`; finite where all of them are."""
    first, *rest = parts
    total, finite = first + 0.0, first.isfinite()
    for part in rest:
        total, finite = total + part, finite & part.isfinite()
    limit = torch.finfo(dtype).max
    return torch.where(finite, total.clamp(-limit, limit), total).to(dtype)


def _two_shot(values: Sequence[torch.Tensor], codec: Codec, like: torch.Tensor) -> torch.Tensor:
    world, dtype = len(values), values[0].dtype
    sent = [encode(split(x, world), codec) for x in values]  # row o of each is for owner o
    sums = add([decode(rows, codec, dtype) for rows in sent], dtype)
    return join(decode(encode(sums, codec), codec, dtype), like)
