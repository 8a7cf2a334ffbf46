# SPDX-License-Identifier: Apache-2.0
"""What the tuner would try, without a GPU: the shipped winners, and nothing twice."""

import pytest

pytest.importorskip("triton")

from llm_quant_rocm import hardware, tuning
from llm_quant_rocm.kernels.ptpc_gemm import GemmConfig
from llm_quant_rocm.ops.nvfp4_gemm import BACKENDS, kernels_of
from llm_quant_rocm.tune import OPERATORS, tuner

HOPPER = hardware.nvidia(9, 0)
DEVICES = [HOPPER, *(hardware.amd(arch) for arch in ("gfx90a", "gfx942", "gfx950"))]
SHAPES = [
    (16, 10240, 8192),
    (1, 512, 256),
    (64, 7168, 2048),
    (128, 2048, 4096),
    (512, 8192, 28672),
    (4096, 57344, 8192),
]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_there_are_candidates_for_every_shape(operator: str, device: hardware.Hardware) -> None:
    for m, n, k in SHAPES:
        found = tuner(operator).candidates(device, m, n, k)
        assert 1 <= len(found) == len(set(found)) <= 200, (m, n, k)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_shipped_winners_are_candidates(operator: str) -> None:
    make = (lambda fields: GemmConfig(**fields)) if operator == "ptpc_gemm" else kernels_of("sm_90").config_of
    known = tuning._read(tuning.resources.files("llm_quant_rocm") / "configs" / operator / "sm_90.json")[1]
    assert known
    for shape in known:
        assert make(shape.config) in tuner(operator).candidates(HOPPER, shape.m, shape.n, shape.k), shape


@pytest.mark.parametrize(
    ("m", "us", "winner"),
    [
        (16, {"ours": 10.0, "torch": 9.9}, "torch"),
        (16, {"ours": 10.0, "torch": 10.1}, "triton"),
        (1024, {"ours": 10.0, "torch": 10.4}, "torch"),
        (1024, {"ours": 10.0, "torch": 10.6}, "triton"),
        (16, {"ours": 10.0}, "triton"),
    ],
)
def test_who_serves_a_shape_of_ptpc(m: int, us: dict[str, float], winner: str) -> None:
    assert tuner("ptpc_gemm").backend(m, us) == winner


@pytest.mark.parametrize(
    ("us", "winner"),
    [
        ({"ours": 10.0, "bf16": 5.0}, "triton"),
        ({"ours": 10.0, "bf16": 5.0, "torch": 9.9}, "torch"),
        ({"ours": 10.0, "bf16": 5.0, "torch": 10.1}, "triton"),
    ],
    ids=["hopper", "vendor", "kernel"],
)
def test_who_serves_a_shape_of_nvfp4(us: dict[str, float], winner: str) -> None:
    """bf16 is timed to compare with; "torch" is AMD's other way, and a backend's name."""
    assert tuner("nvfp4_gemm").backend(1024, us) == winner
    assert winner in {backend.name for backend in BACKENDS}
