# SPDX-License-Identifier: Apache-2.0
"""How routed experts in NVFP4 are cut on Hopper where nobody measured."""

from importlib.util import find_spec

import pytest

if not find_spec("triton"):
    pytest.skip("needs Triton", allow_module_level=True)

from llm_quant_rocm import hardware
from llm_quant_rocm.kernels import nvfp4_hopper
from llm_quant_rocm.kernels.nvfp4_hopper import Config, Large, Split
from llm_quant_rocm.kernels.nvfp4_wgmma import Config as Few
from llm_quant_rocm.kernels.pair_config import PairConfig

HOPPER = hardware.nvidia(9, 0)


@pytest.mark.parametrize("inner", [256, 4096])
@pytest.mark.parametrize("experts", [64, 256])
@pytest.mark.parametrize(("rows", "height"), [(1, 8), (4, 8), (8, 16), (12, 16), (24, 32), (50, 64), (200, 128)])
def test_a_tile_is_a_little_higher_than_experts_have_rows(rows: int, height: int, experts: int, inner: int) -> None:
    assert nvfp4_hopper.moe_config(rows * experts, experts, 2048, inner, HOPPER).block_m == height


@pytest.mark.parametrize(
    ("slots", "experts", "hidden", "inner", "w13", "w2"),
    [
        # DeepSeek-V3 over eight ranks, by tokens: 64 tiles of w13, 256, and many.
        (8, 256, 7168, 256, Split(8, 4, 132), Few(8, 64, 128, 0, 2, 2)),
        (32, 256, 7168, 256, Split(8, 4, 264), Few(8, 128, 64, 528, 2, 4)),
        (512, 256, 7168, 256, Few(8, 64, 128, 0, 2, 3), Few(8, 128, 64, 528, 2, 4)),
        # Qwen3-30B-A3B, whose sums are short.
        (8, 128, 2048, 768, Few(8, 64, 128, 0, 2, 3), Few(8, 64, 128, 0, 2, 2)),
        (512, 128, 2048, 768, Few(8, 64, 128, 0, 2, 3), Few(8, 128, 64, 528, 2, 4)),
        # Llama-4-Scout over two ranks, whose sums are long.
        (1, 16, 5120, 4096, Split(8, 4, 132), Split(8, 4, 132)),
        (2, 16, 5120, 4096, Split(8, 4, 264), Split(8, 4, 264)),
        (64, 16, 5120, 4096, Few(8, 64, 128, 0, 2, 3), Split(8, 2, 264)),
        # Mixtral 8x22B over four ranks, and one: w2 has 192 tiles of 256 rows, two waves, or 384 of 128, three.
        (512, 8, 6144, 4096, Large(128, 256, 0), Large(128, 128, 0)),
        (512, 8, 6144, 16384, Large(128, 256, 0), Large(128, 128, 0)),
        (4096, 128, 2048, 768, Large(64, 256, 0), Large(64, 256, 0)),
    ],
)
def test_tiles_fill_the_gpu(slots: int, experts: int, hidden: int, inner: int, w13: Config, w2: Config) -> None:
    assert nvfp4_hopper.moe_config(slots, experts, hidden, inner, HOPPER) == PairConfig(w13, w2)


def test_experts_elsewhere_have_no_tiles() -> None:
    """No slot is on this rank."""
    assert nvfp4_hopper.moe_config(0, 128, 2048, 768, HOPPER).block_m == 8
