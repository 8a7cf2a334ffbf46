# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce of several ranks in one process: its errors, and what its result does not depend on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_quant_rocm.formats.wire import CODECS, DTYPES, GROUP, Codec
from llm_quant_rocm.reference import quick_reduce
from llm_quant_rocm.reference.quick_reduce import add, one_shot, segment_values, split, two_level, two_shot
from tests.inputs import assert_same, random_rows

BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
EVERY = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
ONE_STEP = {"FP": 0, "INT8": 1 / 128, "FP8": 1 / 32, "INT6": 1 / 32, "INT4": 1 / 8, "FP4": 1 / 5.9, "INT3": 1 / 4}


def ranks(world: int, count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """One tensor [count] a rank; groups of very different size."""
    rows = [random_rows(-(-count // GROUP), GROUP, dtype, seed * 100 + rank) for rank in range(world)]
    return [row.flatten()[:count] for row in rows]


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude (fp64) of each value's group."""
    groups = torch.nn.functional.pad(x.double(), (0, -x.numel() % GROUP)).view(-1, GROUP)
    return groups.abs().amax(-1, keepdim=True).expand(-1, GROUP).flatten()[: x.numel()]


def bound(inputs: list[torch.Tensor], codec: Codec, shots: int) -> torch.Tensor:
    """The error allowed: one of each codec step, one rounding of the sum and one of the result to the values' type."""
    step, half_ulp = ONE_STEP[codec.name], torch.finfo(inputs[0].dtype).eps / 2
    exact = torch.stack(inputs).double().sum(0)
    first = step * sum(amax(x) for x in inputs)
    second = step * (amax(exact.float()) + first) if shots == 2 else 0
    size = exact.abs() + first + second
    return first + second + 2.5 * half_ulp * size + 1e-6


@BOTH
@EVERY
@settings(max_examples=20, deadline=None)
@given(world=st.integers(1, 8), count=st.integers(1, 3000), seed=st.integers(0, 1000))
def test_errors(dtype: torch.dtype, codec: Codec, world: int, count: int, seed: int) -> None:
    inputs = ranks(world, count, dtype, seed)
    exact = torch.stack(inputs).double().sum(0)
    for algorithm, shots in ((two_shot, 2), (one_shot, 1)):
        found = algorithm(inputs, codec)
        assert found.dtype == dtype
        assert found.shape == inputs[0].shape
        # fp32 adds up to 8 values: 7 roundings of at most 2**-24 of their magnitudes, covered by half of an ulp.
        assert ((found.double() - exact).abs() <= bound(inputs, codec, shots)).all()


@BOTH
@pytest.mark.parametrize("world", [2, 3, 8])
def test_fp_is_a_sum_in_fp32_rounded_once(dtype: torch.dtype, world: int) -> None:
    inputs = ranks(world, 1000, dtype)
    total = torch.zeros(1000)
    for x in inputs:
        total = total + x.float()
    assert_same(two_shot(inputs, CODECS["FP"]), total.to(dtype))
    assert_same(one_shot(inputs, CODECS["FP"]), total.to(dtype))


@BOTH
@EVERY
def test_a_result_depends_on_its_group_alone(dtype: torch.dtype, codec: Codec) -> None:
    whole = ranks(5, 4096, dtype)
    found = two_shot(whole, codec)
    for start, stop in ((0, 32), (992, 1024), (1024, 4096)):  # other owners, other neighbours
        assert_same(two_shot([x[start:stop] for x in whole], codec), found[start:stop])
    assert_same(two_shot([x[:1000] for x in whole], codec)[:992], found[:992])
    shaped = two_shot([x.view(64, 64).t() for x in whole], codec)
    assert_same(shaped, two_shot([x.view(64, 64).t().reshape(-1) for x in whole], codec).view(64, 64))


@BOTH
@EVERY
@pytest.mark.parametrize("world", [2, 8])
def test_finite_values_give_finite_results(dtype: torch.dtype, codec: Codec, world: int) -> None:
    largest = torch.finfo(dtype).max
    alternating = torch.where(torch.arange(320) % 2 == 0, largest, -largest)
    for x in (torch.full((320,), largest), torch.full((320,), -largest), alternating):
        inputs = [x.to(dtype)] * world
        for algorithm in (two_shot, one_shot):
            found = algorithm(inputs, codec)
            assert found.isfinite().all()
            assert (found.sign() == x.sign()).all()
            assert (found.abs() >= largest * 0.74).all()  # INT3 clips to 3 of 4 steps
        # What one rank sends and the others take back: nothing is left of an overflow on the way.
        assert (two_shot([*inputs[:2], -inputs[0], -inputs[0]], codec).isfinite()).all()
    # Half of the largest value from each of two ranks is no overflow, although codes may round it up.
    half = torch.full((320,), largest / 2).to(dtype)
    assert two_shot([half, half], codec).isfinite().all()


def test_one_rank_keeps_its_own() -> None:
    x = random_rows(1, 100, torch.bfloat16)
    for algorithm in (two_shot, one_shot):
        found = algorithm([x], CODECS["INT4"])
        assert_same(found, x)
        assert found.data_ptr() != x.data_ptr()


@BOTH
@EVERY
def test_small_values_are_not_lost(dtype: torch.dtype, codec: Codec) -> None:
    info = torch.finfo(dtype)
    for size in (info.smallest_normal * info.eps, info.smallest_normal, 1e-7, 1e-4):
        x = torch.where(torch.arange(64) % 2 == 0, size, -size).to(dtype)
        found = two_shot([x, x, torch.zeros_like(x)], codec)
        assert ((found.double() - 2 * x.double()).abs() <= 0.5 * 2 * x.double().abs()).all()
    zeros = two_shot([torch.zeros(70, dtype=dtype)] * 3, codec)
    assert_same(zeros, torch.zeros(70, dtype=dtype))


@BOTH
@EVERY
def test_nan_and_infinity_arrive(dtype: torch.dtype, codec: Codec) -> None:
    inputs = [x.clone() for x in ranks(3, 320, dtype)]
    inputs[0][3] = torch.inf
    inputs[1][3] = torch.inf
    inputs[2][40] = -torch.inf
    inputs[1][70] = torch.nan
    inputs[0][100], inputs[1][100] = torch.inf, -torch.inf
    inputs[0][130], inputs[1][131] = torch.inf, torch.inf
    hurt = torch.arange(320) // GROUP < 5
    for algorithm in (two_shot, one_shot):
        found = algorithm(inputs, codec)
        assert found[3] == torch.inf
        assert found[40] == -torch.inf
        assert found[70].isnan()
        assert found[100].isnan()
        assert found[~hurt].isfinite().all()
        if codec.quantizes:  # finite neighbours have no scale and arrive as NaN; NaN wins over another rank's infinity
            expected = torch.full((160,), torch.nan)
            expected[3], expected[40] = torch.inf, -torch.inf
            assert_same(found[hurt].float(), expected)
        else:
            assert found[130] == found[131] == torch.inf
            assert (~found.isfinite()).sum() == 6


@EVERY
def test_cast_of_bf16_to_fp16(codec: Codec) -> None:
    inputs = [x / 8 for x in ranks(4, 500, torch.bfloat16)]
    expected = two_shot([x.half() for x in inputs], codec)
    found = two_shot(inputs, codec, cast_bf16_to_fp16=True)
    assert found.dtype == torch.bfloat16
    assert ((found.float() - expected.float()).abs() <= expected.float().abs() * 2**-8).all()
    halves = [x.half() for x in inputs]
    assert_same(two_shot(halves, codec, cast_bf16_to_fp16=True), two_shot(halves, codec))
    large = torch.full((32,), 1e30, dtype=torch.bfloat16)
    large[1] = torch.inf
    found = two_shot([large, -large], CODECS["FP"], cast_bf16_to_fp16=True)
    assert (found[2:] == 0).all()  # as 65504 - 65504
    assert found[1].isnan()


@BOTH
@EVERY
def test_two_levels(dtype: torch.dtype, codec: Codec) -> None:
    inputs = ranks(6, 1000, dtype)
    exact = torch.stack(inputs).double().sum(0)
    found = two_level([inputs[:3], inputs[3:]], codec)
    rounding_of_hosts = torch.finfo(dtype).eps * sum(x.double().abs() for x in inputs)
    assert ((found.double() - exact).abs() <= 2 * bound(inputs, codec, 2) + rounding_of_hosts).all()
    assert_same(two_level([inputs], codec), two_shot(inputs, codec))
    assert_same(two_level([[x] for x in inputs], codec), two_shot(inputs, codec))
    assert two_level([inputs[:3], inputs[3:]], codec, cast_bf16_to_fp16=True).dtype == dtype


@pytest.mark.parametrize(
    ("count", "world", "values"), [(0, 3, 0), (1, 3, 256), (768, 3, 256), (769, 3, 512), (1 << 20, 8, 1 << 17)]
)
def test_segments(count: int, world: int, values: int) -> None:
    assert segment_values(count, world) == values
    x = torch.arange(count, dtype=torch.float32)
    segments = split(x, world)
    assert segments.shape == (world, values)
    assert segments.flatten()[count:].eq(0).all()
    assert_same(quick_reduce.join(segments, x), x)


def test_add_takes_the_order_of_the_ranks() -> None:
    parts = [torch.tensor([value]) for value in (1.0, 2.0**24, -(2.0**24))]
    assert add(parts, torch.bfloat16) == 0
    assert add(parts[::-1], torch.bfloat16) == 1
    assert not add([torch.tensor([-0.0])] * 2, torch.bfloat16).signbit()
