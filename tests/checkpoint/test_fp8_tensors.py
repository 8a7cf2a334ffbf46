# SPDX-License-Identifier: Apache-2.0
"""ModelOpt's FP8 shards, one scale a tensor, as rows with a scale each."""

import pytest
import torch

from llm_quant_rocm import hardware
from llm_quant_rocm.checkpoint.fp8_tensors import with_row_scales
from llm_quant_rocm.formats import fp8
from tests.inputs import assert_same

PIECES = [("q_proj.weight", slice(0, 3)), ("k_proj.weight", slice(3, 5))]


def codes() -> torch.Tensor:
    return torch.randn(5, 16).to(torch.float8_e4m3fn)


def test_rows_have_the_scales_of_their_shards() -> None:
    given = codes()
    found, scale = with_row_scales(given, torch.tensor([0.5, 3.0]), PIECES)
    assert_same(found, given)
    assert scale.tolist() == [[0.5]] * 3 + [[3.0]] * 2


def test_on_gfx942_the_codes_become_fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda device: hardware.amd("gfx942"))
    given = codes()
    given[0, 0] = -0.0
    found, scale = with_row_scales(given, torch.tensor([0.5, 3.0]), PIECES)
    assert found.dtype == fp8.FNUZ.dtype
    expected = given.float() * torch.tensor([0.5] * 3 + [3.0] * 2)[:, None]
    assert_same(fp8.dequantize(found, scale) + 0.0, expected + 0.0)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_of_either_sign_is_named(byte: int) -> None:
    given = codes()
    given.view(torch.uint8)[4, 7] = byte
    with pytest.raises(ValueError, match="^k_proj.weight holds NaN"):
        with_row_scales(given, torch.tensor([0.5, 3.0]), PIECES)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_broken_scale_is_named(scale: float) -> None:
    with pytest.raises(ValueError, match="^k_proj.weight_scale is"):
        with_row_scales(codes(), torch.tensor([0.5, scale]), PIECES)
