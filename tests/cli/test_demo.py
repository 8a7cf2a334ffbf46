# SPDX-License-Identifier: Apache-2.0
"""What the demo makes of its figures; no engine runs here."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")

from rich.console import Console

from llm_quant_rocm.cli._evaluate import Evaluation
from llm_quant_rocm.cli._json import json_of
from llm_quant_rocm.cli.demo import (
    BF16,
    METHODS,
    NVFP4,
    NVFP4_FP8,
    PER_TENSOR,
    PTPC,
    figures,
    judge,
    table,
)

WORDS = 1000
LOSS_PERCENT = {BF16: 0.0, PER_TENSOR: 6.0, PTPC: 0.1, NVFP4[0]: 9.0, NVFP4[1]: 9.0, NVFP4_FP8: 9.5}


def evaluation(loss_percent: float, greedy: tuple[int, ...] = (1, 2, 3, 4)) -> Evaluation:
    return Evaluation(WORDS * (8.4 + math.log1p(loss_percent / 100)), WORDS, greedy, ("Method",))


@pytest.fixture
def results() -> dict[str, Evaluation]:
    assert set(LOSS_PERCENT) == set(METHODS)
    return {name: evaluation(loss) for name, loss in LOSS_PERCENT.items()}


def test_good_figures_pass(results: dict[str, Evaluation]) -> None:
    verdict = judge(results)
    assert verdict.passed
    assert verdict.line == ("demo: passed. PTPC loses 0.10% word perplexity, per-tensor FP8 6.00%, NVFP4 9.00%")


@pytest.mark.parametrize(
    ("name", "loss", "words"),
    [
        (PTPC, 1.1, "PTPC may lose at most 1%"),
        (PTPC, math.nan, "PTPC may lose at most 1%"),
        (PER_TENSOR, 0.05, "PTPC must lose less than per-tensor"),
        (NVFP4[0], 13.0, "NVFP4 may lose at most 10%"),
        (NVFP4[1], math.nan, "NVFP4 may lose at most 10%"),
        (NVFP4_FP8, 12.5, "NVFP4 may lose at most 10%"),
    ],
)
def test_each_bad_figure_fails(results: dict[str, Evaluation], name: str, loss: float, words: str) -> None:
    verdict = judge(results | {name: evaluation(loss)})
    assert not verdict.passed
    assert verdict.line.startswith("demo: FAILED.")
    assert words in verdict.line


def test_a_figure_that_is_no_number_is_said_and_null_for_programs(results: dict[str, Evaluation]) -> None:
    results |= {NVFP4[1]: evaluation(math.nan), PER_TENSOR: evaluation(math.inf)}
    verdict = judge(results)
    assert "per-tensor FP8 inf%, NVFP4 nan%" in verdict.line
    answer = json.loads(json_of(figures(results, Path("model"), "text", verdict)), parse_constant=pytest.fail)
    for name in (NVFP4[1], PER_TENSOR):
        assert answer["methods"][name]["word_perplexity"] is answer["methods"][name]["loss_percent"] is None
    assert answer["methods"][PTPC]["loss_percent"] == pytest.approx(0.1)


def test_layouts_that_hold_other_values_fail(results: dict[str, Evaluation]) -> None:
    results[NVFP4[1]] = replace(results[NVFP4[1]], greedy=(1, 2, 3, 5))
    verdict = judge(results)
    assert not verdict.passed
    assert "must choose the same tokens" in verdict.line


def test_two_runs_of_an_engine_may_differ_in_a_few_tokens(results: dict[str, Evaluation]) -> None:
    for flipped, passed in ((7, True), (82, True), (83, False)):
        for name, tokens in zip(NVFP4, ([1] * 16589, [2] * flipped + [1] * (16589 - flipped)), strict=True):
            results[name] = replace(results[name], greedy=tuple(tokens))
        assert judge(results).passed == passed


def test_the_table_fits_80_columns(results: dict[str, Evaluation]) -> None:
    results[PTPC] = evaluation(0.1, (1, 2, 3, 5))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(results))
    text = console.export_text()
    assert "…" not in text
    for word in ("compressed-tensors", "ModelOpt", "ptpc_fp8", "fp8_per_tensor", "+0.10%", "75.00%", "agreement"):
        assert word in text, text


def test_figures_for_programs(results: dict[str, Evaluation]) -> None:
    answer = figures(results, Path("model"), "text", judge(results))
    assert answer["passed"] is True
    assert answer["tokens"] == 4
    methods = answer["methods"]
    assert list(methods) == list(METHODS)
    assert methods[NVFP4_FP8]["environment"] == {"LLM_QUANT_ROCM_NVFP4_PREFILL": "fp8"}
    assert [methods[name]["checkpoint"] for name in NVFP4] == ["compressed-tensors", "modelopt"]
    assert methods[PTPC]["checkpoint"] == "bf16"
    assert methods[NVFP4[0]]["loss_percent"] == pytest.approx(9.0)
