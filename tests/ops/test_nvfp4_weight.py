# SPDX-License-Identifier: Apache-2.0
"""ops.prepare_nvfp4_weight: on the CPU, where no kernel wants another layout, and as an AMD GPU's kernels want it."""

import pytest
import torch

from llm_quant_rocm import backends, hardware, ops
from llm_quant_rocm.formats import nvfp4, nvfp4_mfma
from llm_quant_rocm.ops._row_call import rows_of
from llm_quant_rocm.ops.nvfp4_weight import MAX_RUNS, runs_of
from tests.nvfp4_inputs import nasty_weight


def test_a_weight_stays_as_it_is() -> None:
    for weight in (nasty_weight(10, 32), nasty_weight(6, 48, 3)):
        prepared = ops.prepare_nvfp4_weight(weight)
        assert prepared.codes is weight.codes
        assert prepared.scales is weight.scales
        assert prepared.global_scale is weight.global_scale
        assert (prepared.layout, prepared.n, prepared.k) == ("row", weight.n, weight.k)
        assert prepared.runs is None and runs_of(prepared) == []


def test_a_view_becomes_contiguous() -> None:
    whole = nasty_weight(20, 64)
    view = nvfp4.NvFp4Weight(whole.codes[::2, :16], whole.scales[::2, :2], whole.global_scale[::2])
    prepared = ops.prepare_nvfp4_weight(view)
    assert prepared.codes.is_contiguous() and prepared.scales.is_contiguous() and prepared.global_scale.is_contiguous()
    x = torch.randn(3, 32).bfloat16()
    assert torch.equal(ops.nvfp4_gemm(x, prepared), ops.nvfp4_gemm(x, view))


@pytest.fixture
def gfx942(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has an AMD GPU's facts."""
    monkeypatch.setattr(hardware, "CPU", hardware.amd("gfx942"))
    monkeypatch.setattr(backends, "missing", lambda module: None)


def with_scales(scales: torch.Tensor) -> nvfp4.NvFp4Weight:
    weight = nasty_weight(len(scales), 32)
    return nvfp4.NvFp4Weight(weight.codes, weight.scales, scales)


@pytest.mark.parametrize(
    ("scales", "runs"),
    [
        ([0.1] * 5, [(5, 0.1)]),
        ([0.1] * 5 + [0.3] * 2 + [0.1] * 3, [(5, 0.1), (2, 0.3), (3, 0.1)]),
        ([float(row) for row in range(1, MAX_RUNS + 1)], [(1, float(row)) for row in range(1, MAX_RUNS + 1)]),
        ([float(row) for row in range(1, MAX_RUNS + 2)], []),
    ],
    ids=["one", "three", "as-many-as-fit", "too-many"],
)
@pytest.mark.usefixtures("gfx942")
def test_runs_of_rows_under_one_global_scale(scales: list[float], runs: list[tuple[int, float]]) -> None:
    prepared = ops.prepare_nvfp4_weight(with_scales(torch.tensor(scales)))
    assert prepared.runs is not None and prepared.runs.is_cpu
    assert prepared.runs.shape == (MAX_RUNS, 2), "engines copy one weight's into another's"
    assert runs_of(prepared) == [(count, torch.tensor(scale).item()) for count, scale in runs]


@pytest.mark.usefixtures("gfx942")
def test_experts_have_no_runs() -> None:
    assert ops.prepare_nvfp4_weight(nasty_weight(32, 64, 3)).runs is None


@pytest.mark.usefixtures("gfx942")
def test_runs_of_another_weight_are_refused() -> None:
    prepared, other = (ops.prepare_nvfp4_weight(with_scales(torch.ones(n))) for n in (5, 6))
    object.__setattr__(prepared, "runs", other.runs)
    with pytest.raises(ValueError, match=r"runs \[\(6, 1.0\)\] do not have the weight's 5 rows; make it with"):
        runs_of(prepared)


@pytest.mark.usefixtures("gfx942")
def test_runs_that_went_to_the_gpu_are_not_read() -> None:
    """To read them there would wait for the GPU; what the host does not know, it does not use."""
    prepared = ops.prepare_nvfp4_weight(with_scales(torch.ones(5)))
    assert prepared.runs is not None
    object.__setattr__(prepared, "runs", prepared.runs.to("meta"))
    assert runs_of(prepared) == []


@pytest.mark.usefixtures("gfx942")
def test_gate_and_up_go_in_turns_with_their_scales() -> None:
    weight = nasty_weight(64, 32, 2)
    order = nvfp4_mfma.gate_up_order(64, torch.device("cpu"))
    in_turns = nvfp4.NvFp4Weight(
        weight.codes[:, order],
        weight.scales.view(torch.uint8)[:, order].view(torch.float8_e4m3fn),
        weight.global_scale[:, order],
    )
    found, expected = ops.prepare_nvfp4_weight(weight, gate_up=True), ops.prepare_nvfp4_weight(in_turns)
    assert (found.layout, expected.layout) == ("mfma_gate_up", "mfma")
    for part in ("codes", "scales", "global_scale"):
        assert torch.equal(getattr(found, part), getattr(expected, part))
    assert found.global_scale.is_contiguous()


@pytest.mark.parametrize(("forced", "layouts"), [("gemm", ("row", "mfma")), ("moe", ("mfma", "row"))])
@pytest.mark.usefixtures("gfx942")
def test_who_forces_the_reference_gets_rows(
    forced: str, layouts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the operator that will read the weight: of no other layout could the reference make anything."""
    monkeypatch.setenv(f"LLM_QUANT_ROCM_NVFP4_{forced.upper()}", "reference")
    weights = nasty_weight(32, 64), nasty_weight(32, 64, 3)
    assert tuple(ops.prepare_nvfp4_weight(weight).layout for weight in weights) == layouts


def test_rows_as_the_kernels_read_them() -> None:
    wide = torch.randn(4, 6, 40)
    for x in (wide, wide[..., ::2], wide.transpose(0, 2), wide[:, 1:3, 3:9], wide[0, 0], wide[:1].expand(5, -1, -1)):
        rows = rows_of(x)
        assert rows.stride(-1) == 1
        assert torch.equal(rows, x.reshape(-1, x.shape[-1]))
    assert rows_of(wide).data_ptr() == wide.data_ptr(), "copied only where it must be"
