# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for every supported AMD architecture, use its matrix units, and fit into a multiprocessor.

Triton does not check how much LDS a kernel takes, and a kernel that spills registers is correct and slow: without
such a GPU nothing but these tests would notice either.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("triton"):
    pytest.skip("needs Triton", allow_module_level=True)

from tests.amd.compile_kernels import CASES

ROOT = Path(__file__).parents[2]
LDS = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}
MATRIX = {
    "gfx90a": r"v_mfma_f32_\w+f16\b",  # CDNA2 multiplies FP16: the codes are decoded in the kernel
    "gfx942": r"v_mfma_f32_\w+_fp8_fp8\b",
    "gfx950": r"v_mfma_f32_\w+_(f8f6f4|fp8_fp8)\b",
}
CAST = {"gfx942": r"v_cvt_pk_fp8_f32\b", "gfx950": r"v_cvt_scalef32_pk_fp8_f32\b"}
CASE_IDS = [(arch, case) for arch in LDS for case in CASES]


@cache
def kernels_of(arch: str) -> dict[str, Any]:
    """Everything that compile_kernels.py compiled for `arch`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.amd.compile_kernels", arch]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout) | {"stderr": done.stderr}


def resource(assembly: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", assembly)
    assert found, f"the assembly does not say {name}"
    return int(found[1])


@pytest.mark.parametrize(("arch", "case"), CASE_IDS, ids=[f"{arch}-{case}" for arch, case in CASE_IDS])
def test_compiles(arch: str, case: str) -> None:
    kernels = kernels_of(arch)[case]
    assert kernels != "aborted", kernels_of(arch)["stderr"][-3000:]
    assert [kernel["name"] for kernel in kernels] == launched(case)
    for kernel in kernels:
        assembly = kernel["assembly"]
        assert kernel["lds"] <= LDS[arch]
        assert resource(assembly, "vgpr_spill_count") == 0
        assert resource(assembly, "private_segment_fixed_size") == 0
        if kernel["name"] in ("ptpc_gemm_kernel", "grouped_gemm_kernel"):
            assert re.findall(r"v_mfma\w+", assembly), "no matrix instruction"
            for instruction in re.findall(r"v_mfma\w+", assembly):
                assert re.fullmatch(MATRIX[arch], instruction), instruction
        elif "quant" in kernel["name"] and arch in CAST:
            assert re.search(CAST[arch], assembly), "FP8 is converted in software"


def launched(case: str) -> list[str]:
    """The kernels that a case must launch, in order."""
    if case.startswith("ptpc_moe"):
        return ["per_token_quant_kernel", "grouped_gemm_kernel", "activation_quant_kernel", "grouped_gemm_kernel"]
    kernel = case.split("-")[0].removeprefix("add_") + "_kernel"
    return [kernel, "split_k_kernel"] if case.endswith("split_k") else [kernel]
