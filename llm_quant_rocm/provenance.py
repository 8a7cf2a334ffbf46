# SPDX-License-Identifier: Apache-2.0
"""What belongs beside every figure: the device, the versions and the commit."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from llm_quant_rocm import __version__
from llm_quant_rocm.environment import read
from llm_quant_rocm.versions import installed

_PACKAGES = ("vllm", "sglang", "aiter", "lm-eval")


def environment(gpus: int | None = None) -> dict[str, str]:
    """Names and versions of the machine and the software, and the day.

    `commit` is what the variable LLM_QUANT_ROCM_COMMIT says, by which a run's steps have one although their figures
    change the repository, else that of the repository that this package lies in; an installed package has its version
    alone.

    Args:
        gpus: how many of the machine's were used; None: all.
    """
    import torch

    found = {"device": _gpus(gpus) if torch.cuda.is_available() else _cpu()}
    versions = {"torch": torch.__version__, "triton": triton_version()}
    versions |= {package: installed(package) for package in _PACKAGES}
    found |= {package: version for package, version in versions.items() if version}
    found |= {"python": platform.python_version(), "llm-quant-rocm": __version__}
    commit = read("LLM_QUANT_ROCM_COMMIT") or _commit()
    if commit:
        found["commit"] = commit
    return found | {"date": datetime.now(UTC).strftime("%Y-%m-%d")}


def line(found: dict[str, str]) -> str:
    """`environment` in one line, the device first."""
    rest = [f"{name} {value}" for name, value in found.items() if name not in ("device", "date")]
    return ", ".join([found["device"], *rest, found["date"]])


def triton_version() -> str | None:
    """Triton's version; None where it is not installed. Its distribution has several names."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def without_count(device: str) -> str:
    """The GPU's name in `device` of `environment`, which says how many there are."""
    return re.sub(r"^(\d+ of )?\d+ x ", "", device)


def _gpus(used: int | None) -> str:
    import torch

    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    if count == 1:
        return name
    return f"{count} x {name}" if used in (None, count) else f"{used} of {count} x {name}"


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    names = information.read_text().splitlines() if information.is_file() else []
    name = next((text.split(":", 1)[1].strip() for text in names if text.startswith("model name")), "")
    return f"{name or platform.machine()} ({os.cpu_count()} CPUs)"


def _commit() -> str | None:
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # there is no git
        return None
