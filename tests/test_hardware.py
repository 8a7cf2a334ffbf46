# SPDX-License-Identifier: Apache-2.0
"""Which facts the library believes of which device."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from llm_quant_rocm import hardware


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    hardware._gpu.cache_clear()
    yield
    hardware._gpu.cache_clear()


@pytest.mark.parametrize(
    ("driver_name", "arch", "fp8_dtype", "fp8_units"),
    [
        ("gfx90a:sramecc+:xnack-", "gfx90a", torch.float8_e4m3fn, False),
        ("gfx942:sramecc+:xnack-", "gfx942", torch.float8_e4m3fnuz, True),
        ("gfx950", "gfx950", torch.float8_e4m3fn, True),
    ],
)
def test_amd(driver_name: str, arch: str, fp8_dtype: torch.dtype, fp8_units: bool) -> None:
    found = hardware.amd(driver_name)
    assert (found.arch, found.fp8_dtype, found.fp8_units) == (arch, fp8_dtype, fp8_units)
    assert found.gpu and found.fp8_cast and not found.tma
    assert found.lanes == 64


def test_an_unknown_amd_gpu_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match="gfx1100 is not supported: llm-quant-rocm knows gfx90a, gfx942, gfx950"):
        hardware.amd("gfx1100")


@pytest.mark.parametrize(
    ("capability", "arch", "fp8", "tma"),
    [
        ((8, 0), "sm_80", False, False),
        ((8, 6), "sm_86", False, False),
        ((8, 9), "sm_89", True, False),
        ((9, 0), "sm_90", True, True),
        ((10, 0), "sm_100", True, True),
        ((12, 0), "sm_120", True, True),
    ],
)
def test_nvidia(capability: tuple[int, int], arch: str, fp8: bool, tma: bool) -> None:
    found = hardware.nvidia(*capability)
    assert (found.arch, found.fp8_units, found.fp8_cast, found.tma) == (arch, fp8, fp8, tma)
    assert found.gpu and found.fp8_dtype == torch.float8_e4m3fn
    assert found.lanes == 32
    assert found.nvfp4_units == (capability >= (10, 0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_everything_else_is_a_cpu(device: str) -> None:
    found = hardware.detect(torch.device(device))
    assert (found.arch, found.gpu, found.fp8_dtype) == ("cpu", False, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("arch", "units", "xcds"),
    [
        ("gfx942", 304, 8),
        ("gfx942", 152, 4),
        ("gfx942", 76, 2),
        ("gfx942", 38, 1),
        ("gfx942", 228, 6),
        ("gfx942", 80, 4),
        ("gfx942", 40, 2),
        ("gfx942", 20, 1),
        ("gfx950", 256, 8),
        ("gfx950", 128, 4),
        ("gfx950", 32, 1),
        ("gfx90a", 104, 1),
        ("gfx90a", 110, 1),
    ],
)
def test_dies_of_products_and_partitions(monkeypatch: pytest.MonkeyPatch, arch: str, units: int, xcds: int) -> None:
    """MI300X and MI325X, whole and in three modes, MI300A, MI308X, MI350X and MI355X, also in modes, MI250, MI250X."""
    properties = SimpleNamespace(gcnArchName=arch, multi_processor_count=units)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert hardware.detect(torch.device("cuda:0")).xcds == xcds


@pytest.mark.parametrize(("hip", "arch"), [(None, "sm_90"), ("7.1", "gfx942")])
def test_the_driver_is_asked_once_per_gpu(monkeypatch: pytest.MonkeyPatch, hip: str | None, arch: str) -> None:
    asked = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(major=9, minor=0, gcnArchName="gfx942:sramecc+", multi_processor_count=38)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", hip)
    for device in ("cuda", "cuda:0", "cuda:1", "cuda:0"):
        found = hardware.detect(torch.device(device))
        assert found.arch == arch
        assert not hip or found.units == 38, "those of this partition, not of a whole MI300X"
    assert asked == [1, 0]


@pytest.mark.parametrize(
    ("arch", "units"), [("gfx90a", 104), ("gfx942", 304), ("gfx950", 256), ("sm_90", 132), ("sm_80", 132), ("cpu", 132)]
)
def test_ranks_agree_about_the_units_of_an_architecture(arch: str, units: int) -> None:
    assert hardware.units_of(arch) == units


def test_importing_touches_no_gpu_and_no_kernel() -> None:
    code = (
        "import sys, torch, llm_quant_rocm, llm_quant_rocm.ops as ops\n"
        "assert not torch.cuda.is_initialized()\n"
        "ops.ptpc_linear(torch.ones(2, 16), torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1))\n"
        "loaded = [name for name in sys.modules if name.startswith(('llm_quant_rocm.kernels', 'vllm', 'sglang'))]\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1800)
