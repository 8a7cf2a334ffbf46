# SPDX-License-Identifier: Apache-2.0
"""NVFP4 layers between the checkpoint's tensors and a served layer's, without an engine."""

import copy
import io

import pytest
import torch

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.nvfp4_tensors import (
    COMPRESSED_TENSORS,
    MODELOPT,
    Piece,
    TensorNames,
    assemble,
    input_global_scale,
    keep,
    kept,
)
from llm_quant_rocm.formats import nvfp4
from tests.inputs import assert_same
from tests.nvfp4_inputs import nasty_weight

SIZES = (6, 3, 7)


def pieces(scales: list[float]) -> list[Piece]:
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    rows = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    return [
        Piece(f"{name}_proj.weight", (place,), torch.tensor(scale))
        for name, place, scale in zip("qkv", rows, scales, strict=True)
    ]


def parts() -> tuple[torch.Tensor, torch.Tensor]:
    weight = nasty_weight(sum(SIZES), 32)
    return weight.codes, weight.scales


@pytest.mark.parametrize("names", [MODELOPT, COMPRESSED_TENSORS], ids=["modelopt", "compressed-tensors"])
def test_pieces_keep_their_global_scales(names: TensorNames) -> None:
    codes, scales = parts()
    given = [0.5, 2.0, 0.25]
    weight = assemble(names, codes, scales, pieces(given))
    multipliers = given if names is MODELOPT else [1 / scale for scale in given]
    assert weight.global_scale.tolist() == [m for m, size in zip(multipliers, SIZES, strict=True) for _ in range(size)]


def test_no_negative_zero_is_left_in_the_scales_that_are_served() -> None:
    codes, scales = parts()
    scales.view(torch.uint8)[[0, 8]] = 0x80
    weight = assemble(MODELOPT, codes, scales, pieces([1.0, 1.0, 1.0]))
    assert not (weight.scales.view(torch.uint8) & 0x80).any()


def test_a_broken_piece_is_named() -> None:
    codes, scales = parts()
    scales.view(torch.uint8)[8, 1] = 0x7F
    with pytest.raises(ValueError, match="^k_proj.weight_scale holds 1 NaN"):
        assemble(MODELOPT, codes, scales, pieces([1.0, 1.0, 1.0]))
    with pytest.raises(ValueError, match="^v_proj.weight_scale_2 is 0"):
        assemble(MODELOPT, *parts(), pieces([1.0, 1.0, 0.0]))


def test_a_served_layer_survives_copies_and_its_state_dict() -> None:
    weight, other = nasty_weight(16, 32), nasty_weight(16, 32, seed=1)
    layer, second = torch.nn.Module(), torch.nn.Module()
    keep(layer, weight)
    keep(second, other)
    x = torch.randn(3, 32).bfloat16()
    expected = ops.nvfp4_gemm(x, weight)
    assert_same(ops.nvfp4_gemm(x, kept(copy.deepcopy(layer))), expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_same(ops.nvfp4_gemm(x, kept(second)), expected)


def test_prepared_weights_can_be_copied() -> None:
    prepared = ops.prepare_nvfp4_weight(nasty_weight(16, 32))
    copied = copy.deepcopy(prepared)
    assert copied.codes.data_ptr() != prepared.codes.data_ptr()
    for name in ("codes", "scales", "global_scale"):
        assert_same(getattr(copied, name), getattr(prepared, name))
    assert isinstance(copy.copy(nvfp4.quantize(torch.ones(2, 16))), nvfp4.NvFp4Weight)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan])
def test_input_scales_are_positive(scale: float) -> None:
    with pytest.raises(ValueError, match="is not positive and finite"):
        input_global_scale(COMPRESSED_TENSORS, "a.q_proj", [torch.tensor(1.0), torch.tensor(scale)])
