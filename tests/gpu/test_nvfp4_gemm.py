# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 GEMM on a GPU whose kernel reads packed weights, against float64."""

from typing import Any, NamedTuple

import pytest
import torch

from llm_quant_rocm import hardware, ops, tuning
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from tests.inputs import assert_same
from tests.nvfp4_inputs import nasty_weight, weight64
from tests.ops.test_nvfp4_gemm import exact_operands

HOPPER = torch.cuda.is_available() and hardware.detect(torch.device("cuda")).arch == "sm_90"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


class Split(NamedTuple):
    """Of the kernel that splits K within a program."""

    block_m: int
    split_k: int
    programs: int = 0
    consumers: int = 4
    cluster: int = 1


# Of every kind: whole and split sums, each tile size, both depths, 4 and 8 warps.
CONFIGS = [
    (16, 64, 128, 0, 2, 3, 4),
    (16, 64, 128, 7, 2, 3, 4),
    (16, 64, 64, 528, 4, 3, 4),
    (16, 128, 64, 1, 2, 4, 8),
    (32, 64, 128, 40, 2, 2, 4),
    (64, 128, 64, 53, 2, 4, 8),
    (64, 64, 128, 264, 2, 2, 4),
    (128, 64, 64, 11, 2, 3, 4),
    (128, 128, 64, 132, 2, 3, 8),
    (256, 64, 64, 0, 2, 3, 4),
    (256, 128, 64, 0, 2, 3, 8),
    # The kernel that splits K within a program: a tile each, and tiles shared among programs.
    Split(8, 4),
    Split(16, 4),
    Split(32, 2),
    Split(64, 4),
    Split(64, 2),
    Split(96, 4),
    Split(96, 2),
    Split(128, 4),
    Split(128, 2),
    Split(8, 4, 132),
    Split(8, 2, 5),
    Split(16, 4, 3),
    Split(32, 4, 128),
    Split(32, 2, 1),
    Split(64, 4, 11),
    Split(64, 2, 132),
    Split(128, 4, 5),
    Split(128, 2, 132),
    # Two programs on a multiprocessor, clusters, and both.
    Split(8, 2),
    Split(8, 4, 264),
    Split(8, 2, 200),
    Split(8, 2, consumers=2),
    Split(16, 2, consumers=2),
    Split(64, 2, consumers=2),
    Split(8, 2, 264, consumers=2),
    Split(32, 2, 7, consumers=2),
    Split(64, 2, 256, consumers=2),
    Split(8, 4, cluster=2),
    Split(8, 4, cluster=4),
    Split(16, 4, cluster=3),
    Split(32, 4, cluster=4),
    Split(64, 4, cluster=3),
    Split(128, 4, cluster=2),
    Split(128, 4, cluster=4),
    Split(64, 2, cluster=4),
    Split(128, 2, cluster=2),
    Split(8, 2, consumers=2, cluster=3),
    Split(32, 2, consumers=2, cluster=2),
    Split(64, 2, consumers=2, cluster=4),
    # The kernel for many tokens.
    (256, 128, 2),
    (256, 128, 1),
    (256, 128, 0),
    (256, 64, 0),
    (128, 256, 2),
    (128, 128, 2),
    (128, 128, 2, 3),
]


def cuda(weight: NvFp4Weight) -> NvFp4Weight:
    return NvFp4Weight(weight.codes.cuda(), weight.scales.cuda(), weight.global_scale.cuda())


def config_of(values: tuple[int, ...]) -> Any:
    from llm_quant_rocm.kernels import nvfp4_wgmma, nvfp4_wgmma_large_tiles, nvfp4_wgmma_split_tiles

    if isinstance(values, Split):
        return nvfp4_wgmma_split_tiles.Config(*values)
    return nvfp4_wgmma_large_tiles.Config(*values) if len(values) < 5 else nvfp4_wgmma.Config(*values)


