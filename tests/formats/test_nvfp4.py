# SPDX-License-Identifier: Apache-2.0
"""NVFP4 against ml_dtypes (the codes), compressed-tensors (the bytes) and arithmetic in float64."""

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_quant_rocm.formats import fp8, nvfp4
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, finite_rows, random_rows, temporaries
from tests.nvfp4_inputs import nasty_weight, weight64

E2M1, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
SCHEME = QuantizationScheme(targets=["Linear"], **NVFP4A16)
ALL_CODES = torch.arange(16, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """compressed-tensors compiles its rounding, which gains nothing here and takes seconds for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


def compressed(w: torch.Tensor, divisor: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """compressed-tensors' three tensors of w [N, K], from fp32 as llm-compressor's observers see it."""
    w = w.float()
    if divisor is None:
        divisor = generate_gparam(w.amin(), w.amax())
    blocks = w.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights, global_scale=divisor)
    state = {"weight": w, "weight_scale": scale, "weight_global_scale": divisor}
    return NVFP4PackedCompressor.compress(state, SCHEME)


def tensors_of(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The three tensors in the order of NvFp4Weight.from_compressed_tensors."""
    return [state[f"weight_{part}"] for part in ("packed", "scale", "global_scale")]


def rows_of_weights(dtype: torch.dtype, width: int = 64) -> torch.Tensor:
    """Finite weights [R, width] with nasty rows whose magnitudes the matrix can hold together."""
    nasty = finite_rows(width, torch.float32)
    largest = nasty.abs().amax(1, keepdim=True).clamp_min(1e-30)
    return torch.cat([nasty / largest, random_rows(40, width, torch.float32) / 64]).to(dtype)


# --- codes


def test_every_code_has_its_value() -> None:
    expected = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float32)
    found = nvfp4.e2m1_decode(ALL_CODES)
    np.testing.assert_array_equal(found.numpy(), expected)
    assert_same(nvfp4.e2m1_encode(found), ALL_CODES)  # -0 included
    assert found.signbit().tolist() == [False] * 8 + [True] * 8


def test_ties_go_to_even_and_large_values_saturate() -> None:
    values = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4, 6.0: 6, 7.0: 6, 1e30: 6, float("inf"): 6}
    for value, expected in values.items():
        for sign in (1, -1):
            found = nvfp4.e2m1_decode(nvfp4.e2m1_encode(torch.tensor([sign * value])))
            assert found.item() == sign * expected, value
            for side, toward in ((value, float("inf")), (value, 0.0)):
                near = np.nextafter(np.float32(side), np.float32(toward))
                code = nvfp4.e2m1_encode(torch.tensor([sign * float(near)]))
                oracle = np.clip(np.float32(sign) * near, -6, 6).astype(E2M1).view(np.uint8)
                assert code.item() == oracle
    assert nvfp4.e2m1_encode(torch.tensor([float("nan")])).item() in (7, 15)


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=50))
@settings(max_examples=300, deadline=None)
def test_encode_equals_ml_dtypes(values: list[float]) -> None:
    x = np.array(values, dtype=np.float32)
    expected = np.clip(x, -6, 6).astype(E2M1).view(np.uint8)
    np.testing.assert_array_equal(nvfp4.e2m1_encode(torch.from_numpy(x)).numpy(), expected)


