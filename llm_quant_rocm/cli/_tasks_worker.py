# SPDX-License-Identifier: Apache-2.0
"""The process of `eval --tasks`: lm-eval over one vLLM engine, one JSON file of results.

Run as ``python -m llm_quant_rocm.cli._tasks_worker JOB``, JOB being the JSON that `eval` writes.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Run the tasks and write ``job["result"]``: by task and metric, the value, and under METRIC_stderr its error."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    engine = {
        "pretrained": job["model"],
        "dtype": "bfloat16",
        "gpu_memory_utilization": job["memory_fraction"],
        "tensor_parallel_size": job["ranks"],
        "max_model_len": job["context"],
        "enforce_eager": True,
        "seed": 0,
    }
    if job["quantization"]:
        engine["quantization"] = job["quantization"]
    found = lm_eval.simple_evaluate(
        model="vllm",
        model_args=engine,
        tasks=job["tasks"],
        limit=job["limit"],
        batch_size="auto",
        task_manager=TaskManager(include_path=job["include"]),
    )
    results = {task: named(metrics) for task, metrics in found["results"].items()}
    Path(job["result"]).write_text(json.dumps(results))


def named(metrics: dict[str, Any]) -> dict[str, float]:
    """By name, the values of lm-eval's METRIC,FILTER: METRIC where the filter is none, else METRIC (FILTER)."""
    values: dict[str, float] = {}
    for key, value in metrics.items():
        metric, comma, filter = key.partition(",")
        if comma and isinstance(value, int | float):
            stderr = "_stderr" if metric.endswith("_stderr") else ""
            name = metric.removesuffix("_stderr") + (f" ({filter})" if filter != "none" else "")
            values[name + stderr] = value
    return values


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
