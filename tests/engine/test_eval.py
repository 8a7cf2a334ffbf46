# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm eval` on the demo model, in a real vLLM, offline."""

import json
import math
from pathlib import Path

import fake_quantized
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from llm_quant_rocm.cli._app import app

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "examples" / "demo_model"
TASK = """
task: heldout
dataset_path: text
dataset_kwargs: {{data_files: {{test: {text}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
"""


def word_perplexity_in_fp32() -> float:
    """Of the demo model over the held-out text, by transformers, in windows of 511 tokens, the begin-of-text token in
    front: vLLM wants one of 512 positions for a token to come."""
    text, tokenizer = (DEMO_MODEL / "heldout.txt").read_text(), AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    windows = [[tokenizer.bos_token_id, *tokens[start : start + 510]] for start in range(0, len(tokens), 510)]
    loss = -fake_quantized.logprobs(fake_quantized.load(DEMO_MODEL), windows).double().sum().item()
    return math.exp(loss / len(text.split()))


@pytest.mark.usefixtures("forked")
def test_perplexity_of_the_demo_model() -> None:
    result = CliRunner().invoke(app, ["eval", str(DEMO_MODEL), "--quantization", "bf16,nvfp4", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert {"device", "torch", "llm-quant-rocm", "date"} <= answer["environment"].keys()
    assert (answer["words"], answer["context"]) == (7656, 512)
    bf16, nvfp4 = answer["methods"]["bf16"], answer["methods"]["nvfp4"]
    # A CPU adds in its own order, and rounds to bf16 in between: 4427 with AVX-512, 4422 without.
    assert bf16["word_perplexity"] == pytest.approx(word_perplexity_in_fp32(), rel=1e-3)
    # Rounded to nearest it would lose 9.2%: benchmarks/results/quantize_cpu.json.
    assert 5.0 < nvfp4["loss_percent"] < 8.5
    assert "NvFp4LinearMethod" in nvfp4["linear_methods"]


@pytest.mark.usefixtures("forked")
def test_tasks_of_lm_eval(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "task.yaml").write_text(TASK.format(text=DEMO_MODEL / "heldout.txt"))
    result = CliRunner().invoke(
        app,
        ["eval", str(DEMO_MODEL), "--quantization", "ptpc_fp8", "--json", "--tasks", "heldout"]
        + ["--include", str(tmp_path), "--limit", "4"],
    )
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)["methods"]["ptpc_fp8"]["tasks"]["heldout"]
    assert metrics["word_perplexity"] > 1000


def test_a_misspelt_method_ends_before_any_engine_starts() -> None:
    result = CliRunner().invoke(app, ["eval", str(DEMO_MODEL), "--quantization", "bf16,fp8_per_tensor,ptpc_fp9"])
    assert result.exit_code == 1
    assert "measured" not in result.stderr
    assert "--quantization names ptpc_fp9, which vLLM does not know: it could be ptpc_fp8" in result.stderr