def run(config: Any, x: torch.Tensor, weight: NvFp4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of tensors of the CPU by our kernel under one configuration, or one of these values."""
    from llm_quant_rocm.kernels.nvfp4_hopper import gemm

    prepared = ops.prepare_nvfp4_weight(cuda(weight))
    tensors = (prepared.codes, prepared.scales, prepared.global_scale)
    device = hardware.detect(torch.device("cuda"))
    bias = None if bias is None else bias.cuda()
    config = config_of(config) if isinstance(config, tuple) else config
    return gemm(x.cuda(), *tensors, bias, prepared.n, device, config).cpu()


@HALF
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 5, 48), (20, 67, 528), (300, 130, 272), (64, 320, 2064)], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_exact_on_integers(config: tuple[int, ...], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, bias = exact_operands(*shape, dtype)
    product = x.double() @ weight64(weight).t()
    assert_same(run(config, x, weight, None), product.float().to(dtype))
    for bias_dtype in (torch.float32, dtype):
        expected = (product + bias.double()).float().to(dtype)
        assert_same(run(config, x, weight, bias.to(bias_dtype)), expected)


@pytest.mark.parametrize(
    "config", [Split(8, 4), Split(8, 2), Split(8, 2, 3), Split(8, 2, consumers=2), Split(8, 2, consumers=2, cluster=2)],
    ids=str,
)  # fmt: skip
def test_long_steps_of_long_sums(config: Split) -> None:
    """Steps of 256 columns: where a consumer has 24 of half as many, or more."""
    x, weight, bias = exact_operands(11, 200, 12432, torch.bfloat16)
    expected = (x.double() @ weight64(weight).t() + bias.double()).float().bfloat16()
    assert_same(run(config, x, weight, bias), expected)


@HALF
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_all_codes_times_all_scales(config: tuple[int, ...], dtype: torch.dtype) -> None:
    """x picks single weights, so the products themselves are seen."""
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8).repeat(127, 8))
    scales = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 8).view(torch.float8_e4m3fn)
    found = run(config, torch.eye(128).to(dtype), NvFp4Weight(codes, scales, torch.ones(127)), None)
    assert_same(found.t().float() + 0.0, nvfp4.block_values(codes, scales) + 0.0)


@HALF
@pytest.mark.parametrize("rows", [1, 7, 16, 40, 64, 100, 128, 200, 256, 1000, 3000])
def test_no_further_from_float64_than_upstreams_emulation(rows: int, dtype: torch.dtype) -> None:
    """Upstream rounds the weight with its global scale to 16 bits and multiplies that."""
    x, weight = torch.randn(rows, 2064).to(dtype), nvfp4.quantize(torch.randn(320, 2064) / 45)
    expected = x.double() @ weight64(weight).t()
    emulated = (x.cuda() @ weight.dequantize(dtype).cuda().t()).cpu()
    found = ops.nvfp4_gemm(x.cuda(), ops.prepare_nvfp4_weight(cuda(weight))).cpu()
    assert (found.double() - expected).norm() <= (emulated.double() - expected).norm()
    # What is left is the one rounding to 16 bits.
    assert ((found.double() - expected).norm() / expected.norm()) < (2.2e-3 if dtype == torch.bfloat16 else 3e-4)


def test_global_scales_of_shards_are_their_own() -> None:
    x, weight = torch.randn(7, 64).bfloat16(), nasty_weight(30, 64)
    expected = x.double() @ weight64(weight).t()
    terms = x.double().abs() @ weight64(weight).abs().t()
    found = ops.nvfp4_gemm(x.cuda(), ops.prepare_nvfp4_weight(cuda(weight))).cpu().double()
    assert ((found - expected).abs() <= expected.abs() * 2**-8 + terms * 1e-5).all()


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, weight = torch.randn(50, 64).bfloat16(), ops.prepare_nvfp4_weight(cuda(nasty_weight(30, 64)))
    clean = ops.nvfp4_gemm(x.cuda(), weight)
    x[1, 7], x[30, 9] = float("nan"), float("inf")
    found = ops.nvfp4_gemm(x.cuda(), weight)
    assert found[1].isnan().all()
    assert not found[30].isfinite().any()
    others = [row for row in range(50) if row not in (1, 30)]
    assert_same(found[others], clean[others])


@HALF
@pytest.mark.parametrize(("n", "k"), [(320, 2064), (1536, 8192), (10240, 1024)], ids=str)
def test_batch_invariance(n: int, k: int, dtype: torch.dtype) -> None:
    """Every number of rows meets another configuration; row 3 has the same bits in all of them."""
    x, weight = torch.randn(2000, k).to(dtype).cuda(), ops.prepare_nvfp4_weight(cuda(nvfp4.quantize(torch.randn(n, k))))
    alone = ops.nvfp4_gemm(x[3:4], weight, batch_invariant=True)[0]
    # The bias takes row 3's own product away: what is left shows the last bits of the sum.
    bias = -alone.float()
    alone = ops.nvfp4_gemm(x[3:4], weight, bias, batch_invariant=True)[0]
    for rows in (4, 16, 17, 64, 100, 200, 256, 700, 2000):
        assert_same(ops.nvfp4_gemm(x[:rows], weight, bias, batch_invariant=True)[3], alone)


@pytest.mark.parametrize("rows", [1, 16, 64, 200, 1000])
def test_the_same_bits_every_run(rows: int) -> None:
    weight = ops.prepare_nvfp4_weight(cuda(nvfp4.quantize(torch.randn(10240, 4096))))
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    first = ops.nvfp4_gemm(x, weight)
    for _ in range(20):
        assert torch.equal(ops.nvfp4_gemm(x, weight), first)


@pytest.mark.parametrize(
    "config",
    [
        (16, 64, 128, 50, 2, 3, 4),
        Split(8, 4, 132),
        Split(8, 4, 264),
        Split(8, 4, cluster=3),
        Split(64, 2, 7),
        Split(64, 4, cluster=3),
        Split(64, 2, consumers=2),
        Split(64, 2, 264, consumers=2),
        Split(32, 2, consumers=2, cluster=4),
        (256, 128, 2),
    ],
    ids=str,
)
def test_parts_of_tiles_in_replayed_graphs(config: tuple[int, ...]) -> None:
    """Calls in a row, each of which begins before the one before is finished, do not meet each other's parts."""
    from llm_quant_rocm.kernels.nvfp4_hopper import gemm

    prepared = ops.prepare_nvfp4_weight(cuda(nvfp4.quantize(torch.randn(1000, 2048))))
    weight = prepared.codes, prepared.scales, prepared.global_scale, None, 1000, hardware.detect(prepared.codes.device)
    x = torch.randn(40, 2048, device="cuda", dtype=torch.bfloat16)
    gemm(x, *weight, config_of(config))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [gemm(x, *weight, config_of(config)) for _ in range(10)]
    for _ in range(20):
        x.normal_()
        graph.replay()
        expected = gemm(x, *weight, config_of(config))
        assert all(torch.equal(each, expected) for each in found)


def test_strides_of_x() -> None:
    x, weight, bias = exact_operands(40, 24, 64, torch.float16)
    prepared, bias = ops.prepare_nvfp4_weight(cuda(weight)), bias.cuda()
    expected = ops.nvfp4_gemm(x.cuda(), prepared, bias)
    for base, view in (
        (torch.zeros(80, 130), lambda t: t[::2, 1:129:2]),
        (torch.zeros(40, 67), lambda t: t[:, 3:]),
        (torch.zeros(40, 72), lambda t: t[:, 8:]),
    ):
        wide = base.half().cuda()
        view(wide).copy_(x)
        assert_same(ops.nvfp4_gemm(view(wide), prepared, bias), expected)
    assert_same(ops.nvfp4_gemm(x[:1].cuda().expand(40, 64), prepared, bias), expected[:1].expand(40, 24).contiguous())


@pytest.mark.parametrize(
    "measured", tuning.shapes("nvfp4_gemm", "sm_90"), ids=lambda shape: f"{shape.n}x{shape.k}-{shape.m}"
)
def test_shipped_configurations(measured: Any) -> None:
    from llm_quant_rocm.kernels import nvfp4_hopper

    x, weight, bias = exact_operands(measured.m, 192, 1040, torch.bfloat16)
    expected = (x.double() @ weight64(weight).t() + bias.double()).float().bfloat16()
    assert_same(run(nvfp4_hopper.config_of(measured.config), x, weight, bias), expected)


def test_a_weight_arranged_for_another_operator_is_refused() -> None:
    weight = ops.prepare_nvfp4_weight(cuda(nvfp4.quantize(torch.randn(32, 64))), gate_up=True)
    with pytest.raises(NotImplementedError, match="sm_90 read layout wgmma, not wgmma_gate_up"):
        ops.nvfp4_gemm(torch.ones(2, 64, device="cuda").bfloat16(), weight)


def test_the_environment_keeps_rows_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = cuda(nvfp4.quantize(torch.randn(48, 96)))
    x = torch.randn(5, 96, device="cuda").half()
    expected = ops.nvfp4_gemm(x, ops.prepare_nvfp4_weight(weight))
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4_GEMM", "reference")
    prepared = ops.prepare_nvfp4_weight(weight)
    assert prepared.layout == "row"
    torch.testing.assert_close(ops.nvfp4_gemm(x[:4], prepared), expected[:4], rtol=2e-3, atol=1e-3)