def test_packing_is_that_of_compressed_tensors() -> None:
    codes = torch.randint(0, 16, (5, 3, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = nvfp4.pack(codes)
    assert packed.shape == (5, 3, 16)
    assert packed[0, 0, 0] == codes[0, 0, 0] + 16 * codes[0, 0, 1], "the even k is the low nibble"
    assert_same(nvfp4.unpack(packed), codes)
    flat = packed.view(15, 16)
    values = nvfp4.e2m1_decode(codes).view(15, 32)
    assert_same(flat, pack_fp4_to_uint8(values))
    assert_same(values, unpack_fp4_from_uint8(flat, 15, 32, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_every_product_of_code_and_scale_is_exact(dtype: torch.dtype) -> None:
    raw = torch.arange(0x7F, dtype=torch.uint8)  # every scale that is not NaN, subnormals included
    packed = nvfp4.pack(ALL_CODES).expand(len(raw), 8).contiguous()
    found = nvfp4.block_values(packed, raw.view(torch.float8_e4m3fn)[:, None])
    codes = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float64)
    scales = raw.numpy().view(E4M3).astype(np.float64)
    np.testing.assert_array_equal(found.to(dtype).double().numpy(), scales[:, None] * codes)
    nonzero = found[found != 0].abs()
    assert (nonzero.min().item(), nonzero.max().item()) == (2**-10, 2688)


# --- quantization


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("width", [16, 64, 4096])
def test_quantize_makes_the_bytes_of_compressed_tensors(dtype: torch.dtype, width: int) -> None:
    for w in (rows_of_weights(dtype, width), random_rows(30, width, dtype), torch.randn(8, width).to(dtype)):
        found, expected = nvfp4.quantize(w), compressed(w)
        assert_same(found.scales, expected["weight_scale"])
        assert_same(found.codes, expected["weight_packed"])
        assert_same(found.global_scale, expected["weight_global_scale"].reciprocal().expand(len(w)).contiguous())
        again = NvFp4Weight.from_compressed_tensors(*tensors_of(expected))
        assert_same(again.global_scale, found.global_scale)
        assert_same(again.dequantize(), found.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_quantization_errs_by_half_a_code(dtype: torch.dtype) -> None:
    w = torch.cat([random_rows(40, 256, dtype), finite_rows(256, torch.float32).clamp(-900, 900).to(dtype)])
    weight = nvfp4.quantize(w)
    step = weight.scales.double().repeat_interleave(16, -1) * weight.global_scale.double()[:, None]
    exact, found = w.double(), weight64(weight)
    # A normal scale rounds by 2^-4, so at most 6.4 saturates to 6: less than the half code of 1. Subnormals round more.
    half = torch.where(found.abs() < 2 * step, 0.25, torch.where(found.abs() < 4 * step, 0.5, 1.0))
    live = weight.scales.float().repeat_interleave(16, -1) >= 2**-6
    assert live.float().mean() > 0.2
    bound = half * step * (1 + 1e-5)
    assert ((found - exact).abs() <= bound)[live].all()


def test_one_huge_outlier_costs_its_block_only() -> None:
    w = torch.full((4, 64), 0.01)
    w[1, 17] = -30000.0
    weight = nvfp4.quantize(w)
    found = weight.dequantize()
    assert found[1, 17].item() == pytest.approx(-30000, rel=1e-6)
    others = torch.arange(64) != 17
    assert (found[1, others] == 0).all()  # what is 2^-21 of the largest is below the smallest block scale
    # A matrix of its own keeps them.
    apart = nvfp4.quantize(torch.stack([w, torch.full((4, 64), 0.01)]))
    torch.testing.assert_close(apart.dequantize()[1], torch.full((4, 64), 0.01), rtol=1e-6, atol=0)


def test_subnormal_block_scales() -> None:
    """Blocks at 2^-17 of the largest: their scales are E4M3's subnormals, 2^-9 and a few times that."""
    w = torch.ones(8, 32)
    w[:, 16:] = torch.arange(1, 9).float()[:, None] * 2**-9 * 6 / 2688
    weight = nvfp4.quantize(w)
    assert weight.scales[:, 1].float().tolist() == [i * 2**-9 for i in range(1, 9)]
    torch.testing.assert_close(weight.dequantize(), w, rtol=1e-6, atol=0)
    assert_same(weight.codes, compressed(w)["weight_packed"])


def test_the_search_finds_the_best_of_its_block_scales() -> None:
    w = torch.cat([rows_of_weights(torch.float32), torch.randn(50, 64) ** 3])
    # Blocks, zeros among them, whose scales are the smallest of E4M3.
    tiny = torch.rand(100, 64) * torch.linspace(0.6, 4, 100)[:, None] * 2**-9 * 6 / 2688 * w.abs().max()
    tiny[:, ::5] = 0
    w = torch.cat([w, tiny, torch.zeros(1, 64)])
    found, nearest = nvfp4.quantize(w, search=True), nvfp4.quantize(w)
    assert_same(found.global_scale, nearest.global_scale)
    factor = nearest.global_scale[0].double()
    blocks = w.double().unflatten(-1, (-1, 16))

    def error(scales: torch.Tensor) -> torch.Tensor:
        unit = (scales.double() * factor).unsqueeze(-1)
        codes = torch.from_numpy((blocks / unit).numpy().astype(np.float32).astype(E2M1).astype(np.float64))
        return (codes.clamp(-6, 6) * unit - blocks).square().sum(-1)

    given = nearest.scales.view(torch.uint8).int()
    candidates = [(given + step).clamp(1, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn) for step in range(-2, 6)]
    least = torch.stack([error(scales.float()) for scales in candidates]).amin(0)
    torch.testing.assert_close(error(found.scales.float()), least, rtol=1e-4, atol=1e-15)
    assert error(found.scales.float()).sum() < 0.85 * error(nearest.scales.float()).sum()
    assert (found.scales[-1].float() == 0.125).all() and not found.codes[-1].any()


def test_zeros() -> None:
    w = torch.zeros(3, 48)
    w[1, 16:32] = 2.0
    w[2] = -0.0
    for zeros in (w, torch.zeros(2, 16), torch.full((2, 16), -0.0)):
        weight = nvfp4.quantize(zeros)
        assert torch.equal(weight.dequantize(), zeros)
        assert_same(weight.codes, compressed(zeros)["weight_packed"])
        assert_same(weight.scales, compressed(zeros)["weight_scale"])
    assert nvfp4.quantize(torch.zeros(2, 16)).global_scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [1e-37, 1e-35])
def test_a_value_too_small_for_a_global_scale_is_zero(value: float) -> None:
    """compressed-tensors too takes 1 where 2688 / amax overflows; we also where no reader would take its reciprocal."""
    weight = nvfp4.quantize(torch.full((2, 16), value))
    assert weight.global_scale.tolist() == [1.0, 1.0]
    assert (weight.dequantize() == 0).all()


def test_leading_dimensions_have_global_scales_of_their_own() -> None:
    w = torch.randn(2, 3, 5, 32) * torch.tensor([1e-3, 1.0, 1e3]).view(1, 3, 1, 1)
    weight = nvfp4.quantize(w)
    assert (weight.n, weight.k) == (5, 32)
    assert weight.codes.shape == (2, 3, 5, 16) and weight.scales.shape == (2, 3, 5, 2)
    for i in range(2):
        for j in range(3):
            one = nvfp4.quantize(w[i, j])
            assert_same(weight.codes[i, j], one.codes)
            assert_same(weight.scales[i, j], one.scales)
            assert_same(weight.global_scale[i, j], one.global_scale)
            assert_same(weight.dequantize(torch.bfloat16)[i, j], one.dequantize(torch.bfloat16))


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0, 4, 32), (3, 0, 32), (1, 16)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    weight = nvfp4.quantize(torch.ones(shape))
    assert weight.dequantize(torch.float16).shape == shape
    assert (weight.dequantize() == 1).all()
    codes, scale = nvfp4.to_fp8(weight, fp8.OCP)
    assert (codes.shape, scale.shape) == (shape, (*shape[:-1], 1))


def test_strides_do_not_matter() -> None:
    w = torch.randn(64, 96)
    for view in (w.t()[:, :48], w[::3, :32], w[1:2].expand(5, -1)):
        found, expected = nvfp4.quantize(view), nvfp4.quantize(view.contiguous())
        assert_same(found.codes, expected.codes)
        assert_same(found.scales, expected.scales)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    w = random_rows(37, 64, torch.bfloat16)
    whole = nvfp4.quantize(w)
    expected = whole.dequantize(), *nvfp4.to_fp8(whole, fp8.OCP)
    monkeypatch.setattr(nvfp4, "_CHUNK_ELEMENTS", 256)
    parts = nvfp4.quantize(w)
    assert_same(parts.codes, whole.codes)
    assert_same(parts.scales, whole.scales)
    for found, one in zip((parts.dequantize(), *nvfp4.to_fp8(parts, fp8.OCP)), expected, strict=True):
        assert_same(found, one)


def test_temporaries_stay_small() -> None:
    """A weight of 16 MiB in bf16: beyond it and the result, chunks of 4 MiB, and twice that in a step of each."""
    w = torch.ones(1024, 8192, dtype=torch.bfloat16)
    weight = nvfp4.quantize(w)
    for make in (
        lambda: nvfp4.quantize(w),
        lambda: weight.dequantize(torch.bfloat16),
        lambda: nvfp4.to_fp8(weight, fp8.OCP),
    ):
        with temporaries(w, weight.codes, weight.scales, torch.empty(w.shape, dtype=fp8.OCP.dtype)) as sizes:
            make()
        assert max(sizes) <= 8 * 2**20


@pytest.mark.parametrize("search", [False, True])
def test_a_parameter_leaves_no_gradient(search: bool) -> None:
    """Products of the weight would have one, and copy.deepcopy refuses what has one."""
    w = torch.nn.Parameter(random_rows(3, 32, torch.bfloat16))
    weight = nvfp4.quantize(w, search=search)
    assert not any(part.requires_grad for part in (weight.codes, weight.scales, weight.global_scale))
    assert_same(weight.dequantize(), nvfp4.quantize(w.detach(), search=search).dequantize())


def test_a_given_global_scale_is_taken() -> None:
    w = torch.randn(6, 32)
    shared = nvfp4.global_scale_of(nvfp4.amax_of(w)) * 3
    weight = nvfp4.quantize(w, shared)
    assert_same(weight.global_scale, shared.expand(6).contiguous())
    expected = compressed(w, shared.reciprocal().reshape(1))
    assert_same(weight.codes, expected["weight_packed"])
    assert_same(weight.scales, expected["weight_scale"])
    rows = torch.linspace(1, 2, 500)  # of some of which the reciprocal's reciprocal is another number
    assert (rows.reciprocal().reciprocal() != rows).any()
    assert_same(nvfp4.quantize(torch.randn(500, 16), rows).global_scale, rows)


@pytest.mark.parametrize("shape", [(3, 5, 32), (4, 4, 32), (2, 3, 3, 16)], ids=str)
def test_a_given_global_scale_of_each_matrix_is_that_of_its_rows(shape: tuple[int, ...]) -> None:
    """As many experts as rows too, where one dimension could pass for the other."""
    size = 10.0 ** torch.arange(math.prod(shape[:-2])).view(*shape[:-2], 1, 1)
    w = torch.randn(shape) * size
    found, expected = nvfp4.quantize(w, nvfp4.global_scale_of(nvfp4.amax_of(w))), nvfp4.quantize(w)
    for part in ("codes", "scales", "global_scale"):
        assert_same(getattr(found, part), getattr(expected, part))


def test_a_global_scale_that_is_too_small_saturates() -> None:
    w = torch.full((1, 16), 100.0)
    weight = nvfp4.quantize(w, torch.tensor(1 / 2688))
    assert weight.dequantize().flatten().tolist() == [pytest.approx(1.0)] * 16


# --- both conventions


def modelopt(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ModelOpt's three tensors of w [N, K], by its formulas in numpy."""
    blocks = w.float().numpy().reshape(len(w), -1, 16)
    global_scale = np.float32(np.abs(blocks).max() / np.float32(2688))
    scale = (np.abs(blocks).max(-1) / (np.float32(6) * global_scale)).clip(2**-9, 448).astype(E4M3)
    quotient = blocks / (scale.astype(np.float32) * global_scale)[..., None]
    codes = np.clip(quotient, -6, 6).astype(E2M1).view(np.uint8).reshape(len(w), -1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return (
        torch.from_numpy(packed),
        torch.from_numpy(scale.view(np.uint8)).view(fp8.OCP.dtype),
        torch.tensor(global_scale),
    )


def decoded64(packed: torch.Tensor, scale: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """The values of three tensors in float64; `multiplier` [N, 1]."""
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(len(packed), -1)
    values = torch.from_numpy(codes.view(E2M1).astype(np.float64))
    return values * scale.double().repeat_interleave(16, -1) * multiplier.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_dequantize_rounds_the_exact_product_once(dtype: torch.dtype) -> None:
    weight = nasty_weight(50, 96)
    product = weight64(weight)
    expected = product.float().to(dtype)  # at most 6 + 24 bits: the fp32 product is the rounded exact one
    assert_same(weight.dequantize(dtype), expected)


def test_both_conventions_hold_one_weight() -> None:
    w = random_rows(20, 64, torch.float32)
    from_ct = NvFp4Weight.from_compressed_tensors(*tensors_of(compressed(w)))
    from_mo = NvFp4Weight.from_modelopt(from_ct.codes, from_ct.scales, from_ct.global_scale[0])
    assert_same(from_mo.dequantize(), from_ct.dequantize())
    packed, scale, multiplier = modelopt(w)
    found = NvFp4Weight.from_modelopt(packed, scale, multiplier)
    torch.testing.assert_close(found.dequantize().double(), decoded64(packed, scale, multiplier), rtol=1e-7, atol=0)


def test_decompression_agrees_with_compressed_tensors() -> None:
    w = random_rows(20, 64, torch.float32)
    state = compressed(w)
    found = NvFp4Weight.from_compressed_tensors(*tensors_of(state)).dequantize()
    theirs = NVFP4PackedCompressor.decompress(state, SCHEME)["weight"]
    assert theirs.dtype == torch.bfloat16
    torch.testing.assert_close(found, theirs.float(), rtol=2**-8, atol=0)


def test_shards_keep_their_scales() -> None:
    shards = [torch.randn(n, 32) * size for n, size in ((8, 1e-3), (4, 1.0), (6, 50.0))]
    parts = [modelopt(shard) for shard in shards]
    packed, scale = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    multipliers = torch.stack([p[2] for p in parts])
    fused = NvFp4Weight.from_modelopt(packed, scale, multipliers, shards=[8, 4, 6])
    expected = torch.cat([NvFp4Weight.from_modelopt(*part).dequantize() for part in parts])
    assert_same(fused.dequantize(), expected)
    assert ((fused.dequantize() - torch.cat(shards)).norm() / torch.cat(shards).norm()).item() < 0.15
    divided = NvFp4Weight.from_compressed_tensors(packed, scale, multipliers.reciprocal(), shards=[8, 4, 6])
    torch.testing.assert_close(divided.dequantize(), expected, rtol=1e-6, atol=0)
    by_row = NvFp4Weight.from_modelopt(packed, scale, multipliers.repeat_interleave(torch.tensor([8, 4, 6])))
    assert_same(by_row.dequantize(), expected)


@pytest.mark.parametrize(
    ("shape", "shards", "rows"),
    [
        ((), None, [[1] * 6] * 3),
        ((1,), None, [[1] * 6] * 3),
        ((1,), [2, 4], [[1] * 6] * 3),
        ((3,), None, [[1] * 6, [2] * 6, [3] * 6]),
        ((3, 1), None, [[1] * 6, [2] * 6, [3] * 6]),
        ((3, 2), [2, 4], [[1, 1, 2, 2, 2, 2], [3, 3, 4, 4, 4, 4], [5, 5, 6, 6, 6, 6]]),
        ((3, 6), None, [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17, 18]]),
    ],
    ids=str,
)
def test_global_scales_of_experts(shape: tuple[int, ...], shards: list[int] | None, rows: list[list[int]]) -> None:
    weight = nvfp4.quantize(torch.randn(3, 6, 16))
    count = int(torch.Size(shape).numel())
    given_scale = torch.arange(1, count + 1).float().view(shape)
    found = NvFp4Weight.from_modelopt(weight.codes, weight.scales, given_scale, shards).global_scale
    assert found.tolist() == rows


def test_minus_zero_scales_become_zero() -> None:
    weight = nvfp4.quantize(torch.randn(4, 32))
    scales = weight.scales.clone()
    scales.view(torch.uint8)[2, 1] = 0x80
    found = NvFp4Weight.from_modelopt(weight.codes, scales, torch.tensor(1.0))
    assert not (found.scales.view(torch.uint8) & 0x80).any()
    assert (found.dequantize()[2, 16:] == 0).all()
    assert scales.view(torch.uint8)[2, 1] == 0x80, "the checkpoint's tensor is not written to"


# --- what goes wrong

CODES, SCALES, ONE = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2).to(torch.float8_e4m3fn), torch.tensor(1.0)


def with_byte(byte: int) -> torch.Tensor:
    scales = SCALES.clone()
    scales.view(torch.uint8)[3, 1] = byte
    return scales


@pytest.mark.parametrize(
    ("codes", "scales", "global_scale", "shards", "error", "message"),
    [
        (CODES, with_byte(0xB8), ONE, None, ValueError, "q.weight_scale holds 1 negative block scales of 8: "),
        (CODES, with_byte(0x7F), ONE, None, ValueError, "q.weight_scale holds 1 NaN block scales of 8: "),
        (CODES, with_byte(0xFF), ONE, None, ValueError, "q.weight_scale holds 1 NaN block scales"),
        (CODES, SCALES, ONE * 0, None, ValueError, "{g} is 0; a global scale is positive and finite"),
        (CODES, SCALES, -ONE, None, ValueError, "{g} is -1; a global scale is positive"),
        (CODES, SCALES, ONE * float("nan"), None, ValueError, "{g} is nan; a global scale is positive"),
        (CODES, SCALES, ONE * float("inf"), None, ValueError, "{g} is inf; a global scale is positive"),
        (CODES, SCALES, ONE * 1e-38, None, ValueError, r"{g} is 1e-38; .* \(1e-37 to 1e\+37\)"),
        (CODES, SCALES, torch.tensor([1.0, 0.0]), [2, 2], ValueError, "{g} is 0; a global scale is positive"),
        (CODES, SCALES, None, None, ValueError, "{g} is missing: "),
        (CODES, None, ONE, None, ValueError, "q.weight_scale is missing: "),
        (None, SCALES, ONE, None, ValueError, "{w} is missing: "),
        (CODES.int(), SCALES, ONE, None, TypeError, "{w} is torch.int32; NVFP4 codes are uint8"),
        (CODES, SCALES.float(), ONE, None, TypeError, "q.weight_scale is torch.float32; .* are float8_e4m3fn"),
        (CODES, SCALES, torch.tensor(1), None, TypeError, "{g} is torch.int64; a global scale is fp32"),
        (
            CODES,
            SCALES[:, :1],
            ONE,
            None,
            ValueError,
            r"q.weight_scale has shape \(4, 1\); {w} \(4, 16\) needs \(4, 2\)",
        ),
        (CODES, SCALES.t(), ONE, None, ValueError, r"q.weight_scale has shape \(2, 4\)"),
        (CODES[:, :12], SCALES, ONE, None, ValueError, "{w} has 24 columns, no multiple of 16: .* keep this layer"),
        (CODES[0], SCALES, ONE, None, ValueError, r"{w} has shape \(16,\); it must be \[..., N, K/2\]"),
        (CODES, SCALES, torch.ones(2), None, ValueError, r"{g} has shape \(2,\), which fits .* or one a shard"),
        (CODES, SCALES, torch.ones(3), [2, 2], ValueError, r"{g} has shape \(3,\)"),
        (CODES, SCALES, torch.ones(2), [2, 3], ValueError, r"{g}: the shards \[2, 3\] have 5 rows, the weight has 4"),
        (CODES, SCALES.to("meta"), ONE, None, ValueError, "q.weight_scale is on meta, {w} on cpu; move them"),
    ],
)
@pytest.mark.parametrize("convention", ["modelopt", "compressed_tensors"])
def test_refusals(
    convention: str, codes: Any, scales: Any, global_scale: Any, shards: Any, error: type[Exception], message: str
) -> None:
    names = {
        "modelopt": ("q.weight", "q.weight_scale_2"),
        "compressed_tensors": ("q.weight_packed", "q.weight_global_scale"),
    }
    w, g = names[convention]
    build = getattr(NvFp4Weight, f"from_{convention}")
    with pytest.raises(error, match=f"^{message.replace('{w}', w).replace('{g}', g)}"):
        build(codes, scales, global_scale, shards, "q.weight")


@pytest.mark.parametrize(
    ("w", "global_scale", "error", "message"),
    [
        (torch.ones(4, 24), None, ValueError, "o.weight has 24 columns, no multiple of 16"),
        (torch.ones(16), None, ValueError, r"o.weight has shape \(16,\); a weight is \[..., N, K\]"),
        (torch.ones(4, 16).double(), None, TypeError, "o.weight is torch.float64; NVFP4 is made of"),
        (torch.full((4, 16), float("nan")), None, ValueError, "o.weight holds NaN or infinity"),
        (torch.full((4, 16), float("inf")), ONE, ValueError, "o.weight holds NaN or infinity"),
        (torch.ones(4, 16), torch.tensor(0.0), ValueError, "the global scale of o.weight is 0"),
        (torch.ones(4, 16), torch.ones(3), ValueError, r"the global scale of o.weight has shape \(3,\)"),
    ],
)
def test_quantize_refuses(w: torch.Tensor, global_scale: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nvfp4.quantize(w, global_scale, "o.weight")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"global_scale": torch.ones(4).double()}, TypeError, "global_scale is torch.float64; it must be fp32"),
        ({"global_scale": torch.ones(())}, ValueError, r"global_scale has shape \(\); .* one value a row, \(4,\)"),
        ({"codes": CODES.int()}, TypeError, "codes is torch.int32"),
        ({"scales": SCALES[1:]}, ValueError, r"scales has shape \(3, 2\)"),
        ({"global_scale": torch.ones(4, device="meta")}, ValueError, "global_scale is on meta, codes on cpu; move"),
    ],
    ids=str,
)
def test_the_object_checks_its_tensors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NvFp4Weight(**{"codes": CODES, "scales": SCALES, "global_scale": torch.ones(4)} | changes)


