# SPDX-License-Identifier: Apache-2.0
"""An SGLang that serves nothing, for the benchmark around it."""

from pathlib import Path
from typing import Any


class Engine:
    def __init__(self, model_path: str, **options: Any) -> None:
        if not (Path(model_path) / "config.json").is_file():
            raise FileNotFoundError(model_path)
        if options["quantization"] == "w8a8_fp8":
            raise ValueError("w8a8_fp8 is not for this model")

    def generate(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any], **options: Any
    ) -> list[dict[str, Any]]:
        """Of every prompt, tokens that are all as likely."""
        likely = [(-0.5, token, None) for token in range(3)]
        meta = {"input_token_logprobs": likely, "input_top_logprobs": [[one] for one in likely]}
        return [{"meta_info": meta} for _ in input_ids]
