# SPDX-License-Identifier: Apache-2.0
"""vLLM at tensor parallel 2 with the quantized all-reduce: logprobs move as the codec says they should.

The engine computes in bf16, whose roundings are INT8's errors in size; so not all of what a codec does can be foreseen,
but nothing of what another codec would have done is seen.
"""

from pathlib import Path

import engines
import fake_all_reduce
import pytest
import torch
from conftest import succeed
from openai import OpenAI

from llm_quant_rocm.formats.wire import CODECS

PREFIX = "VLLM_ROCM_QUICK_REDUCE_"
LINE = "quantized all-reduce: process_group {} from 0 bytes, engine above 2147483648 bytes"


@pytest.fixture(scope="module")
def unquantized(folder: Path, dense_checkpoint: Path) -> engines.Result:
    result = engines.run(folder / "tp2", dense_checkpoint, tensor_parallel_size=2)
    assert "quantized all-reduce" not in result.log
    return succeed(result)


@pytest.fixture(scope="module")
def changes(dense_checkpoint: Path, unquantized: engines.Result) -> dict[str, torch.Tensor]:
    """What codecs should do to the logprobs."""
    prompts = unquantized.prompt_token_ids
    return {name: fake_all_reduce.change(dense_checkpoint, prompts, CODECS[name]) for name in ("INT8", "FP4", "INT4")}


def correlation(change: torch.Tensor, other: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([change, other]))[0, 1].item()


def check(change: torch.Tensor, codec: str, least: float, changes: dict[str, torch.Tensor]) -> None:
    """A change is that of `codec`, in direction and in size, and no other's."""
    assert correlation(change, changes[codec]) > least
    assert 0.7 < change.abs().mean() / changes[codec].abs().mean() < 1.5
    for other in changes.keys() - {codec}:
        assert abs(correlation(change, changes[other])) < 0.3


def test_int8(
    folder: Path, dense_checkpoint: Path, unquantized: engines.Result, changes: dict[str, torch.Tensor]
) -> None:
    variables = {f"{PREFIX}QUANTIZATION": "INT8", f"{PREFIX}MIN_SIZE_BYTES_MB": "0"}
    result = succeed(engines.run(folder / "tp2-int8", dense_checkpoint, variables, tensor_parallel_size=2))
    assert result.log.count(LINE.format("INT8")) == 1
    check(result.logprobs - unquantized.logprobs, "INT8", 0.4, changes)


def test_serve_with_fp4(
    folder: Path, dense_checkpoint: Path, unquantized: engines.Result, changes: dict[str, torch.Tensor]
) -> None:
    """VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=FP4 vllm serve MODEL -tp 2"""
    log = folder / "serve-fp4.log"
    variables = {f"{PREFIX}QUANTIZATION": "FP4", f"{PREFIX}MIN_SIZE_BYTES_MB": "0"}
    with engines.serve(log, dense_checkpoint, "-tp", "2", **variables) as address:
        client = OpenAI(base_url=address, api_key="none")
        model = client.models.list().data[0].id
        answer = client.completions.create(
            model=model, prompt=list(engines.PROMPTS), max_tokens=4, temperature=0.0, logprobs=0, echo=True
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= len(engines.PROMPTS)
    served = [
        logprob
        for choice, tokens in zip(answer.choices, unquantized.prompt_token_ids, strict=True)
        for logprob in choice.logprobs.token_logprobs[1 : len(tokens)]
    ]
    assert log.read_text().count(LINE.format("FP4")) == 1
    check(torch.tensor(served) - unquantized.logprobs, "FP4", 0.6, changes)
