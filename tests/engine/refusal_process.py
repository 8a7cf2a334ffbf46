# SPDX-License-Identifier: Apache-2.0
"""What vLLM says to a checkpoint: `python refusal_process.py REQUEST.json ANSWER`.

The request holds arguments of vllm.LLM by name. ANSWER receives the error's text, or nothing where the checkpoint was
loaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM


def refusal(settings: dict[str, Any]) -> str:
    try:
        LLM(**settings)
    except Exception as error:
        return str(error)
    return ""


def main(request_file: str, answer_file: str) -> None:
    Path(answer_file).write_text(refusal(json.loads(Path(request_file).read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
