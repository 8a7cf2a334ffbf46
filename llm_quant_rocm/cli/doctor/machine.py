# SPDX-License-Identifier: Apache-2.0
"""The devices: what they are, what they can do, how fast their memory is, and which reach each other."""

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

import torch

from llm_quant_rocm import hardware, timing
from llm_quant_rocm.cli.doctor.table import Part, Problem, heading
from llm_quant_rocm.formats import fp8

_GIB = 2**30
# Far above any cache, and copied in some milliseconds; and what is too little to say anything.
_COPY_BYTES, _LEAST_BYTES = 512 * 2**20, 128 * 2**20
# What the kernel drivers of AMD's and NVIDIA's GPUs put there, and the vendor's build of torch.
DRIVERS = {Path("/dev/kfd"): ("an AMD GPU", "ROCm"), Path("/dev/nvidia0"): ("an NVIDIA GPU", "CUDA")}
# How to be let at them, by that build.
_OPENED = {
    "ROCm": "join the groups that own it, `render` and `video`, or in a container pass --device=/dev/kfd "
    "--device=/dev/dri --group-add video",
    "CUDA": "join the group that owns it, or in a container pass --gpus all",
}


@dataclass(frozen=True)
class Device:
    """One GPU, or the CPU where there is none.

    Attributes:
        fp8: the E4M3 flavour, and whether matrix units multiply it.
        nvfp4_units: whether its matrix units multiply NVFP4.
        copy: GB/s read and written by a copy within its memory; None where it was not measured.
        reaches: the GPUs whose memory it reaches.
    """

    device: str
    name: str
    architecture: str
    fp8: str
    nvfp4_units: bool = field(metadata=heading("FP4 units"))
    memory: float = field(metadata=heading("memory GiB"))
    free: float | None = field(metadata=heading("free GiB"))
    copy: float | None = field(metadata=heading("copy GB/s"))
    reaches: list[int]


def examine(drivers: dict[Path, tuple[str, str]] | None = None) -> Part:
    """The devices that torch sees, and why it may not see one that is there (`drivers`: DRIVERS)."""
    problems: list[Problem] = []
    rows = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            rows.append(_gpu(index))
        except ValueError as error:  # an AMD GPU that the library does not know
            cure = "hide it with HIP_VISIBLE_DEVICES, or add it: docs/adding_an_architecture.md"
            problems.append(Problem(f"cuda:{index}: {error}", cure))
        except RuntimeError as error:
            cure = "see whether another program fills its memory, and whether the driver suits torch's build"
            problems.append(Problem(f"cuda:{index} does not answer: {str(error).splitlines()[0]}", cure))
    notes = [f"{platform.platform()}, Python {platform.python_version()}"]
    if not rows and not problems:
        rows.append(_cpu())
        notes.append("no GPU: operators run by their torch reference, exact and slow")
        problems += _unseen(DRIVERS if drivers is None else drivers)
    return Part("machine", "Machine", rows, notes, problems)


def _cpu() -> Device:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    name = f"{platform.machine()}, {os.cpu_count()} cores"
    return Device("cpu", name, hardware.CPU.arch, _fp8(hardware.CPU), False, memory, None, None, [])


def _gpu(index: int) -> Device:
    device = torch.device("cuda", index)
    facts = hardware.detect(device)
    free, total = torch.cuda.mem_get_info(device)
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return Device(
        str(device),
        torch.cuda.get_device_name(device),
        facts.arch,
        _fp8(facts),
        facts.nvfp4_units,
        total / _GIB,
        free / _GIB,
        _copy_bandwidth(device, min(_COPY_BYTES, free // 4)),
        [other for other in others if torch.cuda.can_device_access_peer(index, other)],
    )


def _fp8(facts: hardware.Hardware) -> str:
    flavour = "FNUZ" if facts.fp8_dtype == fp8.FNUZ.dtype else "OCP"
    return flavour if facts.fp8_units else f"{flavour}, no units"


def _copy_bandwidth(device: torch.device, size: int) -> float | None:
    """`timing.copy_bandwidth` in GB/s; None where the memory has no room for copies of `size` bytes."""
    if size < _LEAST_BYTES:
        return None
    try:
        return timing.copy_bandwidth(device, size) / 1e9
    except torch.OutOfMemoryError:
        return None


def _unseen(drivers: dict[Path, tuple[str, str]]) -> list[Problem]:
    """Why torch sees no GPU although a driver of one is there."""
    build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else None
    problems = []
    for path, (gpu, wanted) in drivers.items():
        if not path.exists():
            continue
        if build != wanted:
            problems.append(
                Problem(
                    f"this machine has {gpu} ({path}), and torch {torch.__version__} is built for {build or 'CPUs'}",
                    f"install torch's build for {wanted}",
                )
            )
        elif not os.access(path, os.R_OK | os.W_OK):
            problems.append(Problem(f"torch sees no GPU: {path} may not be opened", _OPENED[wanted]))
        else:
            problems.append(
                Problem(
                    f"this machine has {gpu} ({path}), and torch sees none",
                    "see whether HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES hides it, and "
                    f"whether the driver suits torch's {wanted}",
                )
            )
    return problems
