# SPDX-License-Identifier: Apache-2.0
"""An SGLang that serves nothing, for the benchmark around it."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer


class Engine:
    def __init__(self, model_path: str, **options: Any) -> None:
        if not (Path(model_path) / "config.json").is_file():
            raise FileNotFoundError(model_path)
        if options["quantization"] == "w8a8_fp8":
            raise ValueError("w8a8_fp8 is not for this model")
        file = Path(model_path) / "tokenizer.json"
        if file.is_file():
            self.tokenizer_manager = SimpleNamespace(tokenizer=partial(_tokenize, Tokenizer.from_file(str(file))))

    def generate(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any], **options: Any
    ) -> list[dict[str, Any]]:
        """Of every prompt, tokens that are all as likely."""
        likely = [(-0.5, token, None) for token in range(3)]
        meta = {"input_token_logprobs": likely, "input_top_logprobs": [[one] for one in likely]}
        return [{"meta_info": meta} for _ in input_ids]


def _tokenize(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
    return {"input_ids": tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
