# SPDX-License-Identifier: Apache-2.0
"""ops.reduce_norm_quant on the CPU, for one rank, where the reference runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, ops, reference
from llm_quant_rocm.formats import fp8, nvfp4
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Result, ScaleLayout, Target, arrange_scales
from llm_quant_rocm.ops.reduce_norm_quant import BACKENDS, MAX_COLUMNS, Call
from llm_quant_rocm.reference.rms_norm_quant import rms_norm
from tests.inputs import assert_same, nasty_rows, random_rows

OPERATOR = torch.ops.llm_quant_rocm.reduce_norm_quant.default
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
WITH_RESIDUAL = pytest.mark.parametrize("with_residual", [False, True], ids=["norm", "add_norm"])


def compare(found: Result, expected: Result) -> None:
    for part, whole in zip(found, expected, strict=True):
        assert (part is None) == (whole is None)
        if part is not None and whole is not None:
            assert_same(part, whole)


@HALVES
@WITH_RESIDUAL
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_is_the_separate_operators(dtype: torch.dtype, with_residual: bool, bias: float) -> None:
    x, weight, given = nasty_rows(80, dtype), torch.linspace(-2, 2, 80), torch.tensor([37.0])
    weight[3:6] = -0.0
    residual = x.flip(0) if with_residual else None
    normed, z = rms_norm(x, weight + bias if bias else weight, 1e-5, residual)
    common: dict[str, Any] = {"eps": 1e-5, "weight_bias": bias, "normed": True}
    compare(ops.reduce_norm_quant(x, weight, residual, quantization="none", **common), Result(z, normed, None, None))
    compare(ops.reduce_norm_quant(x, weight, residual, **common), Result(z, normed, *ops.per_token_quant_fp8(normed)))
    for divisor in (given, given / 4096):  # under the second one codes saturate
        static = (normed.float() * (1 / divisor)).clamp(-448, 448).to(torch.float8_e4m3fn)
        found = ops.reduce_norm_quant(x, weight, residual, quantization="fp8_static", scale=divisor, **common)
        compare(found, Result(z, normed, static, None))
    for layout in ScaleLayout:
        found = ops.reduce_norm_quant(x, weight, residual, quantization="nvfp4", scale=given, layout=layout, **common)
        codes, scales = nvfp4.quantize_activation(normed, given)
        compare(found, Result(z, normed, codes, arrange_scales(scales, layout)))


@HALVES
def test_against_float64(dtype: torch.dtype) -> None:
    """The sum of three ranks, its norm and its codes, but for the roundings that the definition names."""
    xs = [random_rows(30, 160, dtype, seed) for seed in range(3)]
    residual, weight = random_rows(30, 160, dtype, 3), torch.linspace(-2, 2, 160)
    norm = Norm(weight, 1e-5, 1.0, torch.tensor([150.0]))
    found = reference.reduce_norm_quant(xs, residual, norm, Target(Quantization.NVFP4))
    total = sum(x.double() for x in xs)
    eps = torch.finfo(dtype).eps
    size = sum(x.double().abs() for x in xs) + residual.double().abs()
    assert ((found.residual.double() - total - residual.double()).abs() <= eps * size).all()
    z = found.residual.double()
    expected = z / (z.square().mean(1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1)
    assert found.normed is not None and found.codes is not None and found.scales is not None
    assert ((found.normed.double() - expected).abs() <= expected.abs() * eps * 0.51 + 1e-7).all()
    values = nvfp4.block_values(found.codes, found.scales).double() / 150
    largest = found.normed.double().abs().unflatten(1, (10, 16)).amax(-1).repeat_interleave(16, 1)
    assert ((values - found.normed.double()).abs() <= largest / 6 * 1.07 + 1e-5).all()
    per_token = reference.reduce_norm_quant(xs, residual, norm, Target(Quantization.FP8_PER_TOKEN))
    assert per_token.codes is not None and per_token.scales is not None
    decoded = fp8.dequantize(per_token.codes, per_token.scales).double()
    largest = found.normed.double().abs().amax(1, keepdim=True)
    assert ((decoded - found.normed.double()).abs() <= found.normed.double().abs() / 16 + largest * 2e-5).all()


@pytest.mark.parametrize("layout", list(ScaleLayout))
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (8, 4), (9, 5), (130, 7), (256, 8), (0, 4)])
def test_layouts_of_scales(layout: ScaleLayout, rows: int, blocks: int) -> None:
    """Byte by byte where the page of the format says; zeros elsewhere."""
    scales = torch.arange(rows * blocks).remainder(120).add(1).to(torch.uint8).view(rows, blocks)
    found = arrange_scales(scales.view(torch.float8_e4m3fn), layout)
    tile, tiles = {"linear": 0, "128x4": 128, "8x4": 8}[layout], -(-blocks // 4)
    padded = (-(-rows // tile) * tile, 4 * tiles) if tile else (rows, blocks)
    assert found.shape == layout.shape(rows, blocks) == padded
    expected = torch.zeros(found.numel(), dtype=torch.uint8)
    for m in range(rows):
        for k in range(blocks):
            place = {
                "linear": m * blocks + k,
                "128x4": (m // 128 * tiles + k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4,
                "8x4": (m // 8 * tiles + k // 4) * 32 + m % 8 * 4 + k % 4,
            }[layout]
            expected[place] = scales[m, k]
    assert torch.equal(found.contiguous().view(torch.uint8).flatten(), expected)


@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 3, 32), (2, 0, 16)], ids=str)
@pytest.mark.parametrize("quantization", list(Quantization))
@WITH_RESIDUAL
def test_shapes_and_fakes(shape: tuple[int, ...], quantization: Quantization, with_residual: bool) -> None:
    x, weight = torch.randn(shape).bfloat16(), torch.ones(shape[-1])
    scale = torch.ones(1, 1, 1, 1) if quantization in ("fp8_static", "nvfp4") else None
    for layout in ScaleLayout if quantization == "nvfp4" else (ScaleLayout.LINEAR,):
        arguments = (x, x if with_residual else None, weight, scale, 1e-6, 0.0, "", quantization, layout, True)
        torch.library.opcheck(OPERATOR, arguments)
        found = ops.reduce_norm_quant(
            x, weight, arguments[1], quantization=quantization, scale=scale, layout=layout, normed=True
        )
        assert found.residual.shape == shape
        if found.codes is not None:
            assert found.codes.shape == (*shape[:-1], shape[-1] // (2 if quantization == "nvfp4" else 1))


@WITH_RESIDUAL
def test_rows_that_overlap(with_residual: bool) -> None:
    x = random_rows(1, 18, torch.bfloat16)[0].unfold(0, 16, 1)
    arguments = (x, x if with_residual else None, torch.ones(16), torch.ones(()))
    torch.library.opcheck(OPERATOR, (*arguments, 1e-6, 0.0, "", "nvfp4", "linear", True))


def test_strides_and_memory() -> None:
    wide, weight = random_rows(12, 160, torch.bfloat16), torch.linspace(-2, 2, 160)
    x, residual = wide[::2, ::2], wide[1::2, 80:]
    before = wide.clone()
    found = ops.reduce_norm_quant(x, weight[::2], residual, normed=True)
    compare(found, ops.reduce_norm_quant(x.clone(), weight[::2].clone(), residual.clone(), normed=True))
    for part in (*found, ops.reduce_norm_quant(x, weight[::2]).residual):
        if part is not None:
            part.view(torch.uint8).fill_(1)
    assert torch.equal(wide, before)


def test_compiles_to_one_graph() -> None:
    weight = torch.ones(48)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = ops.reduce_norm_quant(x, weight, x * 2)
        assert found.codes is not None and found.scales is not None
        return found.residual, found.codes, found.scales

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (2, 3, 20):
        x = random_rows(count, 48, torch.bfloat16)
        for found, expected in zip(compiled(x), function(x), strict=True):
            assert_same(found, expected)


X, W, S = torch.zeros(2, 16).bfloat16(), torch.ones(16), torch.ones(1)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X.float(), W), {}, TypeError, "x is torch.float32, not bf16 or fp16"),
        ((X, W.int()), {}, TypeError, "weight is torch.int32"),
        ((X, W[:15]), {}, ValueError, r"weight has shape \(15,\) on cpu; x \(2, 16\)"),
        ((X, W.to("meta")), {}, ValueError, r"weight has shape \(16,\) on meta; x \(2, 16\) on cpu"),
        ((X[0, 0], W[0]), {}, ValueError, r"weight has shape \(\) on cpu; x \(\)"),
        ((X[:, :8], W[:8]), {}, ValueError, "x has 8 columns, no multiple of 16"),
        ((X[:, :0], W[:0]), {}, ValueError, "x has 0 columns, no multiple of 16"),
        ((X, W, X[:1]), {}, ValueError, "residual is torch.bfloat16 .*must agree"),
        ((X, W, X.half()), {}, ValueError, "residual is torch.float16 .*must agree"),
        ((X, W, X.to("meta")), {}, ValueError, "residual is .* on meta, .*must agree"),
        ((X, W), {"quantization": "int8"}, ValueError, "'int8' is no quantization: use none, fp8_per_token"),
        ((X, W), {"layout": "4x4"}, ValueError, "'4x4' is no layout of scales: use linear, 128x4, 8x4"),
        ((X, W), {"layout": "8x4"}, ValueError, "only NVFP4's scales have the layout 8x4"),
        ((X, W), {"quantization": "none"}, ValueError, "leaves nothing to return"),
        ((X, W), {"quantization": "nvfp4"}, ValueError, "need a scale and others take none"),
        ((X, W), {"scale": S}, ValueError, "need a scale and others take none"),
        ((X, W), {"quantization": "nvfp4", "scale": S.half()}, ValueError, "scale is torch.float16"),
        ((X, W), {"quantization": "nvfp4", "scale": torch.ones(2)}, ValueError, r"scale is torch.float32 \(2,\)"),
        ((X, W), {"quantization": "nvfp4", "scale": S.to("meta")}, ValueError, "scale is .* on meta; it is one fp32"),
        ((X, W), {"group": "tp:7"}, ValueError, "no ranks are registered under 'tp:7'"),
    ],
    ids=["x", "weight dtype", "weight", "weight device", "scalar", "columns", "no columns", "residual",
         "residual dtype", "residual device", "quantization", "layout", "linear", "nothing", "no scale", "scale",
         "scale dtype", "scales", "scale device", "group"],
)  # fmt: skip
def test_refusals(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.reduce_norm_quant(*arguments, **options)


@pytest.mark.parametrize(
    ("columns", "world", "obstacle", "fused", "triton"),
    [
        (4096, 2, None, None, None),
        (MAX_COLUMNS, 8, None, None, None),
        (4096, 1, None, "one rank has nothing to add up", None),
        (4096, 2, "GPUs are far apart", "GPUs are far apart", None),
        (MAX_COLUMNS + 16, 2, None, "do not fit in registers", "do not fit in registers"),
    ],
    ids=["ranks", "wide", "alone", "obstacle", "too wide"],
)
def test_who_serves_on_a_gpu(columns: int, world: int, obstacle: str | None, fused: Any, triton: Any) -> None:
    pytest.importorskip("triton")
    call = Call(hardware.amd("gfx942"), columns, world, obstacle)
    for backend, reason in zip(BACKENDS, (fused, triton, None), strict=True):
        found = backend.refusal(call)
        assert (found is None) == (reason is None) and (reason or "") in (found or "")


@pytest.mark.parametrize("page", ["amd.md", "fusion.md"])
def test_the_docs_name_the_widest_rows(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    assert f"more than {MAX_COLUMNS}" in text and f"from {MAX_COLUMNS} on" not in text
