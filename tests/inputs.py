# SPDX-License-Identifier: Apache-2.0
"""Inputs that break numeric code, and comparisons that are exact where NaN has no one bit pattern."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPE_IDS = ("bf16", "fp16", "fp32")


@contextmanager
def engine_defaults() -> Iterator[None]:
    """Torch's defaults while an engine builds a model: 16 bits, and a device that is not the CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def random_rows(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values [count, width], every row of another size from 2**-8 to 2**8."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-8, 9, (count, 1), generator=generator).float().exp2()
    return (torch.randn(count, width, generator=generator) * size).to(dtype)


def finite_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [R, width] of zeros, -0, denormals, the largest finite value, an outlier, a scale at its floor, and ties."""
    info = torch.finfo(dtype)
    denormal = info.smallest_normal * info.eps
    sign = torch.where(torch.arange(width) % 2 == 0, 1.0, -1.0)
    ramp = torch.arange(1, width + 1).float() / max(width, 1)
    tie = 1.0 + torch.arange(width) % 8 / 8 + 1 / 16  # halfway between two codes once the row's scale is 1
    outlier = 1e-3 * ramp
    outlier[-1:] = -3e4
    rows = [
        torch.zeros(width),
        torch.full((width,), -0.0),
        sign * 0.0,
        sign * denormal,
        sign * denormal * (1 + torch.arange(width) % 100),
        sign * info.smallest_normal,
        torch.full((width,), info.max),
        sign * info.max,
        ramp * info.max,
        outlier,
        sign * ramp * 1e-4,
        sign * ramp,
        torch.cat([torch.tensor([448.0]), sign[1:] * tie[1:]])[:width],
        torch.cat([torch.tensor([-224.0]), sign[1:] * tie[1:]])[:width],
    ]
    return torch.stack(rows).to(dtype)


def broken_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [R, width] that hold NaN or inf: in the first place, in the last, everywhere, and both in one row."""
    rows = torch.ones(6, width)
    rows[0, :1] = float("nan")
    rows[1, -1:] = float("nan")
    rows[2] = float("nan")
    rows[3, :1] = float("inf")
    rows[4, -1:] = -float("inf")
    rows[5, :1], rows[5, -1:] = float("inf"), float("nan")
    return rows.to(dtype)


def nasty_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """`finite_rows`, `broken_rows` and 8 random ones."""
    return torch.cat([finite_rows(width, dtype), broken_rows(width, dtype), random_rows(8, width, dtype)])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same dtype, shape and bits; a NaN equals any NaN."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    found, expected = found.detach().cpu(), expected.detach().cpu()
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan), "NaN in other places"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    differ = (found.view(integer) != expected.view(integer)) & ~nan
    assert not differ.any(), f"{int(differ.sum())} of {differ.numel()} differ, first at {differ.nonzero()[0].tolist()}"


def assert_close_codes(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """FP8 codes [M, K] and scales [M, 1] of values that were rounded to `dtype`, maybe to the neighbour where they lay
    in the middle: scales within that rounding, and fp32's own ones, codes the same or the next, and at most one of a
    hundred the next. NaN is where it is expected."""
    (codes, scales), (expected_codes, expected_scales) = ([part.cpu() for part in both] for both in (found, expected))
    assert (codes.dtype, codes.shape) == (expected_codes.dtype, expected_codes.shape)
    rtol = max(torch.finfo(dtype).eps, 2**-20)
    torch.testing.assert_close(scales, expected_scales, rtol=rtol, atol=0, equal_nan=True)
    nan = expected_codes.float().isnan()
    assert torch.equal(codes.float().isnan(), nan), "NaN in other places"
    bits = [part.view(torch.uint8).int() for part in (codes, expected_codes)]
    order = [torch.where(part < 128, part, 128 - part) for part in bits]
    steps = (order[0] - order[1]).abs().masked_fill(nan, 0)
    assert steps.numel() == 0 or (steps.max() <= 1 and steps.count_nonzero() <= max(1, steps.numel() // 100))


def integer_product(m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Operands xq, xscale, wq, wscale, bias of a product that every correct accumulator computes exactly.

    The codes are -1, 0, 1 and 2 and the scales powers of two, so for k <= 2048 every partial sum is an integer of at
    most 13 bits: exact even in the 14 bits that Hopper's FP8 accumulation keeps, in any order.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.tensor([-1.0, 0.0, 1.0, 2.0]).to(dtype)

    def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.randint(0, 4, (rows, k), generator=generator)
        scale = torch.randint(-3, 4, (rows, 1), generator=generator).float().exp2()
        return codes.view(torch.uint8)[index].view(dtype), scale

    bias = torch.randint(-4, 5, (n,), generator=generator).float()
    return *draw(m), *draw(n), bias


def product64(
    xq: torch.Tensor, xscale: torch.Tensor, wq: torch.Tensor, wscale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product and its bias in float64, on the CPU."""
    xq, xscale, wq, wscale = (tensor.cpu().float().double() for tensor in (xq, xscale, wq, wscale))
    out = (xq @ wq.t()) * xscale * wscale.t()
    return out if bias is None else out + bias.cpu().double()


@contextmanager
def temporaries(*allowed: torch.Tensor) -> Iterator[list[int]]:
    """The bytes of all tensors that operations inside make, but for those of the `allowed` ones' sizes."""
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    sizes.append(tensor.untyped_storage().nbytes())
            return out

    with Watch():
        yield sizes
    known = {tensor.nbytes for tensor in allowed}
    sizes[:] = [size for size in sizes if size not in known]
