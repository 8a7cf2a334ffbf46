# SPDX-License-Identifier: Apache-2.0
"""Regenerates benchmarks/results: every benchmark that this machine can run, then the report with its plots.

    python benchmarks/regenerate.py [PATTERN ...] [--list] [--vllm FOLDER] [--sglang FOLDER] [--humming FOLDER]
                                    [--budget SECONDS] [--again]

Steps whose figures are of this commit and device already, from beginning to end, are passed over, so that it can be
stopped and called again; so are those that want other GPUs, or an engine that is not here. --list says which steps
would run, about how long each takes, and why the others would not. With --budget no step is begun that should not end
within so many seconds. FOLDER is where `pip install --target` put vLLM, SGLang or Humming, where they are not
installed; without them their columns are missing, and steps about an engine are left out. Figures go to
benchmarks/results, or to $OUT. Where the machine has no git, LLM_QUANT_ROCM_COMMIT says which commit it is.
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

from benchmarks import _harness as harness
from benchmarks._markdown import RESULTS
from llm_quant_rocm import provenance

ROOT = Path(__file__).parent.parent
VLLM, SGLANG, HUMMING = "{vllm}", "{sglang}", "{humming}"


@dataclass(frozen=True)
class Step:
    """One benchmark.

    Attributes:
        result: the JSON file it writes, without its ending; {gpu} is what `harness.gpu` says, and {arch}, of several
            GPUs, what `harness.arch` does.
        script: in this folder.
        arguments: fixed ones; those that hold VLLM or HUMMING are given with the option before them, where that folder
            is known.
        gpus: how many it needs; 0: a machine without.
        engine: the engine that it runs: vllm, sglang or none.
        seconds: that it took, or about, compilation included.
    """

    result: str
    script: str
    arguments: tuple[str, ...] = ()
    gpus: int = 1
    engine: str = ""
    seconds: int = 60


STEPS = (
    Step("nvfp4_gemm_{gpu}", "nvfp4_gemm.py", ("--vllm-ops", VLLM, "--humming", HUMMING), seconds=290),
    Step(
        "nvfp4_gemm_untuned_{gpu}",
        "nvfp4_gemm.py",
        ("--untuned", "--vllm-ops", VLLM, "--humming", HUMMING),
        seconds=240,
    ),
    Step("nvfp4_configs_{gpu}", "nvfp4_configs.py", seconds=110),
    Step("nvfp4_configs_fp8_{gpu}", "nvfp4_configs.py", ("--fp8",), seconds=75),
    Step("nvfp4_moe_{gpu}", "nvfp4_moe.py", ("--vllm", VLLM), seconds=150),
    Step("nvfp4_moe_untuned_{gpu}", "nvfp4_moe.py", ("--untuned", "--vllm", VLLM), seconds=150),
    Step("ptpc_gemm_{gpu}", "ptpc_gemm.py", ("--vllm-ops", VLLM), seconds=90),
    Step("ptpc_gemm_untuned_{gpu}", "ptpc_gemm.py", ("--untuned", "--vllm-ops", VLLM), seconds=60),
    Step("ptpc_moe_{gpu}", "ptpc_moe.py", ("--vllm", VLLM), seconds=240),
    Step("ptpc_moe_untuned_{gpu}", "ptpc_moe.py", ("--untuned", "--vllm", VLLM), seconds=240),
    Step("row_quant_{gpu}", "row_quant.py", ("--vllm-ops", VLLM), seconds=30),
    Step("routing_{gpu}", "routing.py", ("--vllm-ops", VLLM), seconds=40),
    *(
        Step(f"quick_reduce_{{arch}}_tp{world}", "quick_reduce.py", (str(world), "--seconds", "300"), world, seconds=90)
        for world in (2, 4, 8)
    ),
    *(
        Step(
            f"reduce_norm_quant_tp{ranks}_{{arch}}",
            "reduce_norm_quant.py",
            ("--world", str(ranks), "--vllm-ops", VLLM, "--codec", "FP4"),
            ranks,
            seconds=90,
        )
        for ranks in (2, 4, 8)
    ),
    Step("vllm_engine_{gpu}", "vllm_engine.py", engine="vllm", seconds=300),
    Step("vllm_load_{gpu}", "vllm_load.py", engine="vllm", seconds=450),
    Step("nvfp4_engine_llama-3-70b_{gpu}", "nvfp4_engine.py", ("llama-3-70b",), engine="vllm", seconds=600),
    Step("nvfp4_engine_qwen3-30b-a3b_{gpu}", "nvfp4_engine.py", ("qwen3-30b-a3b",), engine="vllm", seconds=600),
    Step(
        "nvfp4_engine_qwen3-30b-a3b-whole_{gpu}",
        "nvfp4_engine.py",
        ("qwen3-30b-a3b-whole", "--methods", "bf16", "marlin", "ours"),
        engine="vllm",
        seconds=600,
    ),
    Step(
        "nvfp4_engine_qwen3-30b-a3b_with_graphs_to_1024_{gpu}",
        "nvfp4_engine.py",
        ("qwen3-30b-a3b", "--capture-sizes", "1", "16", "64", "1024"),
        engine="vllm",
        seconds=600,
    ),
    Step(
        "nvfp4_engine_qwen3-30b-a3b_batch_invariant_{gpu}",
        "nvfp4_engine.py",
        ("qwen3-30b-a3b", "--batch-invariant"),
        engine="vllm",
        seconds=600,
    ),
    *(
        Step(f"nvfp4_engine_{shape}_2_ranks_{{arch}}", "nvfp4_engine.py", (shape, "--ranks", "2"), 2, "vllm", 600)
        for shape in ("llama-3-70b", "qwen3-30b-a3b")
    ),
    Step("vllm_fusion_demo_{gpu}", "vllm_engine.py", ("fusion", "--demo"), engine="vllm", seconds=200),
    *(
        Step(
            f"vllm_fusion_{ranks}_ranks_{{{'gpu' if ranks == 1 else 'arch'}}}",
            "vllm_engine.py",
            ("fusion", "--ranks", str(ranks)),
            ranks,
            "vllm",
            seconds=300,
        )
        for ranks in (1, 2, 4, 8)
    ),
    Step("quick_reduce_engine_tp2_{arch}", "quick_reduce_engine.py", gpus=2, engine="vllm", seconds=300),
    Step("sglang_engine_{gpu}", "sglang_engine.py", engine="sglang", seconds=300),
    *(
        Step(
            f"sglang_engine_{ranks}_ranks_{{arch}}",
            "sglang_engine.py",
            ("--ranks", str(ranks)),
            ranks,
            "sglang",
            seconds=400,
        )
        for ranks in (2, 8)
    ),
    Step("quick_reduce_engine_tp2_cpu", "quick_reduce_engine.py", gpus=0, engine="vllm", seconds=900),
    Step("demo_cpu", "demo_model.py", ("demo",), gpus=0, engine="vllm", seconds=600),
    Step("quantize_cpu", "demo_model.py", ("quantize",), gpus=0, engine="vllm", seconds=900),
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
    step: Step, gpus: int, engines: Collection[str], paths: Sequence[Path], here: dict[str, str], again: bool
) -> str | None:
    """Why a step is passed over, or None. `paths` are where its figures may be."""
    if step.gpus > gpus:
        return f"needs {step.gpus} GPU{'s' if step.gpus > 1 else ''}, {gpus} are here"
    if step.gpus == 0 and gpus:
        return "it is about a machine without GPUs"
    if step.engine and step.engine not in engines:
        return f"needs {step.engine}: name its folder by --{step.engine}"
    # Of a tree with changes nobody knows whether it is the same.
    if again or here["commit"].endswith("dirty"):
        return None
    for path in paths:
        if path.is_file():
            found = json.loads(path.read_text())
            # Those that were stopped on their way have no time.
            if "seconds" in found and _facts(found["environment"]) == _facts(here):
                return "measured already"
    return None


def _facts(environment: dict[str, str]) -> list[str | None]:
    """What figures depend on. A file says how many of a machine's GPUs were used, and the machine how many it has."""
    device = provenance.without_count(environment.get("device", ""))
    return [device, *(environment.get(name) for name in ("commit", "torch", "triton"))]


