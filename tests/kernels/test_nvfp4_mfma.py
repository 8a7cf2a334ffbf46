# SPDX-License-Identifier: Apache-2.0
"""Into how many programs the NVFP4 product is cut on CDNA, where nobody has measured."""

import pytest

pytest.importorskip("triton")

from llm_quant_rocm.kernels.nvfp4_mfma import Config, default_config, default_moe_config
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2

WEIGHTS = [(5120, 2048), (2048, 4096), (10240, 8192), (8192, 28672), (57344, 8192), (128, 128), (2112, 7168)]


@pytest.mark.parametrize("units", [104, 256, 304])
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_no_unit_is_left_idle_that_lower_tiles_would_use(n: int, k: int, units: int) -> None:
    for m in range(1, 600):
        config = default_config(m, n, k, units)
        programs = {rows: cdiv(m, rows) * cdiv(n, 128) * config.split_k for rows in (8, 16, 32, 64)}
        assert config.block_m == 16 or programs[config.block_m // 2] > units, m
        if config.block_m < min(64, m // 2):
            assert programs[config.block_m] <= units, f"{m}: a weight is decoded more often for nothing"


def test_a_sum_is_cut_before_a_tile_is() -> None:
    """That decodes nothing twice."""
    assert default_config(64, 10240, 8192, 304) == Config(64, split_k=4)
    assert default_config(64, 5120, 2048, 304) == Config(16)
    assert default_config(128, 5120, 2048, 304) == Config(32)
    assert default_config(256, 5120, 2048, 304) == Config(64)


@pytest.mark.parametrize("units", [104, 256, 304])
@pytest.mark.parametrize(("n", "k"), [*WEIGHTS, (8192, 8192), (5120, 8192), (7168, 8192), (8192, 3584), (24576, 1536)])
def test_parts_are_no_more_than_shorten_the_longest(n: int, k: int, units: int) -> None:
    pairs = cdiv(k, 256)
    found = {m: default_config(m, n, k, units) for m in range(1, 65)}

    def may_be(parts: int, m: int) -> bool:
        tiles = cdiv(m, min(64, max(16, next_power_of_2(m)))) * cdiv(n, 128)
        enough, long_enough = tiles * parts <= 2 * units, 2 * parts <= pairs
        return enough and long_enough and parts <= 16 and 8 * parts * next_power_of_2(m) <= 9 / 16 * k / 2

    for m, config in found.items():
        parts, longest = config.split_k, cdiv(pairs, config.split_k)
        assert parts == 1 or may_be(parts, m), m
        assert parts == 1 or longest < cdiv(pairs, parts - 1), f"{m}: one part less would be as long"
        assert longest == 1 or not may_be(cdiv(pairs, longest - 1), m), f"{m}: more parts would be shorter"
    assert len({config.split_k for config in found.values()}) <= 4, "each is compiled"


def test_two_programs_a_unit_read_a_weight() -> None:
    """Llama-3-70B's qkv is 80 tiles, of which seven parts are 560 programs for the 608 that run at once; its o is 64,
    of which nine would be no shorter than eight."""
    assert default_config(1, 10240, 8192, 304) == Config(16, split_k=7)
    assert default_config(1, 8192, 8192, 304) == Config(16, split_k=8)


def test_long_sums_of_few_experts_are_cut() -> None:
    """At one token DeepSeek-V3's w13, an eighth of it, is 32 tiles of 56 steps for an MI300X's 304 units."""
    assert default_moe_config(8, 256, 512, 7168, 304) == Config(16, split_k=14)
    assert default_moe_config(32, 256, 512, 7168, 304) == Config(16, split_k=4)
    assert default_moe_config(8, 256, 7168, 256, 304) == Config(16), "two steps are not"
    assert default_moe_config(8, 128, 1536, 2048, 304) == Config(16, split_k=4)
    assert default_moe_config(0, 128, 1536, 2048, 304).block_m == 16, "no expert is on this rank"
    for slots in (128, 1024, 100_000):
        assert default_moe_config(slots, 128, 1536, 2048, 304).split_k == 1, "there are enough tiles"
