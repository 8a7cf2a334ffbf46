# SPDX-License-Identifier: Apache-2.0
"""The measured page: a section and a plot for every file, in the page's order, whatever the architecture."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import _figures, _lines, _markdown, _overview, report
from benchmarks.regenerate import STEPS

RESULTS = Path(report.__file__).parent / "results"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the JSON files, where the report draws."""
    for file in RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    for module in (_lines, _markdown, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def test_every_step_has_a_section() -> None:
    names = [step.result.format(arch=arch, gpu=arch) for step in STEPS for arch in ("sm_90", "gfx942")]
    names = [name for name in names if not name.startswith("nvfp4_configs")]
    assert {name for _, name, _ in report.chosen(names)} == set(names)
    with pytest.raises(ValueError, match="results/new_benchmark_sm_90.json has no section: give it one"):
        list(report.chosen(["new_benchmark_sm_90"]))


def test_the_order_of_the_page() -> None:
    names = ["demo_cpu", "quick_reduce_sm_90_tp16", "quick_reduce_sm_90_tp2", "ptpc_gemm_sm_90"]
    assert [name for _, name, _ in report.chosen(names)] == [names[3], names[2], names[1], names[0]]


def test_the_committed_page_is_that_of_the_committed_figures(results: Path) -> None:
    names = sorted(file.stem for file in results.glob("*.json"))
    page = report.page(names)
    names = [name for _, name, _ in report.chosen(names)]
    assert page == (RESULTS / "README.md").read_text(), "run python -m benchmarks.report"
    for name in names:
        assert f"[{name}.json]({name}.json)" in page
        assert f"({name}.png)" in page and (results / f"{name}.png").stat().st_size > 5000
        assert (RESULTS / f"{name}.png").is_file(), "run python -m benchmarks.report"


def test_the_tables_of_readme_and_docs_are_those_of_the_committed_figures() -> None:
    found = []
    for page in _figures.PAGES:
        text = page.read_text()
        assert _figures.filled(text) == text, f"{page.name}: run python -m benchmarks.report"
        found += [name for _, name, _ in _figures.MARK.findall(text)]
    assert sorted(found) == sorted(_figures.TABLES), "a table is on no page, or on two"


def test_the_picture_of_readme_is_drawn_of_the_committed_figures(results: Path) -> None:
    files = {engine.file for engine in _overview.measured_engines()}
    assert set(_overview.PICTURED) <= files
    named = _overview.OURS | _overview.THEIRS
    unnamed = {m for engine in _overview.measured_engines() for m in engine.methods if m != engine.base} - named.keys()
    assert not unnamed, "README's table would leave these methods out: name them in benchmarks/_overview.py"
    _overview.draw()
    assert (results / "overview.png").stat().st_size > 50_000
    assert "](benchmarks/results/overview.png)" in (RESULTS.parents[1] / "README.md").read_text()


ENVIRONMENT = {"device": "2 x a GPU", "torch": "2", "triton": "3", "commit": "abc", "date": "today"}


def rows(names: list[str], **values: list[Any]) -> list[dict[str, Any]]:
    """A row for each pair of values, names' times 2, 3, ... microseconds."""
    (first, second) = values
    us = {name: 2.0 + place for place, name in enumerate(names)}
    return [{first: a, second: b, "us": us} for a in values[first] for b in values[second]]


NEW: dict[str, dict[str, Any]] = {
    "routing_sm_90": {
        "rows": [
            row | {"step": step}
            for step in ("schedule", "sum")
            for row in rows(["ours", "torch"], model=["mixtral", "qwen3"], tokens=[1, 64])
        ]
    },
    "nvfp4_moe_sm_90": {
        "rows": [
            row | {"router": "fair", "experts_chosen": 8.0, "limit_us": 1.0}
            for row in rows(["bf16", "marlin", "nvfp4_moe"], model=["mixtral"], tokens=[1, 64])
        ]
    },
    "ptpc_moe_sm_90": {
        "copy_gb_s": 3000,
        "fp8_tflop_s": 1300,
        "rows": [
            row | {"router": router, "experts_chosen": 8.0, "limit_us": 1.0, "failed": {"vllm_cutlass": "no kernel"}}
            for router in ("fair", "skewed")
            for row in rows(["bf16", "vllm_fp8", "ptpc_moe"], model=["mixtral-8x7b"], tokens=[1, 64])
        ],
    },
    "reduce_norm_quant_tp2_sm_90": {
        "world": 2,
        "norm_and_quant": "ours",
        "rows": rows(["separate", "two_kernels", "two_shot", "fused"], columns=[4096, 8192], rows=[1, 16]),
    },
    "quick_reduce_sm_90_tp2": {
        "world": 2,
        "rows": [{"bytes": size, "us": {"NCCL": 9.0, "FP4": 3.0}} for size in (4096, 1 << 20)],
    },
    "vllm_fusion_2_ranks_sm_90": {
        "vllm": "0.26.0",
        "ranks": 2,
        "layers": 24,
        "variants": {
            variant: {
                "kernels_of_a_prefill": {"rms_norm_quant_kernel": 3},
                "1 prompt": {"prefill_s": 0.01, "ms_a_step": step, "total_s": 1.0},
            }
            for variant, step in (("apart", 2.0), ("fused", 1.0))
        },
    },
    "vllm_fusion_demo_sm_90": {"variants": {"apart": {"perplexity": 50.0}, "fused": {"perplexity": 50.1}}},
    "sglang_engine_sm_90": {
        "demo_model": {"bf16": {"perplexity": 50.0, "agreement": 1.0}},
        "llama_3_70b_8_layers": {"bf16": {"10 prompts": {"prefill_s": 1.0, "ms_a_step": 2.0, "total_s": 3.0}}},
    },
}


@pytest.mark.parametrize("name", NEW)
def test_figures_that_are_still_to_come(name: str, results: Path) -> None:
    (results / f"{name}.json").write_text(json.dumps({"environment": ENVIRONMENT, **NEW[name]}))
    page = report.page([name])
    assert "2 x a GPU, torch 2, triton 3, commit abc, today |" in page
    assert f"({name}.png)" in page and (results / f"{name}.png").stat().st_size > 5000


def test_experts_beside_who_failed(results: Path) -> None:
    name = "ptpc_moe_sm_90"
    (results / f"{name}.json").write_text(json.dumps({"environment": ENVIRONMENT, **NEW[name]}))
    page = report.page([name])
    assert "today; copy 3000 GB/s and fp8 1300 TFLOP/s in the same run" in page
    assert "| limit | bf16 / ptpc_moe | vllm_fp8 / ptpc_moe | vllm_cutlass / ptpc_moe |" in page
    assert "| mixtral-8x7b | skewed | 64 | 8 | 2.0 | 3.0 | failed | 4.0 | 1.0 | 0.50 | 0.75 |  |" in page
    assert "Failed: vllm_cutlass: no kernel" in page
    table = _figures.PTPC_EXPERTS(f"{name}.json")
    assert table.startswith("2 x a GPU")
    assert table.endswith("| tokens | Mixtral 8x7B |\n| --- | --- |\n| 1 | 0.75 (0.75) |\n| 64 | 0.75 (0.75) |")


@pytest.mark.parametrize("missing", ["bf16", "nvfp4"])
def test_an_engine_that_failed_leaves_its_cells_empty(
    missing: str, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = json.loads((results / "sglang_engine_sm_90.json").read_text())
    methods = {
        name: {"failed": "no memory"} if name == missing else found
        for name, found in result["llama_3_70b_8_layers"].items()
    }
    _, _, *lines = _figures.engine_table(result, methods, with_gpu=True).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {name for name, *_ in rows} == {f"`{name}`" for name in methods if name != missing}
    assert all(bool(row[-2]) == (missing != "bf16") for row in rows)
    said = _overview.totals(methods, "bf16", {"nvfp4": "nvfp4", "ptpc_fp8": "ptpc_fp8"})
    assert ("nvfp4" in said, bool(said)) == (False, missing != "bf16")


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ([1, 2, 4, 8], ["1", "2", "4", "8"]),
        ([1, 48, 64, 256, 700, 1000, 1024, 4096], ["1", "48", "256", "700", "4096"]),
        ([300], ["300"]),
    ],
)
def test_sizes_on_an_axis_leave_each_other_room(sizes: list[int], shown: list[str]) -> None:
    axis = _lines.plt.figure().subplots()
    _lines.by_size(axis, sizes)
    assert [label.get_text() for label in axis.get_xticklabels()] == shown
    _lines.plt.close("all")
