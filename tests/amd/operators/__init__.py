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
from types import ModuleType

# Kernels by their module in llm_quant_rocm.kernels that are built for one vendor's matrix unit, and never launched here:
# test_refusals.py shows that the library does not come to them.
NOT_FOR_AMD = {"nvfp4_wgmma": "Hopper's wgmma"}

NAMES = sorted(module.name for module in pkgutil.iter_modules(__path__))


def operator(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
