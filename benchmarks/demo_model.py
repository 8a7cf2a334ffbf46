# SPDX-License-Identifier: Apache-2.0
"""The demo model on a CPU: what the command's `demo` finds, and what each way to quantize to NVFP4 is worth.

    python benchmarks/demo_model.py demo
    python benchmarks/demo_model.py quantize

Both run the command `llm-quant-rocm` as a user would, in this repository. vLLM must be installed in its build for CPUs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _harness as harness  # noqa: E402

MODEL = "examples/demo_model"
COMMAND = "llm-quant-rocm"
START = (sys.executable, "-c", "from llm_quant_rocm.cli import main; main()")


def run(*arguments: str) -> str:
    """What the command prints."""
    print(f"{COMMAND} {' '.join(arguments)}", flush=True)
    return subprocess.run([*START, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def demo() -> tuple[str, dict[str, Any]]:
    found = json.loads(run("demo", "--json"))
    return f"{COMMAND} demo --json", found


def quantize() -> tuple[str, dict[str, Any]]:
    """All four ways beside bf16 and FP8."""
    with tempfile.TemporaryDirectory() as scratch:
        ways = {}
        for block, shared in product(("nearest", "search"), ("shared", "separate")):
            folder = Path(scratch) / f"{block}-{shared}"
            run("quantize", MODEL, str(folder), "--scheme", "nvfp4", "--block-scales", block, "--global-scales", shared)
            report = json.loads((folder / "quantization_report.json").read_text())
            errors = [error for file in report["files"].values() for error in file["errors"].values()]
            facts = {"block_scales": block, "global_scales": shared}
            ways[str(folder)] = facts | {"mean_relative_error_of_weights": round(statistics.mean(errors), 5)}
        found = json.loads(run("eval", MODEL, "--json", "--quantization", ",".join(["bf16", "ptpc_fp8", *ways])))
    methods = {}
    for name, values in found["methods"].items():
        facts = ways.get(name, {})
        title = f"nvfp4, {facts['block_scales']}, {facts['global_scales']}" if facts else name
        methods[title] = {**facts, **{key: value for key, value in values.items() if key != "checkpoint"}}
    command = (
        f"{COMMAND} eval {MODEL} --json --quantization bf16,ptpc_fp8,FOLDER,..., each FOLDER made by {COMMAND} "
        f"quantize {MODEL} FOLDER --scheme nvfp4 --block-scales BLOCK --global-scales GLOBAL"
    )
    return command, {**found, "methods": methods}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["demo", "quantize"])
    args = parser.parse_args()
    command, found = {"demo": demo, "quantize": quantize}[args.what]()
    environment = {**harness.environment(), **found.get("environment", {}), "command": command}
    print("written to", harness.write(f"{args.what}_cpu", {**found, "environment": environment}))


if __name__ == "__main__":
    main()
