# SPDX-License-Identifier: Apache-2.0
"""FP8 formats: every code against ml_dtypes, quantization against an oracle that shares no code with it."""

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.fp8 import FNUZ, OCP, Fp8Format
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, broken_rows, finite_rows, nasty_rows, random_rows, temporaries

FORMATS = pytest.mark.parametrize("fmt", [OCP, FNUZ], ids=["ocp", "fnuz"])
NUMPY = {"ocp": ml_dtypes.float8_e4m3fn, "fnuz": ml_dtypes.float8_e4m3fnuz}


def all_codes(fmt: Fp8Format) -> torch.Tensor:
    """The 256 codes in the order of their bytes."""
    return torch.arange(256, dtype=torch.uint8).view(fmt.dtype)


def oracle(x: torch.Tensor, fmt: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of finite x [M, K] in numpy: IEEE division in fp32, then ml_dtypes' rounding to nearest even."""
    values = x.float().numpy()
    amax = np.abs(values).max(axis=1, keepdims=True)
    scale = np.maximum(amax / np.float32(fmt.max), np.float32(1 / (fmt.max * 512)))
    codes = np.clip(values / scale, -fmt.max, fmt.max).astype(NUMPY[fmt.name])
    return torch.from_numpy(codes.view(np.uint8)).view(fmt.dtype), torch.from_numpy(scale)


@FORMATS
def test_every_code_has_its_value(fmt: Fp8Format) -> None:
    expected = np.arange(256, dtype=np.uint8).view(NUMPY[fmt.name]).astype(np.float32)
    np.testing.assert_array_equal(fp8.dequantize(all_codes(fmt), torch.ones(1)).numpy(), expected)


@FORMATS
def test_every_code_within_the_bound_survives_quantization(fmt: Fp8Format) -> None:
    codes = all_codes(fmt)
    codes = codes[codes.float().abs() <= fmt.max]
    assert len(codes) == {"ocp": 254, "fnuz": 253}[fmt.name]
    for scale in (1.0, 0.3, 1e-4, 77.7):
        again = fp8.quantize(codes.float() * scale, torch.tensor([scale]), fmt)
        assert_same(again, codes)


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("width", [1, 7, 16, 1000])
def test_quantize_rows_equals_the_oracle(fmt: Fp8Format, dtype: torch.dtype, width: int) -> None:
    x = torch.cat([finite_rows(width, dtype), random_rows(50, width, dtype)])
    q, scale = fp8.quantize_rows(x, fmt)
    expected_q, expected_scale = oracle(x, fmt)
    assert_same(scale, expected_scale)
    assert_same(q, expected_q)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_16_bit_value_equals_the_oracle(fmt: Fp8Format, dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    limits = torch.tensor([1e-4, 0.77, 1.0, 3.1, 448.0, 2e4], dtype=dtype)
    x = torch.where(values.abs() <= limits[:, None], values, 0)
    assert_same(fp8.quantize_rows(x, fmt)[0], oracle(x, fmt)[0])


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, min_size=1, max_size=40), st.sampled_from([OCP, FNUZ]))
@settings(max_examples=300, deadline=None)
def test_properties_of_a_row(values: list[float], fmt: Fp8Format) -> None:
    x = torch.tensor([values])
    q, scale = fp8.quantize_rows(x, fmt)
    assert_same(q, oracle(x, fmt)[0])
    decoded = fp8.dequantize(q, scale).double()
    largest = x.double().abs().max().item()
    # Half a code: 2**-4 of a normal value, 2**-10 of a scale below; and what fp32 rounds in the scale.
    bound = torch.maximum(x.double().abs() * 2**-4, scale.double() * 2**-10) * (1 + 1e-6) + 1e-44
    assert ((decoded - x.double()).abs() <= bound).all()
    assert scale.item() == np.float32(fmt.min_scale) or (decoded.abs() <= largest * (1 + 1e-6)).all()
    order = x[0].argsort()
    assert (decoded[0][order].diff() >= 0).all(), "quantization is not monotonic"
    assert scale.item() >= np.float32(fmt.min_scale)


