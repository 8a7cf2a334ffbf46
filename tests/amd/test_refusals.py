# SPDX-License-Identifier: Apache-2.0
"""What an AMD GPU cannot do is refused by the library, with its own message, before a kernel is compiled."""

import os

import pytest
import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.formats import nvfp4, nvfp4_wgmma
from tests.amd import tritons
from tests.amd.budget import LDS
from tests.amd.isolated import call
from tests.amd.virtual_gpu import activate

ARCHS = pytest.mark.parametrize("arch", list(LDS))
TRITON = tritons.VERSIONS[-1]


def refused(arch: str, operator: str) -> tuple[str, int]:
    """What `operator` says on `arch` when its Triton backend is forced, and how many kernels it launched."""
    os.environ[f"LLM_QUANT_ROCM_{operator.upper()}"] = "triton"
    gpu = activate(arch)
    try:
        CALLS[operator]()
    except Exception as error:
        return f"{type(error).__name__}: {error}", len(gpu.launches)
    return "", len(gpu.launches)


def wide_row() -> None:
    ops.per_token_quant_fp8(torch.zeros(1, 65537))


def wide_norm() -> None:
    ops.rms_norm_quant_fp8(torch.zeros(1, 65537), torch.ones(65537))


def wide_gate() -> None:
    ops.act_and_mul_quant_fp8(torch.zeros(1, 2 * 65537))


def for_hopper(layout: str, n: int, k: int, *experts: int) -> ops.PreparedNvFp4Weight:
    weight = nvfp4.quantize(torch.linspace(-1, 1, n * k).view(n, k).expand(*experts, n, k))
    words, scales = nvfp4_wgmma.pack(weight.codes, weight.scales)
    return ops.PreparedNvFp4Weight(words, scales, weight.global_scale, layout, n, k)


def gemm() -> None:
    weight = for_hopper(nvfp4_wgmma.LAYOUT, 128, 256)
    ops.nvfp4_gemm(torch.zeros(4, 256, dtype=torch.bfloat16), weight)


def moe() -> None:
    w13, w2 = for_hopper(nvfp4_wgmma.LAYOUT_GATE_UP, 256, 256, 2), for_hopper(nvfp4_wgmma.LAYOUT, 256, 128, 2)
    x, ids = torch.zeros(4, 256, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int32)
    ops.nvfp4_moe(x, w13, w2, torch.ones(4, 1), ids)


CALLS = {
    "per_token_quant": wide_row,
    "rms_norm_quant": wide_norm,
    "act_and_mul_quant": wide_gate,
    "nvfp4_gemm": gemm,
    "nvfp4_moe": moe,
}


@ARCHS
@pytest.mark.parametrize(
    ("operator", "message"),
    [
        ("per_token_quant", "rows of more than 65536 columns do not fit in registers"),
        ("act_and_mul_quant", "rows of more than 65536 columns do not fit in registers"),
        ("rms_norm_quant", "rows of more than 65536 columns do not fit in registers"),
        ("nvfp4_gemm", ", not wgmma: arrange it there"),
        ("nvfp4_moe", "_gate_up, not wgmma_gate_up: arrange it there"),
    ],
)
def test_refused_with_our_own_message(arch: str, operator: str, message: str) -> None:
    text, launches = call(TRITON, refused, arch, operator)
    assert text.startswith("ValueError: ") and message in text
    assert launches == 0


def layout(arch: str) -> str:
    activate(arch)
    return ops.prepare_nvfp4_weight(nvfp4.quantize(torch.linspace(-1, 1, 128 * 256).view(128, 256))).layout


@ARCHS
def test_weights_are_not_arranged_for_hopper(arch: str) -> None:
    assert call(TRITON, layout, arch) not in (nvfp4_wgmma.LAYOUT, nvfp4_wgmma.LAYOUT_GATE_UP)


def test_an_unknown_gpu() -> None:
    with pytest.raises(ValueError, match="gfx1100 is not supported: llm-quant-rocm knows gfx90a, gfx942, gfx950"):
        hardware.amd("gfx1100")