# --- activations


def quantized32(x: torch.Tensor, input_global: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes [M, K/16, 16] and scales [M, K/16, 1] by the formulas in numpy's fp32, with ml_dtypes' roundings."""
    blocks, given = x.float().numpy().reshape(len(x), -1, 16), np.float32(input_global)
    exact = given * (np.abs(blocks).max(-1, keepdims=True) / np.float32(6))
    scale = np.clip(exact, np.float32(-448), np.float32(448)).astype(E4M3)
    scale = np.where(scale == 0, np.float32(0), scale).astype(E4M3)  # not -0
    size = scale.astype(np.float32)
    encode = np.divide(given, size, out=np.zeros_like(size), where=size != 0)
    return np.clip(blocks * encode, -6, 6).astype(E2M1), scale


def assert_quantizes(x: torch.Tensor, input_global: float) -> None:
    """`quantize_activation` gives the bytes of `quantized32`, and `fake_quantize_activation` their values."""
    codes, scale = quantized32(x, input_global)
    found = nvfp4.quantize_activation(x, torch.tensor(input_global))
    assert_same(nvfp4.unpack(found[0]), torch.from_numpy(codes.view(np.uint8)).view(x.shape))
    assert_same(found[1].view(torch.uint8), torch.from_numpy(scale.view(np.uint8)).view(found[1].shape))
    values = codes.astype(np.float32) * (scale.astype(np.float32) / np.float32(input_global))
    faked = nvfp4.fake_quantize_activation(x, torch.tensor(input_global))
    assert_same(faked, torch.from_numpy(values).view(x.shape).to(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("input_global", [2.0**-6, 1.0, 2.0**9, 0.37, 2688 / 7, -0.37, -1000.0])
def test_activations_are_quantized_by_the_formulas(dtype: torch.dtype, input_global: float) -> None:
    assert_quantizes(torch.cat([random_rows(60, 64, dtype), rows_of_weights(dtype)]), input_global)


@pytest.mark.parametrize("input_global", [0.37, 3.1, 117.3, 2688 / 7])
def test_scales_of_activations_at_ties_of_e4m3(input_global: float) -> None:
    """Where the last bit of fp32 decides: no other order of the formula's product and quotient will do."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    largest = torch.from_numpy((numbers[:-1] + numbers[1:]) / 2 * np.float32(6) / np.float32(input_global))
    around = torch.cat([(largest.view(torch.int32) + step).view(torch.float32) for step in range(-3, 4)])
    assert_quantizes(torch.linspace(-1, 1, 16) * around[:, None], input_global)


def test_fake_quantization_equals_compressed_tensors() -> None:
    x = random_rows(60, 64, torch.float32)
    args = NVFP4["input_activations"]
    for divisor in (generate_gparam(x.amin(), x.amax()), torch.tensor([0.37]), torch.tensor([1e4])):
        blocks = x.unflatten(-1, (-1, 16))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=divisor)
        expected = fake_quantize(x, scale, None, args, global_scale=divisor)
        found = nvfp4.fake_quantize_activation(x, divisor)
        close = torch.isclose(found, expected, rtol=1e-6, atol=0)
        assert close.float().mean() > 0.999, "only a value at a tie may differ"


