# SPDX-License-Identifier: Apache-2.0
"""The all-reduce's codecs against numpy and ml_dtypes, byte by byte, and their errors against float64."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_quant_rocm.formats import wire
from llm_quant_rocm.formats.wire import BLOCK, CODECS, GROUP, Codec
from tests.inputs import assert_same, broken_rows, finite_rows, nasty_rows, random_rows, temporaries

NUMPY = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
BOTH = pytest.mark.parametrize("dtype", wire.DTYPES, ids=["bf16", "fp16"])
EVERY = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
QUANTIZING = pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.quantizes], ids=list(CODECS)[1:])


@st.composite
def blocks(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """One block of finite values: groups of every size that the type holds, some of them of few distinct values."""
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    low, high = (-133, 127) if dtype == torch.bfloat16 else (-24, 15)
    size = torch.tensor(draw(st.lists(st.integers(low, high), min_size=8, max_size=8))).double().exp2().unsqueeze(1)
    shape = draw(st.sampled_from(["normal", "uniform", "grid", "sparse", "outlier"]))
    values = torch.randn(8, GROUP, generator=generator, dtype=torch.float64)
    if shape == "uniform":
        values = torch.rand(8, GROUP, generator=generator, dtype=torch.float64) * 2 - 1
    elif shape == "grid":  # many ties
        values = torch.randint(-64, 65, (8, GROUP), generator=generator).double() / draw(st.sampled_from([1, 6, 7, 64]))
    elif shape == "sparse":
        values = values * (torch.rand(8, GROUP, generator=generator) < 0.1)
    elif shape == "outlier":
        values[:, draw(st.integers(0, 31))] *= 1000
    limit = torch.finfo(dtype).max
    return (values * size).clamp(-limit, limit).to(dtype).flatten()


def spelled_out(x: torch.Tensor, codec: Codec) -> bytes:
    """The bytes of one block x [256], as the docstring has them, group by group in numpy and ml_dtypes."""
    kind = NUMPY[x.dtype]
    groups = x.view(torch.int16).numpy().view(kind).reshape(-1, GROUP)
    planes: list[list[bytes]] = [[] for _ in codec.planes]
    scales = b""
    for group in groups:
        amax = np.abs(group.astype(np.float32)).max()
        size = amax * (np.float32(1) / np.float32(codec.limit))
        scale = size.astype(kind)
        if np.float32(scale) < size:
            scale = np.nextafter(scale, kind(np.inf))
        while np.float64(scale) * codec.limit > float(torch.finfo(x.dtype).max):
            scale = np.nextafter(scale, kind(0))
        if codec.integer and not (group == -kind(amax)).any():
            scale = -scale
        codes = [code_of(np.float32(value), np.float32(scale), codec) for value in group]
        for plane, bits, shift in zip(planes, codec.planes, np.cumsum((0, *codec.planes)), strict=False):
            words = [0] * bits
            for index, code in enumerate(codes):
                w, h, i = index // 8, index // 4 % 2, index % 4
                word, bit = (w * bits // 4, 16 * h + 4 * bits * w % 16 + bits * i)
                if bits == 8:
                    word, bit = index // 4, 8 * (index % 4)
                words[word] |= (code >> int(shift) & 2**bits - 1) << bit
            plane.append(b"".join(word.to_bytes(4, "little") for word in words))
        scales += scale.tobytes()
    return b"".join(b"".join(plane) for plane in planes) + scales


def code_of(value: np.float32, scale: np.float32, codec: Codec) -> int:
    """The code of one value."""
    if scale == 0:
        product = 0.0 * float(value)
    else:
        lift = 2.0**64 if abs(scale) < 2.0**-64 else 1.0
        factor = np.float32(1) / np.float32(float(scale) * lift)
        product = float(value) * lift * float(factor)  # fp64: exact
    if codec.integer:
        return int(np.clip(np.rint(product), -codec.limit, codec.limit - 1) + codec.limit)
    if codec.name == "FP4":
        return int(np.float32(product).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)) & 15
    code = int(np.float32(product).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    return 0 if code == 0x80 else code


def error_bound(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The error (fp64) that the docstring's table allows every value of x [..., 32]."""
    wide, info = x.double(), torch.finfo(x.dtype)
    amax = wide.abs().amax(-1, keepdim=True)
    step_of_subnormals = info.smallest_normal * info.eps
    if codec.integer:
        step = amax / codec.limit
        clipped = wide.abs() > (codec.limit - 0.5) * step
        return torch.where(clipped, step, step / 2) + step_of_subnormals
    if codec.name == "FP4":
        rounded_up = 1 + info.eps  # of the scale
        bound = torch.where(wide.abs() < amax / 3, amax / 24, torch.where(wide.abs() < amax * 0.6, amax / 12, amax / 6))
        return bound * rounded_up + step_of_subnormals
    if codec.name == "FP8":
        bound = torch.maximum(wide.abs() / 16, amax * 2**-18)
        bound = torch.where(amax < codec.limit * info.smallest_normal, bound, torch.minimum(bound, amax / 32))
        return bound + step_of_subnormals
    return torch.zeros_like(wide)