def finish(path: Path, seconds: float) -> None:
    """Notes in a step's file that it is whole, and how long it took."""
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "seconds": round(seconds, 1)}, indent=1) + "\n")


def run(steps: Sequence[Step], folders: dict[str, str | None], budget: float, again: bool, listing: bool) -> list[str]:
    """Run the steps one after the other, or list them; the names of those that failed or were not begun."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = provenance.environment()
    if "commit" not in here:
        raise SystemExit("regenerate: figures need their commit: run in a git checkout, or set LLM_QUANT_ROCM_COMMIT")
    names = {step: step.result.format(arch=harness.arch(), gpu=harness.gpu()) for step in steps}
    folder = Path(os.environ.get("OUT", RESULTS))
    places = {"vllm": folders[VLLM], "sglang": folders[SGLANG]}
    engines = [name for name, place in places.items() if place or importlib.util.find_spec(name)]
    variables = {**os.environ, "LLM_QUANT_ROCM_COMMIT": here["commit"], "OUT": str(folder)}
    print(provenance.line(here), flush=True)
    reasons: dict[Step, str | None] = {}
    for step in steps:
        file = f"{names[step]}.json"
        reasons[step] = why_not(step, gpus, engines, (folder / file, RESULTS / file), here, again)
    wanted = [step for step, reason in reasons.items() if reason is None]
    for step, reason in reasons.items():
        print(f"{names[step]}: " + (f"passed over, {reason}" if reason else f"about {step.seconds} s"))
    print(f"{len(wanted)} of {len(steps)} steps, about {sum(step.seconds for step in wanted)} s", flush=True)
    if listing:
        return []
    began, left = time.monotonic(), []
    for number, step in enumerate(wanted, 1):
        name = names[step]
        title = f"[{number}/{len(wanted)}] {name}"
        spent = time.monotonic() - began
        if spent + step.seconds > budget:
            print(f"{title}: not begun, {spent:.0f} s of {budget:.0f} are spent, it takes {step.seconds}", flush=True)
            left.append(name)
            continue
        print(f"{title}: about {step.seconds} s", flush=True)
        start = time.monotonic()
        # Its own engine alone: the two want other versions of what both need.
        path = os.pathsep.join(filter(None, [places.get(step.engine), os.environ.get("PYTHONPATH")]))
        run_in = variables | ({"PYTHONPATH": path} if path else {})
        status = subprocess.run(command(step, folders), env=run_in, cwd=ROOT, check=False).returncode
        took = time.monotonic() - start
        if status == 0:
            finish(folder / f"{name}.json", took)
        print(f"{title}: {'done' if status == 0 else f'FAILED with status {status}'} in {took:.0f} s", flush=True)
        if status:
            left.append(name)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "patterns", nargs="*", default=["*"], metavar="PATTERN", help="names of scripts or results, * for anything"
    )
    parser.add_argument("--vllm", help="the folder that holds vLLM")
    parser.add_argument("--sglang", help="the folder that holds SGLang")
    parser.add_argument("--humming", help="the folder that holds humming-kernels")
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin no step after so many seconds")
    parser.add_argument("--list", action="store_true", help="say what would run, and about how long")
    parser.add_argument("--again", action="store_true", help="measure what is there already too")
    args = parser.parse_args()
    patterns = args.patterns or ["*"]
    steps = [
        step
        for step in STEPS
        if any(fnmatchcase(name, p) for name in (step.script.removesuffix(".py"), step.result) for p in patterns)
    ]
    if not steps:
        parser.error(f"no step is called {' or '.join(patterns)}; there are " + ", ".join(s.script for s in STEPS))
    folders = {VLLM: args.vllm, SGLANG: args.sglang, HUMMING: args.humming}
    left = run(steps, folders, args.budget, args.again, args.list)
    if args.list:
        return
    if left:
        raise SystemExit(f"regenerate: FAILED or left: {', '.join(left)}; the same command goes on")
    if "OUT" in os.environ:
        print("copy the files into benchmarks/results, then run python -m benchmarks.report")
    else:
        subprocess.run([sys.executable, "-m", "benchmarks.report"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