@given(st.lists(st.floats(2**-60, 2**60, width=32), min_size=1, max_size=20), st.integers(-20, 20))
@settings(max_examples=100, deadline=None)
def test_a_power_of_two_moves_to_the_scale(values: list[float], exponent: int) -> None:
    x = torch.tensor([[*values, 2.0**50]])
    q, scale = fp8.quantize_rows(x, OCP)
    shifted_q, shifted_scale = fp8.quantize_rows(x * 2.0**exponent, OCP)
    assert_same(shifted_q, q)
    assert_same(shifted_scale, scale * 2.0**exponent)


@FORMATS
def test_negation_flips_the_sign_of_every_code(fmt: Fp8Format) -> None:
    x = random_rows(20, 300, torch.float32)
    q, negated = fp8.quantize_rows(x, fmt)[0].float(), fp8.quantize_rows(-x, fmt)[0].float()
    assert torch.equal(negated, -q)


def test_bounds() -> None:
    assert (OCP.max, FNUZ.max) == (448.0, 224.0)
    assert torch.finfo(OCP.dtype).max == 448 and torch.finfo(FNUZ.dtype).max == 240
    for fmt in (OCP, FNUZ):
        assert fmt.min_scale == 1 / (fmt.max * 512)
        q, scale = fp8.quantize_rows(torch.tensor([[3e38, -3e38], [1e-30, -1e-30], [0.0, -0.0]]), fmt)
        assert q[0].float().tolist() == [fmt.max, -fmt.max]
        assert scale[1:].flatten().tolist() == [np.float32(fmt.min_scale)] * 2


def test_minus_zero() -> None:
    """OCP keeps the sign of zero; FNUZ has none, and byte 0x80 there is NaN."""
    zeros = torch.tensor([[0.0, -0.0, -1e-30, 1.0]])
    assert fp8.quantize_rows(zeros, OCP)[0].view(torch.uint8)[0, :3].tolist() == [0x00, 0x80, 0x80]
    assert fp8.quantize_rows(zeros, FNUZ)[0].view(torch.uint8)[0, :3].tolist() == [0, 0, 0]


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("width", [2, 33])
def test_nan_and_inf_show(fmt: Fp8Format, dtype: torch.dtype, width: int) -> None:
    q, scale = fp8.quantize_rows(broken_rows(width, dtype), fmt)
    assert scale.flatten()[[0, 1, 2, 5]].isnan().all()
    assert q[[0, 1, 2, 5]].float().isnan().all()
    assert scale.flatten()[[3, 4]].isposinf().all()
    assert q[3, 0].float().isnan() and q[4, -1].float().isnan()
    assert (q[3, 1:].float() == 0).all()


@FORMATS
def test_a_broken_row_leaves_the_others_alone(fmt: Fp8Format) -> None:
    x = random_rows(10, 64, torch.bfloat16)
    clean_q, clean_scale = fp8.quantize_rows(x, fmt)
    x[4, 3] = float("nan")
    q, scale = fp8.quantize_rows(x, fmt)
    others = torch.arange(10) != 4
    assert_same(q[others], clean_q[others])
    assert_same(scale[others], clean_scale[others])


