# SPDX-License-Identifier: Apache-2.0
"""Processes that begin with different kernels have the same keys of them in Triton's cache."""

import json
import subprocess
import sys

import pytest

from tests.amd import tritons

_KEYS = """
import json, pkgutil, sys
from importlib import import_module

import torch
from triton.runtime.jit import JITFunction

from llm_quant_rocm import hardware, kernels
from llm_quant_rocm.kernels import keys

arch, order, foreign = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
torch.cuda.is_available = lambda: True
keys.detect = lambda device: hardware.nvidia(9, 0) if arch == "sm_90" else hardware.amd(arch)
modules = [m.name for m in pkgutil.iter_modules(kernels.__path__) if m.name not in foreign]
found = {
    f"{name}.{kernel}": function
    for name in modules
    for kernel, function in vars(import_module(f"{kernels.__name__}.{name}")).items()
    if isinstance(function, JITFunction) and kernel.endswith("_kernel") and function.__module__.endswith(f".{name}")
}
keys.settle()
print(json.dumps({name: found[name].cache_key for name in sorted(found)[::order]}))
"""


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_keys_do_not_depend_on_what_came_before(arch: str) -> None:
    """With the oldest Triton, where they did (`kernels/keys.py`)."""
    from tests.amd.operators import NOT_FOR_AMD

    path = [*tritons.search_path(tritons.OLDEST), *sys.path]
    foreign = ",".join(NOT_FOR_AMD) if arch != "sm_90" else ""
    there, back = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", _KEYS, arch, order, foreign],
                env={"PYTHONPATH": ":".join(path)}, stdout=subprocess.PIPE, check=True,
            ).stdout
        )
        for order in ("1", "-1")
    )  # fmt: skip
    assert len(there) > 15
    assert there == back