def test_fake_quantization_of_nasty_blocks() -> None:
    x = torch.zeros(6, 32)
    x[1, :16], x[1, 16:] = 1e-12, -0.0
    x[2, 3] = float("nan")
    x[3, 3] = 1e30
    x[4] = torch.linspace(-6, 6, 32)
    found = nvfp4.fake_quantize_activation(x, torch.tensor(1.0))
    assert (found[0] == 0).all() and (found[1] == 0).all() and (found[5] == 0).all()
    assert found[2, :16].isnan().all() and (found[2, 16:] == 0).all()
    assert found[3, 3] == 2688 and (found[3, torch.arange(32) != 3] == 0).all()
    assert_quantizes(x[4:5], 1.0)
    with pytest.raises(ValueError, match="x has 24 columns"):
        nvfp4.fake_quantize_activation(torch.ones(2, 24), ONE)
    assert nvfp4.fake_quantize_activation(torch.ones(2, 0, 16).half(), ONE).shape == (2, 0, 16)


def test_the_bytes_of_a_block_that_holds_nan() -> None:
    x = torch.zeros(2, 32)
    x[0, 3], x[1, 20] = float("nan"), -float("nan")
    codes, scales = nvfp4.quantize_activation(x, ONE)
    assert scales.isnan().tolist() == [[True, False], [False, True]]
    assert nvfp4.unpack(codes).tolist() == [[7] * 16 + [0] * 16, [0] * 16 + [7] * 16], "6 is 7, and no sign"


