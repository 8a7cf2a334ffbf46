# SPDX-License-Identifier: Apache-2.0
"""What the tuner would try, without a GPU: the shipped winners, and nothing twice."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from llm_quant_rocm import hardware, tuning
from llm_quant_rocm.backends import Backend
from llm_quant_rocm.kernels import nvfp4_hopper, nvfp4_wgmma, ptpc_hopper, ptpc_moe_hopper
from llm_quant_rocm.kernels.hopper import SMS
from llm_quant_rocm.kernels.nvfp4_slices import Expanded
from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import SHARES, STEP_BYTES, groups_of, shares_of, tail_of
from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config as Large
from llm_quant_rocm.kernels.nvfp4_wgmma_split_tiles import Config as Split
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.sizes import cdiv
from llm_quant_rocm.ops.nvfp4_gemm import BACKENDS
from llm_quant_rocm.tune import OPERATORS, ptpc_gemm, tuner
from llm_quant_rocm.tune.nvfp4_gemm import _COMPILED_KS_BY_WARPS, compiled_rows
from llm_quant_rocm.tune.routed import heights_for
from llm_quant_rocm.tune.shapes import WELL_KNOWN_EXPERTS

HOPPER = hardware.nvidia(9, 0)
DEVICES = [HOPPER, *(hardware.amd(arch) for arch in ("gfx90a", "gfx942", "gfx950"))]
SHAPES = [
    (16, 10240, 8192),
    (1, 512, 256),
    (64, 7168, 2048),
    (128, 2048, 4096),
    (512, 8192, 28672),
    (4096, 57344, 8192),
]


EXPERTS = [(m, *shape) for shape in WELL_KNOWN_EXPERTS.values() for m in (1, 3, 64, 4096)]
MAKE = {
    "ptpc_gemm": lambda fields: ptpc_hopper.config_of(fields),
    "nvfp4_gemm": lambda fields: nvfp4_hopper.config_of(fields),
    "nvfp4_gemm_fp8": lambda fields: nvfp4_hopper.fp8_config_of(fields),
    "ptpc_moe": lambda fields: ptpc_moe_hopper.config_of(fields),
    "nvfp4_moe": lambda fields: PairConfig.of(fields, nvfp4_hopper.config_of),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_there_are_candidates_for_every_shape(operator: str, device: hardware.Hardware) -> None:
    method = tuner(operator)
    for shape in EXPERTS if method.experts else SHAPES:
        found = method.candidates(device, *shape)
        assert 1 <= len(found) == len(set(found)) <= 200, shape


def test_both_lengths_of_steps_with_8_rows_are_compiled_ahead() -> None:
    shapes = [(1, n, k) for n, k in ((512, 512), (2048, 4096), (10240, 8192), (57344, 8192))]
    splits = {config for shape in shapes for config in tuner("nvfp4_gemm").candidates(HOPPER, *shape)}
    splits = {config for config in splits if isinstance(config, Split) and config.by_warps}
    assert len(splits) > 10
    for config in splits:
        # The weight has 512 rows.
        few, many = (config.turns(16, 512, k) for k in _COMPILED_KS_BY_WARPS)
        assert few < 24 <= many


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_candidate_comes_back_from_its_file(operator: str) -> None:
    method = tuner(operator)
    shapes = EXPERTS if method.experts else [*SHAPES, (1024, 2048, 4096)]
    for config in {config for shape in shapes for config in method.candidates(HOPPER, *shape)}:
        assert MAKE[operator](asdict(config)) == config


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_shipped_winners_are_candidates(operator: str) -> None:
    method = tuner(operator)
    shipped = tuning.resources.files("llm_quant_rocm") / "configs" / operator / "sm_90.json"
    for shape in tuning.measured(operator, shipped):
        # A number of slots is that of as many tokens with one expert each.
        dims = (
            (shape.slots, shape.experts, 1, shape.hidden, shape.inner) if method.experts else (shape.m, *shape.weight)
        )
        assert MAKE[operator](shape.config) in method.candidates(HOPPER, *dims), shape


def test_one_configuration_in_a_file_serves_both_products_of_experts() -> None:
    """As files had it before each product had its own."""
    config = nvfp4_hopper.moe_config(2048, 256, 2048, 768, HOPPER).w13
    assert PairConfig.of(asdict(config), nvfp4_hopper.config_of) == PairConfig(config, config)
    with pytest.raises(ValueError, match="tiles of 16 rows cannot be multiplied as tiles of 32"):
        PairConfig(config, replace(config, block_m=32))


def test_few_rows_are_not_padded_to_sixteen_and_fill_the_gpu() -> None:
    found = tuner("nvfp4_moe").candidates(HOPPER, 16, *WELL_KNOWN_EXPERTS["deepseek-v3/8"])
    assert {pair.block_m for pair in found} >= {8, 16}
    assert {pair.w13.programs for pair in found} >= {0, 132, 2 * 132, 4 * 132}
    assert any(pair.w13.block_n != pair.w2.block_n for pair in found)
    each = {config for pair in found for config in (pair.w13, pair.w2) if isinstance(config, nvfp4_wgmma.Config)}
    assert not [config for config in each if config.block_m > 16 and config.programs], "it would spill"


@pytest.mark.parametrize(
    ("model", "tokens", "of_w13", "of_w2"),
    [
        ("deepseek-v3/8", 1, {1, 2, 4, 8, 14}, {1}),
        ("qwen3-30b-a3b", 64, {1, 2, 4}, {1}),
        ("mixtral-8x7b", 16, {1, 2, 4, 8}, {1, 2, 4, 8}),
        ("deepseek-v3/8", 1024, {1}, {1}),
    ],
)
def test_long_sums_of_few_experts_are_tried_in_parts_on_cdna(
    model: str, tokens: int, of_w13: set[int], of_w2: set[int]
) -> None:
    found = tuner("nvfp4_moe").candidates(hardware.amd("gfx942"), tokens, *WELL_KNOWN_EXPERTS[model])
    assert ({pair.w13.split_k for pair in found}, {pair.w2.split_k for pair in found}) == (of_w13, of_w2)


@pytest.mark.parametrize(("m", "parts"), [(16, {1, 2, 4, 8, 14, 16}), (96, {1, 2, 3, 4}), (512, {1})])
def test_fp8_sums_are_tried_in_parts_on_cdna(m: int, parts: set[int]) -> None:
    """As the default has them, with other tiles too: DeepSeek-V3's qkv_a."""
    device = hardware.amd("gfx942")
    found = tuner("ptpc_gemm").candidates(device, m, 2112, 7168)
    assert {config.split_k for config in found} == parts
    assert len([config for config in found if config.split_k == found[0].split_k]) > 10


