# SPDX-License-Identifier: Apache-2.0
"""What the layouts' packing shares."""

import random

import pytest
import torch

from llm_quant_rocm.formats import nvfp4_mfma, nvfp4_packing, nvfp4_wgmma


def test_bits_go_to_their_places() -> None:
    places = list(range(32))
    random.Random(0).shuffle(places)
    words = torch.tensor([1 << bit if bit < 31 else -(2**31) for bit in range(32)], dtype=torch.int32)
    moved = nvfp4_packing.move_bits(words, tuple(places))
    assert [value % 2**32 for value in moved.tolist()] == [1 << place for place in places]
    several = words[3] | words[17] | words[31]
    assert nvfp4_packing.move_bits(several, tuple(places)) == moved[3] | moved[17] | moved[31]


@pytest.mark.parametrize("elements", [2**12, 2**14, 2**25])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (100, 272)])
@pytest.mark.parametrize("layout", [nvfp4_wgmma.LAYOUT, nvfp4_mfma.LAYOUT, nvfp4_mfma.LAYOUT_FP4])
def test_experts_arranged_together_are_those_arranged_alone(
    layout: str, n: int, k: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several in one slice of codes, and one in several."""
    packing = nvfp4_wgmma if layout in nvfp4_wgmma.LAYOUTS else nvfp4_mfma
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (5, n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 127, (5, n, k // 16), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    alone = [packing.pack(*expert, layout) for expert in zip(codes, scales, strict=True)]
    monkeypatch.setattr(nvfp4_packing, "_ELEMENTS", elements)
    for together, parts in zip(packing.pack(codes, scales, layout), zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.stack(parts))
