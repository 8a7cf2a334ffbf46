# SPDX-License-Identifier: Apache-2.0
"""The FP8 product on AMD GPUs that nobody has measured: how it is cut for all compute units."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

if not find_spec("triton"):
    pytest.skip("needs Triton", allow_module_level=True)

from llm_quant_rocm import hardware
from llm_quant_rocm.kernels.ptpc_gemm import default_config
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2

ARCHS = pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
# One rank's layers of Llama-3-70B and 8B over up to eight, and of Qwen3-32B and DeepSeek-V3.
WEIGHTS = (
    (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672), (2560, 8192), (8192, 2048), (1280, 8192), (8192, 1024),
    (7168, 8192), (8192, 3584), (4096, 4096), (1536, 4096), (768, 4096), (3584, 4096), (4096, 1792), (2560, 5120),
    (5120, 3200), (1280, 5120), (2112, 7168), (24576, 1536), (512, 7168), (7168, 16384),
)  # fmt: skip


def programs(arch: str, m: int, n: int, k: int) -> int:
    config = default_config(hardware.amd(arch), m, n, k)
    return cdiv(m, config.block_m) * cdiv(n, config.block_n) * config.split_k


@ARCHS
@pytest.mark.parametrize("m", [1, 16, 32, 64, 128, 256, 512, 4096])
def test_each_unit_has_a_program_or_more_would_not_pay(arch: str, m: int) -> None:
    """No part of K is empty or shorter than 512 columns, and parts come to at most half of the weight's bytes."""
    device = hardware.amd(arch)
    for n, k in WEIGHTS:
        config = default_config(device, m, n, k)
        steps, rows = cdiv(k, config.block_k), max(16, next_power_of_2(m))
        each = cdiv(steps, config.split_k)
        assert cdiv(steps, each) == config.split_k, "parts without a step"
        assert config.split_k == 1 or (each * config.block_k >= 512 and 16 * rows * config.split_k <= k)
        more = min(16, k // 512, k // (16 * rows)) if k >= 2048 else 1
        # A longest part as short as that of `more` parts has.
        assert programs(arch, m, n, k) >= device.units or (config.block_n, each) == (64, cdiv(steps, max(more, 1)))


@ARCHS
def test_parts_are_no_more_than_keep_memory_busy(arch: str) -> None:
    device = hardware.amd(arch)
    for n, k in WEIGHTS:
        for m in (1, 16, 32, 64, 128):
            assert default_config(device, m, n, k).split_k == 1 or programs(arch, m, n, k) <= 8 / 3 * device.units


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (16, 1280, 8192, 320),  # 20 tiles
        (64, 1280, 8192, 160),  # where more parts would be more than half of the weight's bytes
        (128, 8192, 8192, 512),  # 64 tiles of 128 x 128
        (128, 1280, 8192, 160),  # 10 of these
    ],
)
def test_an_mi300x_has_more_programs_than_tiles(m: int, n: int, k: int, expected: int) -> None:
    assert programs("gfx942", m, n, k) == expected


def test_a_partition_of_a_gpu_has_its_own_units() -> None:
    whole = hardware.amd("gfx942")
    config = default_config(replace(whole, units=38, xcds=1), 16, 8192, 8192)
    assert config.split_k == 1 < default_config(whole, 16, 8192, 8192).split_k
