# SPDX-License-Identifier: Apache-2.0
"""The process of `_methods.refuse_unknown`: vLLM's names of quantizations, those of its plugins among them.

Run as ``python -m llm_quant_rocm.cli._names_worker JOB``, JOB being JSON that names the file to write as "result".
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Write the list to ``job["result"]``."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    Path(job["result"]).write_text(json.dumps(QUANTIZATION_METHODS))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