@FORMATS
@pytest.mark.parametrize("shape", [(5,), (0,), (0, 7), (3, 0), (0, 0), (2, 3, 4, 33), (2, 0, 4, 5), (1, 1)], ids=str)
def test_shapes(fmt: Fp8Format, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    q, scale = fp8.quantize_rows(x, fmt)
    assert (q.shape, q.dtype, q.is_contiguous()) == (x.shape, fmt.dtype, True)
    assert (scale.shape, scale.dtype) == ((*shape[:-1], 1), torch.float32)
    if x.numel():
        flat_q, flat_scale = oracle(x.reshape(-1, shape[-1]), fmt)
        assert_same(q.reshape(flat_q.shape), flat_q)
        assert_same(scale.reshape(flat_scale.shape), flat_scale)
    elif scale.numel():
        assert (scale == torch.tensor(fmt.min_scale)).all()


@FORMATS
@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::3, 5:], lambda x: x[:1].expand(4, -1)],
    ids=["transposed", "every second column", "slice", "expanded"],
)
def test_strides(fmt: Fp8Format, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(random_rows(40, 60, torch.bfloat16))
    q, scale = fp8.quantize_rows(x, fmt)
    expected_q, expected_scale = fp8.quantize_rows(x.contiguous(), fmt)
    assert_same(q, expected_q)
    assert_same(scale, expected_scale)


@FORMATS
@pytest.mark.parametrize("chunk", [1, 99, 100, 101, 350, 2600, 10**6])
def test_chunks_change_nothing(fmt: Fp8Format, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = nasty_rows(100, torch.bfloat16)
    expected_q, expected_scale = fp8.quantize_rows(x, fmt)
    monkeypatch.setattr(fp8, "_CHUNK_ELEMENTS", chunk)
    # Freed memory holds the right codes already: a row left out must show.
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.ones(shape, **options))
    q, scale = fp8.quantize_rows(x, fmt)
    assert_same(q, expected_q)
    assert_same(scale, expected_scale)


@pytest.mark.parametrize("with_amax", [False, True])
@pytest.mark.parametrize(("chunk", "mib"), [("_CHUNK_ELEMENTS", 2), ("_CHUNK_ELEMENTS_ON_GPU", 12)])
def test_temporaries_stay_small(chunk: str, mib: int, with_amax: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 16 MiB in bf16: beyond it and its codes, one buffer of 2 MiB, or with a GPU's chunks, here on a CPU,
    of 12, and nothing else above 1 MiB, for which torch's allocator would take 20 MiB of a GPU each time while vLLM
    loads."""
    monkeypatch.setattr(fp8, "_CHUNK_ELEMENTS", getattr(fp8, chunk))
    w = torch.ones(1024, 8192, dtype=torch.bfloat16)
    amax = torch.ones(1024, 1) if with_amax else None
    with temporaries(w, torch.empty(w.shape, dtype=OCP.dtype)) as sizes:
        fp8.quantize_rows(w, OCP, amax)
        fp8.quantize_rows(w[:100], OCP, None if amax is None else amax[:100])
    assert {size for size in sizes if size > 2**20} == {mib * 2**20}


def test_a_parameter_leaves_no_gradient() -> None:
    """A graph would keep the values of every chunk, in fp32, for as long as the codes live."""
    w = torch.nn.Parameter(random_rows(3, 32, torch.bfloat16))
    for found, expected in zip(fp8.quantize_rows(w, OCP), fp8.quantize_rows(w.detach(), OCP), strict=True):
        assert not found.requires_grad
        assert_same(found, expected)


@FORMATS
def test_amax_of_a_group_gives_a_shard_the_bytes_of_the_whole(fmt: Fp8Format) -> None:
    w = random_rows(16, 256, torch.bfloat16)
    q, scale = fp8.quantize_rows(w, fmt)
    shards = w.chunk(4, dim=1)
    amax = torch.stack([fp8.row_amax(shard) for shard in shards]).amax(0)
    parts = [fp8.quantize_rows(shard, fmt, amax) for shard in shards]
    assert_same(torch.cat([part for part, _ in parts], dim=1), q)
    for _, part_scale in parts:
        assert_same(part_scale, scale)


@FORMATS
def test_an_amax_below_the_row_clamps(fmt: Fp8Format) -> None:
    q, scale = fp8.quantize_rows(torch.tensor([[4.0, -8.0, 1.0]]), fmt, torch.tensor([[1.0]]))
    assert q.float().tolist() == [[fmt.max, -fmt.max, fmt.max]]
    assert_same(scale, torch.tensor([[1.0]]) / fmt.max)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_dequantize_rounds_once(dtype: torch.dtype) -> None:
    codes = all_codes(OCP)
    scale = torch.tensor([1 / 3])
    exact = codes.float().double() * scale.double()
    assert_same(fp8.dequantize(codes, scale, dtype), exact.float().to(dtype))


def test_ocp_to_fnuz_keeps_every_value() -> None:
    codes = all_codes(OCP)
    codes = codes[~codes.float().isnan()]
    scale = torch.rand(len(codes)) + 0.5
    fnuz, fnuz_scale = fp8.ocp_to_fnuz(codes, scale)
    assert fnuz.dtype == FNUZ.dtype
    assert torch.equal(fp8.dequantize(fnuz, fnuz_scale), fp8.dequantize(codes, scale))
    assert fnuz.float().abs().max() == FNUZ.max


def test_ocp_to_fnuz_of_minus_zero_and_of_nothing() -> None:
    fnuz, _ = fp8.ocp_to_fnuz(torch.tensor([-0.0]).to(OCP.dtype), torch.ones(1))
    assert fnuz.view(torch.uint8).tolist() == [0]
    assert fp8.ocp_to_fnuz(torch.empty(0, 4, dtype=OCP.dtype), torch.ones(0, 1))[0].shape == (0, 4)


def test_ocp_to_fnuz_leaves_its_input_alone() -> None:
    codes, scale = torch.tensor([-0.0, 1.0]).to(OCP.dtype), torch.ones(1)
    fnuz, fnuz_scale = fp8.ocp_to_fnuz(codes, scale)
    fnuz.view(torch.uint8).fill_(7)
    fnuz_scale.fill_(7)
    assert codes.view(torch.uint8).tolist() == [0x80, 0x38]
    assert scale.item() == 1


def test_ocp_to_fnuz_equals_quantizing_for_fnuz() -> None:
    """A checkpoint converted and one quantized on a gfx942 hold the same numbers, where no scale is at its floor."""
    w = random_rows(20, 500, torch.bfloat16)
    fnuz, scale = fp8.ocp_to_fnuz(*fp8.quantize_rows(w, OCP))
    expected, expected_scale = fp8.quantize_rows(w, FNUZ)
    assert torch.equal(scale, expected_scale)
    difference = (fnuz.float() - expected.float()).abs()
    # FNUZ has one more power of two at the bottom: only OCP's subnormals are coarser.
    assert (difference[fnuz.float().abs() > 2**-7] == 0).all()
    assert difference.max() <= 2**-11


@pytest.mark.parametrize("raw", [0x7F, 0xFF])
def test_ocp_to_fnuz_refuses_nan(raw: int) -> None:
    with pytest.raises(ValueError, match="NaN"):
        fp8.ocp_to_fnuz(torch.tensor([0, raw], dtype=torch.uint8).view(OCP.dtype), torch.ones(1))


@pytest.mark.parametrize("dtype", [FNUZ.dtype, torch.uint8, torch.bfloat16], ids=str)
def test_ocp_to_fnuz_refuses_other_codes(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=str(dtype)):
        fp8.ocp_to_fnuz(torch.zeros(3, dtype=dtype), torch.ones(1))


def test_of_dtype() -> None:
    assert fp8.of_dtype(OCP.dtype) is OCP
    assert fp8.of_dtype(FNUZ.dtype) is FNUZ
    with pytest.raises(TypeError, match="float8_e5m2 is not an E4M3 dtype: use float8_e4m3fn"):
        fp8.of_dtype(torch.float8_e5m2)
    assert fp8.for_device(torch.device("cpu")) is OCP


def test_row_amax() -> None:
    assert fp8.row_amax(torch.tensor([[1.0, -3.0], [-0.0, 0.0]])).tolist() == [[3.0], [0.0]]
    assert math.isnan(fp8.row_amax(torch.tensor([[1.0, float("nan")]])).item())
    assert fp8.row_amax(torch.tensor([[1.0, -float("inf")]])).item() == float("inf")
    assert fp8.row_amax(torch.empty(2, 0, dtype=torch.bfloat16)).tolist() == [[0.0], [0.0]]
    assert fp8.row_amax(torch.ones(2, 3, dtype=torch.float16)).dtype == torch.float32


def test_bytes_of_compressed_tensors() -> None:
    """llm-compressor's FP8_DYNAMIC weights, on fp32 input: for bf16 it rounds the scale to bf16, which we do not."""
    quantization = pytest.importorskip("compressed_tensors.quantization", exc_type=ImportError)
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = quantization.QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    w = torch.cat([random_rows(50, 512, torch.float32), finite_rows(512, torch.bfloat16)[5:].float()])
    scale, zero_point = calculate_qparams(w.amin(1, keepdim=True), w.amax(1, keepdim=True), args)
    expected = quantize(w, scale, zero_point, args, dtype=OCP.dtype)
    q, found_scale = fp8.quantize_rows(w, OCP)
    normal = (found_scale > OCP.min_scale).flatten()
    assert normal.sum() >= 50
    assert_same(found_scale[normal], scale[normal])
    assert_same(q[normal], expected[normal])
