# SPDX-License-Identifier: Apache-2.0
"""What vLLM says to each of several checkpoints: `python refusal_process.py REQUESTS.json ANSWERS.json`, one process.

The requests are arguments of vllm.LLM by name. An answer is the error's text, or "" where the checkpoint was loaded.
"""

import contextlib
import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory


def refusal(settings: dict[str, Any]) -> str:
    try:
        LLM(**settings)
    except Exception as error:
        return str(error)
    finally:
        gc.collect()
        with contextlib.suppress(AssertionError):  # nothing to clean up where the configuration was refused
            cleanup_dist_env_and_memory()
    return ""


def main(requests_file: str, answers_file: str) -> None:
    requests = json.loads(Path(requests_file).read_text())
    answers = {name: refusal(settings) for name, settings in requests.items()}
    Path(answers_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
