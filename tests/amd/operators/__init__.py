# SPDX-License-Identifier: Apache-2.0
"""The operators whose kernels are proven for AMD, one module each. A new module here is all that a new kernel needs.

A module has the name of its operator's environment variable and defines three things:

    BUDGETS: what the machine code of each of its kernels must be, by the kernel's name (budget.Budget); a kernel that
        several operators launch belongs to one of them
    shipped(hardware): cases by name that launch the operator in the shapes of real models; compiled, not executed
    executed(hardware): cases by name that run the operator on small and nasty input and compare it with the reference

A case is a function without arguments, called where the CPU is a virtual GPU with these facts (virtual_gpu.py).
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import triton

from llm_quant_rocm.hardware import Hardware
from tests.amd import budget, isa, tritons

# Modules of llm_quant_rocm.kernels that are for Hopper: all but rms_norm_walk, which asks for Hopper by name, for its
# matrix unit. These do not compile here, and test_refusals.py shows that the library never comes to them.
NOT_FOR_AMD = (
    "nvfp4_expand", "nvfp4_wgmma", "nvfp4_wgmma_large", "nvfp4_wgmma_split", "ptpc_moe_hopper", "ptpc_wgmma",
    "ptpc_wgmma_few", "ptpc_wgmma_grouped", "rms_norm_walk",
)  # fmt: skip

NAMES = sorted(module.name for module in pkgutil.iter_modules(__path__))


def shared_out(
    cases: dict[str, Callable[[], object]], hardware: Hardware, alike: bool = False
) -> dict[str, Callable[[], object]]:
    """All of these cases, but with the oldest Triton every third: that executes each on one architecture.

    To compile what is executed takes much of the tests' time. Where architectures are `alike`, as in a kernel of
    integers, the newest Triton has every third as well, each on another architecture than the oldest.
    """
    newest = triton.__version__ != tritons.OLDEST
    if newest and not alike:
        return cases
    archs = list(budget.LDS)
    return dict(list(cases.items())[(archs.index(hardware.arch) + newest) % len(archs) :: len(archs)])


def four_waves(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    """What is wrong with the launch of a kernel that has a program for each row: of fewer waves than a compute unit has
    SIMDs, some of these are idle where there are few rows."""
    columns, waves = constants["COLUMNS"], constants["num_warps"]
    return [f"{waves} waves share {columns} columns"] if columns >= 2048 and waves < 4 else []


def decoding(assembly: isa.Assembly, arch: str, constants: Mapping[str, Any]) -> list[str]:
    """What a loop does too much that makes fp16 of FP8, whose last step is a product of two values."""
    hot = assembly.hot_loop
    if not constants["DECODE"] or not hot:
        return []
    found = isa.count(hot.instructions)
    each = found["vector"] / (2 * found["vector v_pk_mul_f16"])
    return [f"it takes {each:.2f} vector instructions for a value"] if each > 4.25 else []


def operator(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