# --- FP8


def every_product() -> NvFp4Weight:
    """[127, 16]: a row for every scale that is not NaN, with all codes, under a global scale of 1."""
    codes = nvfp4.pack(ALL_CODES).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    return NvFp4Weight(codes, scales, torch.ones(127))


FP8 = pytest.mark.parametrize(
    ("fmt", "factor", "codes"),
    [(fp8.OCP, 6.0, ml_dtypes.float8_e4m3fn), (fp8.FNUZ, 12.0, ml_dtypes.float8_e4m3fnuz)],
    ids=["ocp", "fnuz"],
)


def rounded_quotients(weight: NvFp4Weight, factor: float, codes: type) -> torch.Tensor:
    """e2m1 * e4m3 / factor in fp32, rounded once to `codes` by ml_dtypes. 0 is positive: FNUZ has no -0."""
    products = weight64(NvFp4Weight(weight.codes, weight.scales, torch.ones_like(weight.global_scale)))
    return torch.from_numpy((products / factor).numpy().astype(codes).astype(np.float32)) + 0.0


@FP8
def test_fp8_rounds_every_product_once(fmt: fp8.Fp8Format, factor: float, codes: type) -> None:
    weight = every_product()
    found, scale = nvfp4.to_fp8(weight, fmt)
    assert_same(scale, torch.full((127, 1), factor))
    assert_same(found.float() + 0.0, rounded_quotients(weight, factor, codes))
    assert found.float().abs().max() == fmt.max


