# SPDX-License-Identifier: Apache-2.0
"""A vLLM that serves nothing, for the benchmarks around it."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        self.prompt_logprobs = options.get("prompt_logprobs")


class LLM:
    def __init__(self, model: str, **options: Any) -> None:
        if not (Path(model) / "config.json").is_file():
            raise FileNotFoundError(model)
        if os.environ.get("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION") and "LLM_QUANT_ROCM_FUSION" in os.environ:
            raise ValueError("no room")
        logging.warning("norm fusion: %s", os.environ.get("LLM_QUANT_ROCM_FUSION", "on"))
        if codec := os.environ.get("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"):
            logging.warning("quantized all-reduce: %s over %d", codec, options["tensor_parallel_size"])
        self.options = options
        said = {name: options[name] for name in ("quantization", "max_model_len")}
        self.model_config = SimpleNamespace(**said)

    def generate(
        self, prompts: list[dict[str, list[int]]], ask: SamplingParams, use_tqdm: bool = True
    ) -> list[SimpleNamespace]:
        """Of every prompt, tokens whose log probability is -0.5, and an answer of one token, whose log probability
        depends on the batch unless the environment asks that it does not."""
        others = len(prompts) - 1 if os.environ.get("VLLM_BATCH_INVARIANT") != "1" else 0
        return [
            SimpleNamespace(
                prompt_logprobs=[None] + [_found(token, -0.5) for token in prompt["prompt_token_ids"][1:]],
                outputs=[SimpleNamespace(logprobs=[_found(5, -0.5 - others)])],
            )
            for prompt in prompts
        ]

    def get_tokenizer(self) -> Callable[..., dict[str, list[int]]]:
        return lambda text, add_special_tokens: {"input_ids": list(range(400))}

    def apply_model(self, function: Any) -> list[dict[str, int]]:
        return [{"norm_kernel": 1}]


def _found(token: int, logprob: float) -> dict[int, SimpleNamespace]:
    return {token: SimpleNamespace(logprob=logprob, rank=1)}
