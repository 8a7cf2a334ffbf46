# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL --quantization ptpc_fp8`, driven by the OpenAI client."""

from pathlib import Path

import engines
import pytest
from openai import OpenAI


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_tokens_come_back(kind: str, folder: Path, request: pytest.FixtureRequest) -> None:
    checkpoint = request.getfixturevalue(f"{kind}_checkpoint")
    offline = request.getfixturevalue(kind)
    arguments = ["--quantization", "ptpc_fp8", *(["--dtype", "float16"] if kind == "moe" else [])]
    log = folder / f"serve-{kind}.log"
    with engines.serve(log, checkpoint, *arguments, anew=kind == "dense") as address:
        client = OpenAI(base_url=address, api_key="none")
        model = client.models.list().data[0].id
        answer = client.completions.create(
            model=model, prompt=engines.PROMPTS[0], max_tokens=8, temperature=0.0, logprobs=0, echo=True
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 1
    prompt_tokens = len(offline.prompt_token_ids[0])
    served = answer.choices[0].logprobs.token_logprobs[1:prompt_tokens]
    assert served == pytest.approx(offline.prompt_logprobs[0], abs=0.2)
    assert "ptpc_fp8: quantizing" in log.read_text()
