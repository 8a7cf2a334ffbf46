# SPDX-License-Identifier: Apache-2.0
"""What the layouts' packing shares."""

import random

import pytest
import torch

from llm_quant_rocm.formats import nvfp4_mfma, nvfp4_packing, nvfp4_wgmma
from tests.inputs import assert_same
from tests.nvfp4_inputs import nasty_weight


def test_bits_go_to_their_places() -> None:
    places = list(range(32))
    random.Random(0).shuffle(places)
    words = torch.tensor([1 << bit if bit < 31 else -(2**31) for bit in range(32)], dtype=torch.int32)
    moved = nvfp4_packing.move_bits(words, tuple(places))
    assert [value % 2**32 for value in moved.tolist()] == [1 << place for place in places]
    several = words[3] | words[17] | words[31]
    assert nvfp4_packing.move_bits(several, tuple(places)) == moved[3] | moved[17] | moved[31]


@pytest.mark.parametrize("layout", [nvfp4_wgmma.LAYOUT, nvfp4_mfma.LAYOUT, nvfp4_mfma.LAYOUT_FP4])
def test_two_experts_at_a_time_and_the_last_alone(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = nvfp4_wgmma if layout in nvfp4_wgmma.LAYOUTS else nvfp4_mfma
    weight = nasty_weight(100, 272, 5)
    experts = zip(weight.codes, weight.scales, strict=True)
    alone = zip(*(packing.pack(*expert, layout) for expert in experts), strict=True)
    monkeypatch.setattr(nvfp4_packing, "_ELEMENTS", 256 * 272)
    for together, parts in zip(packing.pack(weight.codes, weight.scales, layout), alone, strict=True):
        assert_same(together, torch.stack(parts))


@pytest.mark.parametrize("layout", [nvfp4_wgmma.LAYOUT, nvfp4_mfma.LAYOUT, nvfp4_mfma.LAYOUT_FP4])
def test_columns_in_the_order_of_memory(layout: str) -> None:
    """Of whole tiles, where no padding makes rows of them."""
    packing = nvfp4_wgmma if layout in nvfp4_wgmma.LAYOUTS else nvfp4_mfma
    weight = nasty_weight(128, 256)
    transposed = (part.t().contiguous().t() for part in (weight.codes, weight.scales))
    expected = packing.pack(weight.codes, weight.scales, layout)
    for found, whole in zip(packing.pack(*transposed, layout), expected, strict=True):
        assert_same(found, whole)
