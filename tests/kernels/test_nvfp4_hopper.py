# SPDX-License-Identifier: Apache-2.0
"""How routed experts in NVFP4 are cut on Hopper where nobody measured."""

from importlib.util import find_spec

import pytest

if not find_spec("triton"):
    pytest.skip("needs Triton", allow_module_level=True)

from llm_quant_rocm import hardware
from llm_quant_rocm.kernels import nvfp4_hopper
from llm_quant_rocm.kernels.pair_config import PairConfig


def moe_config(slots: int, experts: int) -> PairConfig:
    return nvfp4_hopper.moe_config(slots, experts, 2048, 768, hardware.nvidia(9, 0))


@pytest.mark.parametrize("experts", [64, 256])
@pytest.mark.parametrize(("rows", "height"), [(1, 8), (4, 8), (8, 16), (12, 16), (24, 32), (50, 64), (200, 128)])
def test_a_tile_is_a_little_higher_than_experts_have_rows(rows: int, height: int, experts: int) -> None:
    assert moe_config(rows * experts, experts).block_m == height


@pytest.mark.parametrize(("slots", "experts"), [(1, 256), (32, 256), (8, 8), (40, 8), (128, 32)])
def test_programs_share_the_steps_of_few_experts(slots: int, experts: int) -> None:
    config = moe_config(slots, experts)
    assert config.block_m == 8 and (config.w13.programs, config.w2.programs) == (132, 4 * 132)


@pytest.mark.parametrize(("slots", "experts"), [(33, 256), (33, 33), (256, 64)])
def test_many_experts_have_programs_of_their_own(slots: int, experts: int) -> None:
    config = moe_config(slots, experts)
    assert config.block_m == 8 and config.w13.programs == 0