@FP8
def test_fp8_of_a_nasty_weight(fmt: fp8.Fp8Format, factor: float, codes: type) -> None:
    weight = nasty_weight(30, 128, 2)
    found, scale = nvfp4.to_fp8(weight, fmt)
    assert_same(scale, (weight.global_scale * factor).unsqueeze(-1))
    assert_same(found.float() + 0.0, rounded_quotients(weight, factor, codes))
    assert bool(found[:, :2].float().eq(0).all())


@FP8
def test_fp8_keeps_six_and_its_halves_exactly(fmt: fp8.Fp8Format, factor: float, codes: type) -> None:
    """All else is rounded to 4 significant bits, or to the step of the denormals."""
    weight = every_product()
    found, values = fp8.dequantize(*nvfp4.to_fp8(weight, fmt)).double(), weight64(weight)
    smallest = torch.finfo(fmt.dtype).smallest_normal * factor
    assert smallest == 6 * 2.0**-6
    kept = (torch.arange(16) % 8 == torch.tensor([[3], [5], [7]])).any(0) & (values.abs() >= smallest)
    assert kept.sum() > 600
    assert_same(found[kept], values[kept])
    assert bool(((found - values).abs() <= (values.abs() / 17).clamp_min(smallest / 16)).all())


@FP8
@pytest.mark.parametrize("spread", [1.0, 1e-3], ids=["rows alike", "rows of many sizes"])
def test_fp8_errs_half_as_much_as_under_scales_of_rows(
    fmt: fp8.Fp8Format, factor: float, codes: type, spread: float
) -> None:
    """Though under the scale of its own largest magnitude a small row has no denormals."""
    w = torch.randn(64, 2048) * torch.logspace(0, math.log10(spread), 64).unsqueeze(1)
    weight = nvfp4.quantize(w)
    values = weight64(weight)
    size = values.norm(dim=1)
    ours = (fp8.dequantize(*nvfp4.to_fp8(weight, fmt)) - values).norm(dim=1) / size
    others = (fp8.dequantize(*fp8.quantize_rows(weight.dequantize(), fmt)) - values).norm(dim=1) / size
    assert ours.mean() < 0.6 * others.mean()
    assert ours.max() < 0.02 < others.mean()
