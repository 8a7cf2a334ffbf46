# SPDX-License-Identifier: Apache-2.0
"""Regenerates benchmarks/results on a machine with a GPU: every benchmark, then the report.

    python benchmarks/regenerate.py [PATTERN ...] [--vllm FOLDER] [--sglang FOLDER] [--humming FOLDER]
                                    [--budget SECONDS] [--again]

Steps whose figures are of this commit and device already are passed over, so that it can be stopped and called again;
with --budget no step is begun after so many seconds. FOLDER is where `pip install --target` put vLLM, SGLang or
Humming, where they are not installed; without them their columns are missing, and steps about an engine are left out.
Figures go to benchmarks/results, or to $OUT. Where the machine has no git, COMMIT says which commit it is.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks._markdown import RESULTS

ROOT = Path(__file__).parent.parent
VLLM, SGLANG, HUMMING = "{vllm}", "{sglang}", "{humming}"


@dataclass(frozen=True)
class Step:
    """One benchmark.

    Attributes:
        result: the JSON file it writes, without its ending; {arch} is the GPU's architecture.
        script: in this folder.
        arguments: fixed ones; those that hold VLLM or HUMMING are given with the option before them, where that folder
            is known.
        gpus: how many it needs.
        engine: the engine that it runs: vllm, sglang or none.
    """

    result: str
    script: str
    arguments: tuple[str, ...] = ()
    gpus: int = 1
    engine: str = ""


STEPS = (
    Step("ptpc_gemm_{arch}", "ptpc_gemm.py", ("--vllm-ops", VLLM)),
    Step("row_quant_{arch}", "row_quant.py", ("--vllm-ops", VLLM)),
    Step("ptpc_moe_{arch}", "ptpc_moe.py"),
    Step("routing_{arch}", "routing.py", ("--vllm-ops", VLLM)),
    Step("nvfp4_gemm_{arch}", "nvfp4_gemm.py", ("--vllm-ops", VLLM, "--humming", HUMMING)),
    Step("nvfp4_moe_{arch}", "nvfp4_moe.py", ("--vllm", VLLM)),
    *(Step(f"quick_reduce_{{arch}}_tp{world}", "quick_reduce.py", (str(world),), gpus=world) for world in (2, 4, 8)),
    Step("vllm_engine_{arch}", "vllm_engine.py", engine="vllm"),
    Step("nvfp4_engine_llama-3-70b_{arch}", "nvfp4_engine.py", ("llama-3-70b",), engine="vllm"),
    Step("nvfp4_engine_qwen3-30b-a3b_{arch}", "nvfp4_engine.py", ("qwen3-30b-a3b",), engine="vllm"),
    Step("vllm_fusion_demo_{arch}", "vllm_engine.py", ("fusion", "--demo"), engine="vllm"),
    *(
        Step(f"vllm_fusion_{ranks}_ranks_{{arch}}", "vllm_engine.py", ("fusion", "--ranks", str(ranks)), ranks, "vllm")
        for ranks in (1, 2, 4, 8)
    ),
    Step(
        "quick_reduce_engine_tp2_{arch}",
        "quick_reduce_engine.py",
        ("--time", "--codecs", "FP4", "INT4"),
        gpus=2,
        engine="vllm",
    ),
    Step("sglang_engine_{arch}", "sglang_engine.py", engine="sglang"),
    *(
        Step(
            f"reduce_norm_quant_tp{ranks}_{{arch}}",
            "reduce_norm_quant.py",
            ("--world", str(ranks), "--vllm-ops", VLLM),
            ranks,
        )
        for ranks in (2, 4, 8)
    ),
)


def command(step: Step, folders: dict[str, str | None]) -> list[str]:
    """What runs a step: its arguments with the folders that are known, without those that are not."""
    found: list[str] = []
    for argument in step.arguments:
        if argument not in folders:
            found.append(argument)
        elif folders[argument]:
            found.append(str(folders[argument]))
        else:
            found.pop()  # the option that the folder belongs to
    return [sys.executable, str(ROOT / "benchmarks" / step.script), *found]


def why_not(
    step: Step, gpus: int, engines: Collection[str], path: Path, here: dict[str, str], again: bool
) -> str | None:
    """Why a step is passed over, or None."""
    if step.gpus > gpus:
        return f"needs {step.gpus} GPUs, {gpus} are here"
    if step.engine and step.engine not in engines:
        return f"needs {step.engine}: name its folder by --{step.engine}"
    # Of a tree with changes nobody knows whether it is the same.
    if path.is_file() and not again and not here["commit"].endswith("dirty"):
        there = json.loads(path.read_text())["environment"]
        if all(there.get(name) == here.get(name) for name in ("commit", "device", "torch", "triton")):
            return "measured already"
    return None


def run(steps: Sequence[Step], folders: dict[str, str | None], budget: float, again: bool) -> list[str]:
    """Run the steps one after the other; the names of those that failed or were not begun."""
    import torch

    from llm_quant_rocm import hardware, provenance

    if not torch.cuda.is_available():
        raise SystemExit("regenerate: FAILED. no GPU is here: run on the machine that is to be measured")
    here = provenance.environment()
    if "commit" not in here:
        raise SystemExit("regenerate: figures need their commit: run in a git checkout, or set COMMIT")
    arch = hardware.detect(torch.device("cuda")).arch
    folder = Path(os.environ.get("OUT", RESULTS))
    places = {"vllm": folders[VLLM], "sglang": folders[SGLANG]}
    engines = [name for name, place in places.items() if place or importlib.util.find_spec(name)]
    variables = {**os.environ, "COMMIT": here["commit"], "OUT": str(folder)}
    print(provenance.line(here), flush=True)
    began, left = time.monotonic(), []
    for number, step in enumerate(steps, 1):
        name = step.result.format(arch=arch)
        title = f"[{number}/{len(steps)}] {name}"
        reason = why_not(step, torch.cuda.device_count(), engines, folder / f"{name}.json", here, again)
        if reason:
            print(f"{title}: passed over, {reason}", flush=True)
            continue
        if time.monotonic() - began > budget:
            print(f"{title}: not begun, the budget is spent", flush=True)
            left.append(name)
            continue
        print(title, flush=True)
        start = time.monotonic()
        # Its own engine alone: the two want other versions of what both need.
        path = os.pathsep.join(filter(None, [places.get(step.engine), os.environ.get("PYTHONPATH")]))
        run_in = variables | ({"PYTHONPATH": path} if path else {})
        status = subprocess.run(command(step, folders), env=run_in, cwd=ROOT, check=False).returncode
        took = time.monotonic() - start
        print(f"{title}: {'done' if status == 0 else f'FAILED with status {status}'} in {took:.0f} s", flush=True)
        if status:
            left.append(name)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "patterns", nargs="*", default=["*"], metavar="PATTERN", help="names of scripts, * for anything"
    )
    parser.add_argument("--vllm", help="the folder that holds vLLM")
    parser.add_argument("--sglang", help="the folder that holds SGLang")
    parser.add_argument("--humming", help="the folder that holds humming-kernels")
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin no step after so many seconds")
    parser.add_argument("--again", action="store_true", help="measure what is there already too")
    args = parser.parse_args()
    patterns = args.patterns or ["*"]
    steps = [step for step in STEPS if any(fnmatchcase(step.script.removesuffix(".py"), p) for p in patterns)]
    if not steps:
        parser.error(f"no step is called {' or '.join(patterns)}; there are " + ", ".join(s.script for s in STEPS))
    left = run(steps, {VLLM: args.vllm, SGLANG: args.sglang, HUMMING: args.humming}, args.budget, args.again)
    if left:
        raise SystemExit(f"regenerate: FAILED or left: {', '.join(left)}; the same command goes on")
    if "OUT" in os.environ:
        print("copy the files into benchmarks/results, then run benchmarks/report.py")
    else:
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / "report.py")], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