# --- bytes


@BOTH
@QUANTIZING
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bytes_are_those_of_the_docstring(dtype: torch.dtype, codec: Codec, data: st.DataObject) -> None:
    x = data.draw(blocks(dtype))
    assert bytes(wire.encode(x, codec).tolist()) == spelled_out(x, codec)


@BOTH
@QUANTIZING
def test_bytes_of_nasty_rows_are_those_of_the_docstring(dtype: torch.dtype, codec: Codec) -> None:
    for row in torch.cat([finite_rows(BLOCK, dtype), random_rows(4, BLOCK, dtype)]):
        assert bytes(wire.encode(row, codec).tolist()) == spelled_out(row, codec)


GOLDEN = {  # the first group, -16 to 15: its planes and scale
    "INT8": ["0008101820283038404850586068707880889098a0a8b0b8c0c8d0d8e0e8f0f8", "003e"],
    "INT6": ["2064a8ec2064a8ec2064a8ec2064a8ec", "00550055aaffaaff", "003f"],
    "INT4": ["002122434465668788a9aacbccedeeff", "0040"],
    "INT3": ["40eaa50f40eaa5ff", "00ffc0ff", "8040"],
    "FP8": ["f8f7f6f5f4f3f2f1f0eeeceae8e4e0d800586064686a6c6e7071727374757677", "803d"],
    "FP4": ["ffefeededdccab991021435455666677", "2b40"],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_that_never_change(name: str) -> None:
    codec = CODECS[name]
    x = torch.arange(-16, 16).mul(torch.arange(1, 9).unsqueeze(1)).to(torch.bfloat16).flatten()
    *planes, scales = wire._parts(wire.encode(x, codec).unsqueeze(0), codec)
    assert [part[0, 0].numpy().tobytes().hex() for part in (*planes, scales)] == GOLDEN[name]


@BOTH
@EVERY
def test_size_on_the_wire(dtype: torch.dtype, codec: Codec) -> None:
    bits = {"FP": 16, "INT8": 8.5, "FP8": 8.5, "INT6": 6.5, "INT4": 4.5, "FP4": 4.5, "INT3": 3.5}[codec.name]
    assert wire.encode(torch.zeros(3, 5 * BLOCK, dtype=dtype), codec).shape == (3, 5 * BLOCK * bits / 8)
    assert codec.group_bytes * 8 == bits * GROUP


@BOTH
@EVERY
def test_buffers_are_rows_whatever_their_number_and_length(
    dtype: torch.dtype, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = random_rows(3, 64 * BLOCK, dtype)
    whole = wire.encode(x, codec)
    monkeypatch.setattr(wire, "_CHUNK_VALUES", 10_000)  # several chunks, of other groups in three rows than in one
    assert torch.equal(wire.encode(x, codec), whole)
    assert torch.equal(whole, torch.stack([wire.encode(row, codec) for row in x]))
    assert_same(wire.decode(whole, codec, dtype), torch.stack([wire.decode(row, codec, dtype) for row in whole]))
    assert torch.equal(wire.encode(x.t().contiguous().t(), codec), whole)
    assert wire.decode(wire.encode(x[:, :0], codec), codec, dtype).shape == (3, 0)
    at_an_odd_address = torch.cat([torch.zeros(1, dtype=torch.uint8), whole[1]])[1:]
    assert_same(wire.decode(at_an_odd_address, codec, dtype), wire.decode(whole[1], codec, dtype))


# --- numbers


@BOTH
@EVERY
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_errors_stay_within_the_table_and_values_in_range(
    dtype: torch.dtype, codec: Codec, data: st.DataObject
) -> None:
    x = data.draw(blocks(dtype)).view(-1, GROUP)
    found = wire.decode(wire.encode(x.flatten(), codec), codec, dtype).view(-1, GROUP)
    assert ((found.double() - x.double()).abs() <= error_bound(x, codec)).all()
    assert found.to(dtype).isfinite().all()


@BOTH
@EVERY
def test_error_of_nasty_rows(dtype: torch.dtype, codec: Codec) -> None:
    for row in finite_rows(BLOCK, dtype):
        found = wire.decode(wire.encode(row, codec), codec, dtype).view(-1, GROUP)
        assert found.to(dtype).isfinite().all()
        assert ((found.double() - row.double().view(-1, GROUP)).abs() <= error_bound(row.view(-1, GROUP), codec)).all()


@BOTH
@QUANTIZING
def test_the_table_is_tight(dtype: torch.dtype, codec: Codec) -> None:
    """A codec that loses a bit it claims, or claims less than it does, shows here: the worst errors are reached."""
    x = torch.rand(4096, GROUP, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).mul(2).sub(1).to(dtype)
    error = (wire.decode(wire.encode(x.flatten(), codec), codec, dtype).view_as(x).double() - x.double()).abs()
    assert (error > 0.93 * error_bound(x, codec)).any()
    root_mean_square = (error / x.double().abs().amax(-1, keepdim=True)).square().mean().sqrt()
    if codec.integer:  # uniform within a step, and a little more for what is clipped
        assert 1 / codec.limit / 12**0.5 * 0.95 < root_mean_square < 1 / codec.limit / 12**0.5 * 1.3


@BOTH
@EVERY
def test_what_is_exact(dtype: torch.dtype, codec: Codec) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    constants = [0.0, smallest, -smallest, 6.0, -3 * 2.0**-12]
    if codec.name != "FP4":  # whose scale is a sixth of them
        constants += [info.max, -info.max, 1.0, -0.3]
    rows = [torch.full((BLOCK,), value) for value in constants]
    rows.append(torch.zeros(BLOCK).index_fill_(0, torch.tensor(77), -3.0))
    for row in rows:
        row = row.to(dtype)
        assert torch.equal(wire.decode(wire.encode(row, codec), codec, dtype).to(dtype), row)


@BOTH
@EVERY
def test_signs_of_zero(dtype: torch.dtype, codec: Codec) -> None:
    keeps = codec.name in ("FP", "FP4")
    for value in (1.0, -1.0):
        x = torch.full((BLOCK,), -0.0, dtype=dtype)
        x[::32] = value
        found = wire.decode(wire.encode(x, codec), codec, dtype)
        assert found[1::32].signbit().all() == keeps
        assert (found[x == 0] == 0).all()


@BOTH
@EVERY
def test_nan_and_infinity_arrive_where_they_were_sent(dtype: torch.dtype, codec: Codec) -> None:
    for row in broken_rows(BLOCK, dtype) * 6:
        row[40] = -torch.inf  # in the second group, whatever the row holds in its first and last
        found = wire.decode(wire.encode(row, codec), codec, dtype)
        group_is_finite = row.view(-1, GROUP).isfinite().all(-1, keepdim=True).expand(-1, GROUP).flatten()
        expected = row.float().where(group_is_finite | row.isinf(), torch.nan) if codec.quantizes else row.float()
        assert_same(found, expected)
        if codec.quantizes:
            scales = wire.encode(row, codec)[-16:].view(dtype)
            assert torch.equal(scales.isinf(), ~group_is_finite[::GROUP])
            assert (scales[scales.isinf()] > 0).all()


@BOTH
@EVERY
def test_bytes_do_not_depend_on_neighbouring_groups(dtype: torch.dtype, codec: Codec) -> None:
    x = nasty_rows(BLOCK, dtype)
    order = torch.randperm(x.numel() // GROUP, generator=torch.Generator().manual_seed(0))
    found = wire.decode(wire.encode(x.flatten(), codec), codec, dtype).view(-1, GROUP)
    shuffled = wire.decode(wire.encode(x.view(-1, GROUP)[order].flatten(), codec), codec, dtype).view(-1, GROUP)
    assert_same(shuffled, found[order])


# --- errors


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="'INT5' is no codec .* INT8, INT6, INT4, INT3, FP8, FP4"):
        wire.codec_named("INT5")
    with pytest.raises(TypeError, match=r"not torch\.float32"):
        wire.encode(torch.zeros(BLOCK), CODECS["FP4"])
    with pytest.raises(ValueError, match="255 values are no whole number of blocks of 256"):
        wire.encode(torch.zeros(255, dtype=torch.bfloat16), CODECS["FP4"])
    with pytest.raises(ValueError, match="143 bytes of FP4"):
        wire.decode(torch.zeros(143, dtype=torch.uint8), CODECS["FP4"], torch.bfloat16)
    with pytest.raises(TypeError, match=r"not torch\.float32"):
        wire.decode(torch.zeros(144, dtype=torch.uint8), CODECS["FP4"], torch.float32)


@pytest.mark.parametrize("name", ["INT6", "FP8", "FP4"])
def test_temporaries_stay_small(name: str) -> None:
    """A message of 6 MiB: beyond it, its bytes and what is decoded, fp64 chunks of 8 MiB."""
    x, codec = torch.ones(4, 3 * 2**18, dtype=torch.bfloat16), wire.CODECS[name]
    sent = wire.encode(x, codec)
    with temporaries(x, sent, torch.empty(x.shape)) as sizes:
        wire.decode(wire.encode(x, codec), codec, x.dtype)
    assert max(sizes) <= 8 * 2**20