def test_tiles_of_a_quarter_of_the_rows_are_tried_on_cdna() -> None:
    """As the default has them where a weight is small."""
    found = tuner("nvfp4_gemm").candidates(hardware.amd("gfx942"), 64, 57344, 8192)
    assert {config.block_m for config in found} == {16, 32, 64}


def test_tiles_that_just_fill_the_gpu_are_among_them() -> None:
    """1024 rows of Qwen3's o: 128 tiles of 128 x 128; of 256 x 128, half as many, two programs share each."""
    found = tuner("nvfp4_gemm").candidates(HOPPER, 1024, 2048, 4096)
    assert {Large(128, 128, 0), Large(256, 128, 2, 2)} <= set(found)


def test_fp8_is_decoded_on_the_way_or_expanded_in_slices() -> None:
    found = tuner("nvfp4_gemm_fp8").candidates(HOPPER, 1024, 10240, 8192)
    assert {Large(256, 128, cut) for cut in (0, 1, 2)} | {Large(128, 128, 0)} <= set(found)
    slices = sorted(config.values for config in found if isinstance(config, Expanded))
    assert len(slices) >= 4 and slices[0] < 10240 * 8192 <= slices[-1]
    assert not [config for config in found if isinstance(config, Large) and config.block_n == 256], "it would spill"


