# SPDX-License-Identifier: Apache-2.0
"""The PTPC GEMM's kernels on Hopper: which products each serves, and how unmeasured ones are cut."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch

if not find_spec("triton"):
    pytest.skip("needs Triton", allow_module_level=True)

from llm_quant_rocm import hardware
from llm_quant_rocm.kernels import ptpc_gemm, ptpc_hopper, ptpc_wgmma, ptpc_wgmma_few
from llm_quant_rocm.kernels.pdl import pdl_option_of_tiles
from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig


def codes(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.float8_e4m3fn, device="cpu")


def test_it_serves_rows_of_16_byte_lines() -> None:
    x, w = codes(300, 512), codes(64, 512)
    assert ptpc_wgmma.serves(x, w, torch.bfloat16) and ptpc_wgmma.serves(x, w, torch.float16)
    assert not ptpc_wgmma.serves(x, w, torch.float32)
    assert not ptpc_wgmma.serves(x, codes(67, 512), torch.bfloat16)
    assert not ptpc_wgmma.serves(codes(300, 500), codes(64, 500), torch.bfloat16)
    assert not ptpc_wgmma.serves(codes(300, 544)[:, 3:515], w, torch.bfloat16)
    assert not ptpc_wgmma.serves(codes(1, 512).expand(300, 512), w, torch.bfloat16)
    assert ptpc_wgmma.serves(codes(300, 544)[:, 16:528], w, torch.bfloat16)


def test_few_rows_may_have_any_result_but_lines_of_16_bytes() -> None:
    serves = ptpc_wgmma_few.serves
    assert serves(codes(128, 512), codes(67, 512)) and not serves(codes(129, 512), codes(67, 512))
    assert serves(codes(1, 512)[:, :500], codes(64, 512)[:, :500])
    assert not serves(codes(1, 500), codes(64, 500))


CHOSEN = partial(ptpc_hopper.default_config, hardware.nvidia(9, 0))
FEW = ptpc_wgmma_few.Config


def test_each_kernel_has_its_rows() -> None:
    assert isinstance(CHOSEN(64, 57344, 8192), FEW)
    # One wave of tiles, and rows that are not short and not long.
    assert isinstance(CHOSEN(128, 132 * 64, 8192), FEW)
    assert not isinstance(CHOSEN(128, 57344, 8192), FEW)
    assert not isinstance(CHOSEN(128, 132 * 64, 2048), FEW)
    assert not isinstance(CHOSEN(128, 132 * 64, 28672), FEW)
    # Tiles of 64 x 128 for one wave, or for two where those of 128 x 128 are for one and a half.
    assert isinstance(CHOSEN(128, 8448, 2048), GemmConfig)
    assert isinstance(CHOSEN(128, 8449, 2048), ptpc_wgmma.Config)
    assert isinstance(CHOSEN(320, 6144, 5120), GemmConfig)
    assert isinstance(CHOSEN(321, 6144, 5120), ptpc_wgmma.Config)


def test_a_tile_that_is_nearly_empty_is_not_of_the_kernel_that_reaches_beyond_x() -> None:
    for m in (65, 79):
        assert isinstance(CHOSEN(m, 8192, 2048), ptpc_wgmma.Config)
    for m in (80, 128):
        assert isinstance(CHOSEN(m, 8192, 2048), GemmConfig)


@pytest.mark.parametrize(
    ("n", "block_n"),
    [(1280, 16), (2560, 32), (6144, 48), (8192, 64), (10240, 80), (12800, 64), (37888, 96), (57344, 64)],
)
def test_multiprocessors_have_nearly_the_same_number_of_columns(n: int, block_n: int) -> None:
    assert CHOSEN(16, n, 8192) == FEW(block_n, 256)


@pytest.mark.parametrize("m", [1, 16, 33, 64, 65, 128])
@pytest.mark.parametrize("k", [16, 512, 1000, 1024, 8192])
def test_rings_fit_into_shared_memory_and_rows_into_lines(m: int, k: int) -> None:
    for n in (1, 128, 2048, 2112, 8448, 10240, 57344):
        config = CHOSEN(m, n, k)
        if isinstance(config, GemmConfig):
            assert (config.block_m + config.block_n) * config.block_k * config.stages <= 200 * 1024
            assert config.tma == (k % 16 == 0)
            assert config.split_k == 1
        elif isinstance(config, FEW):
            # Fewer stages would not bridge the time that memory takes.
            assert ptpc_wgmma_few.RING_BYTES // ((max(m, 64) + config.block_n) * config.block_k) >= 4


@pytest.mark.parametrize("m", [1, 64, 65, 512, 4096])
@pytest.mark.parametrize(("capability", "shared_kib"), [((9, 0), 227), ((10, 0), 227), ((12, 0), 99), ((12, 1), 99)])
def test_unmeasured_gpus_have_the_shared_memory(m: int, capability: tuple[int, int], shared_kib: int) -> None:
    config = ptpc_gemm.default_config(hardware.nvidia(*capability), m, 4096, 8192)
    assert (config.block_m + config.block_n) * config.block_k * config.stages <= shared_kib * 1024


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_where_rows_are_their_own_one_configuration_serves_any_number_on_amd(arch: str) -> None:
    device = hardware.amd(arch)
    for n, k in ((10240, 8192), (64, 7168)):
        configs = [ptpc_gemm.default_config(device, m, n, k) for m in (1, 16, 64, 4096)]
        found = {ptpc_gemm.batch_invariant(config, device, n, k) for config in configs}
        assert len(found) == 1 and found.pop().split_k == 1


def test_where_rows_are_their_own_hopper_sums_no_parts() -> None:
    chosen = CHOSEN(16, 8192, 8192)
    assert ptpc_hopper.batch_invariant(chosen, hardware.nvidia(9, 0), 8192, 8192) == chosen
    split = GemmConfig(16, 64, 128, 6, 4, split_k=8)
    assert ptpc_hopper.batch_invariant(split, hardware.nvidia(9, 0), 64, 7168) == GemmConfig(16, 64, 128, 6, 4)


def test_tiles_are_narrow_where_wide_ones_leave_more_of_a_wave_empty() -> None:
    """On 132 multiprocessors, n / 128 and n / 256 tiles for each 128 rows."""
    assert ptpc_wgmma.default_config(256, 8192).block_n == 128  # 128, 64
    assert ptpc_wgmma.default_config(512, 8192).block_n == 256  # 256, 128
    assert ptpc_wgmma.default_config(512, 10240).block_n == 128  # 320, 160: the rest takes less than a wave
    assert ptpc_wgmma.default_config(1024, 6144).block_n == 128  # 384, 192
    assert ptpc_wgmma.default_config(4096, 57344).block_n == 256


@pytest.mark.parametrize(
    ("tiles", "whole"), [(1, 0), (66, 0), (67, 67), (132, 132), (198, 132), (199, 199), (264, 264)]
)
def test_a_last_wave_of_few_tiles_is_two_programs_each(tiles: int, whole: int) -> None:
    assert ptpc_wgmma.whole_tiles(tiles, 132) == whole


def test_long_products_are_not_set_up_early() -> None:
    hopper = hardware.nvidia(9, 0)
    assert pdl_option_of_tiles(hopper, 132, 8192) == {"launch_pdl": True}
    assert pdl_option_of_tiles(hopper, 320, 8192) == {}
    assert pdl_option_of_tiles(hardware.nvidia(8, 0), 132, 8192) == {}
