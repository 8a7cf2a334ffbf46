# SPDX-License-Identifier: Apache-2.0
"""What a device can do. The one place of the library that knows devices; importing it touches none."""

from dataclasses import dataclass, replace
from functools import cache

import torch


# Compared by identity: every choice and configuration is looked up by it, in every call.
@dataclass(frozen=True, eq=False)
class Hardware:
    """One device's facts, as far as an operator's numbers or choice of kernel depend on them. One object a device.

    Attributes:
        arch: "cpu", "sm_90", "gfx942", ...
        fp8_dtype: the E4M3 flavour of the matrix units, or OCP where there are none.
        fp8_units: whether the matrix units multiply FP8. Without them FP8 is decoded to 16 bits in the kernel.
        fp8_cast: whether Triton compiles a conversion from float to FP8 for it.
        nvfp4_units: whether the matrix units multiply NVFP4, as NVIDIA's do from Blackwell on.
        tma: whether it has a tensor memory accelerator (bulk copies by descriptor).
        pdl: whether a kernel can be set up while the one before it runs (programmatic dependent launch).
        lanes: threads that run in lockstep, of which `num_warps` counts the groups: a warp's 32, a CDNA wave's 64.
        units: compute units of an AMD GPU: what the driver says of this one (products and partitions of an architecture
            differ), or of an architecture by its name alone those of an MI250's die, an MI300X and an MI355X.
        xcds: dies of an AMD GPU to which workgroups go in turns, each with an L2 cache of its own.
        gpu: whether Triton kernels run on it.
    """

    arch: str
    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    fp8_units: bool = False
    fp8_cast: bool = False
    nvfp4_units: bool = False
    tma: bool = False
    pdl: bool = False
    lanes: int = 32
    units: int = 0
    xcds: int = 1
    gpu: bool = True


CPU = Hardware("cpu", gpu=False)

_AMD = {
    # CDNA2 has no FP8 units; Triton converts in software.
    "gfx90a": Hardware("gfx90a", fp8_cast=True, lanes=64, units=104),
    "gfx942": Hardware("gfx942", torch.float8_e4m3fnuz, fp8_units=True, fp8_cast=True, lanes=64, units=304, xcds=8),
    "gfx950": Hardware("gfx950", torch.float8_e4m3fn, fp8_units=True, fp8_cast=True, lanes=64, units=256, xcds=8),
}


def amd(arch: str) -> Hardware:
    """Facts of an AMD architecture by its name as the driver gives it ("gfx942:sramecc+:xnack-")."""
    name = arch.split(":")[0]
    if name not in _AMD:
        raise ValueError(f"{name} is not supported: llm-quant-rocm knows {', '.join(_AMD)}; run on one of these")
    return _AMD[name]


def units_of(arch: str) -> int:
    """The compute units, or multiprocessors, of the largest GPU of an architecture. Ranks that must agree take this, as
    the driver's number of one product or partition is not that of another. Of NVIDIA's, and of any that is not known
    here, those of an H100 and an H200."""
    return _AMD[arch].units if arch in _AMD else 132


@cache
def nvidia(major: int, minor: int) -> Hardware:
    """Facts of an NVIDIA compute capability. FP8 came with 8.9, the tensor memory accelerator and
    programmatic dependent launch with 9.0, NVFP4 with 10.0."""
    fp8, hopper, blackwell = (major, minor) >= (8, 9), major >= 9, major >= 10
    return Hardware(f"sm_{major}{minor}", fp8_units=fp8, fp8_cast=fp8, nvfp4_units=blackwell, tma=hopper, pdl=hopper)


def _dies(largest: Hardware, units: int) -> int:
    """How many dies a GPU, or a partition of one, has with so many units. The driver does not say. All dies of an
    architecture have as many, but for MI308X's: its four have 20 each, those of gfx942's other products 38."""
    each = 20 if largest.arch == "gfx942" and units % 20 == 0 else largest.units / largest.xcds
    return max(1, round(units / each))


@cache
def _gpu(index: int) -> Hardware:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        largest, units = amd(properties.gcnArchName), properties.multi_processor_count
        return replace(largest, units=units, xcds=_dies(largest, units))
    return nvidia(properties.major, properties.minor)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors an NVIDIA GPU has. Asks the driver once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def detect(device: torch.device) -> Hardware:
    """Facts of `device`. Asks the driver once per GPU.

    Raises:
        ValueError: an AMD GPU that the library does not know.
    """
    if device.type != "cuda":
        return CPU
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)