def test_fp8_of_a_ragged_weight_is_not_expanded() -> None:
    found = tuner("nvfp4_gemm_fp8").candidates(HOPPER, 1024, 8200, 8192)
    assert found and not [config for config in found[1:] if isinstance(config, Expanded)]


@pytest.mark.parametrize(
    ("us", "winner"), [({"ours": 9.0, "exact": 10.0}, "triton"), ({"ours": 10.0, "exact": 10.0}, "exact")], ids=str
)
def test_the_exact_product_serves_what_fp8_does_not_speed_up(us: dict[str, float], winner: str) -> None:
    assert tuner("nvfp4_gemm_fp8").backend(1024, us) == winner


@pytest.mark.parametrize(
    ("slots", "experts", "heights"),
    [(1, 128, [16, 32]), (8, 8, [16, 32]), (512, 8, [32, 64, 128]), (10**6, 8, [64, 128])],
    ids=str,
)
def test_tiles_of_experts_are_as_high_as_their_rows(slots: int, experts: int, heights: list[int]) -> None:
    assert heights_for(slots, experts) == heights


@pytest.mark.parametrize(
    ("m", "us", "winner"),
    [
        (16, {"ours": 10.0, "torch": 9.9}, "torch"),
        (16, {"ours": 10.0, "torch": 10.1}, "triton"),
        (1024, {"ours": 10.0, "torch": 10.4}, "torch"),
        (1024, {"ours": 10.0, "torch": 10.6}, "triton"),
        (16, {"ours": 10.0}, "triton"),
    ],
)
def test_who_serves_a_shape_of_ptpc(m: int, us: dict[str, float], winner: str) -> None:
    assert tuner("ptpc_gemm").backend(m, us) == winner


@pytest.mark.parametrize(
    ("us", "winner"),
    [
        ({"ours": 10.0, "bf16": 5.0}, "triton"),
        ({"ours": 10.0, "bf16": 5.0, "torch": 9.9}, "torch"),
        ({"ours": 10.0, "bf16": 5.0, "torch": 10.1}, "triton"),
    ],
    ids=["hopper", "vendor", "kernel"],
)
def test_who_serves_a_shape_of_nvfp4(us: dict[str, float], winner: str) -> None:
    """bf16 is timed to compare with; "torch" is AMD's other way, and a backend's name."""
    assert tuner("nvfp4_gemm").backend(1024, us) == winner
    assert winner in {backend.name for backend in BACKENDS}


@pytest.mark.parametrize("shares", [0, *SHARES])
@pytest.mark.parametrize("tail", [64, 128])
def test_what_compiles_a_tail_has_one(tail: int, shares: int) -> None:
    """Else it would compile while it is timed."""
    config = Large(256, 128, 0, shares, tail)
    m = compiled_rows(config, 320)
    tiles, groups = cdiv(m, 256) * cdiv(512, 128), groups_of(8192, STEP_BYTES)
    assert (tail_of(config, m, tiles, SMS), shares_of(config, tiles, groups, SMS, tail)) == (tail, shares)
    assert compiled_rows(Large(256, 128), 320) == 320


@pytest.mark.parametrize("hip", ["7.1", None], ids=["hipBLASLt", "another library"])
def test_torch_is_no_peer_where_hipblaslt_has_no_kernel(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else fails is said."""

    def run(*operands: Any) -> None:
        raise RuntimeError("no valid solution")

    monkeypatch.setattr(ptpc_gemm, "_TORCH", Backend("torch", lambda call: None, run))
    monkeypatch.setattr(torch.version, "hip", hip)
    workload = object.__new__(ptpc_gemm.PtpcWorkload)
    workload._call, workload._x, workload._weights = None, (), [()]
    with nullcontext() if hip else pytest.raises(RuntimeError, match="no valid solution"):
        assert workload.peers() == {}
