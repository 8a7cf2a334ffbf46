# SPDX-License-Identifier: Apache-2.0
"""A whole SGLang on one GPU: accuracy on the demo model, and the time of a Llama-3-70B shape cut to eight layers.

    python benchmarks/sglang_engine.py            both
    python benchmarks/sglang_engine.py demo       accuracy alone (also `llama`: time alone)

Accuracy: perplexity over examples/demo_model/heldout.txt in windows of 200 tokens, and how often the most likely token
is BF16's. Time: dummy weights, CUDA graphs of decoding, offline, 1024 tokens in, 129 out; the prefill is the time of
one token out, a step is the rest over 128, each the better of two runs. `sglang_fp8` is SGLang's own --quantization fp8
(per-tensor weights), `sglang_w8a8_fp8` its per-channel one, `sglang_nvfp4` its own kernels for the checkpoint that
`nvfp4` serves without a flag.

Each method is an engine in processes of its own. Some start at once (ENGINES), since a start takes a minute of Python,
and are measured one after the other, the others asleep; then the next ones. Each has START_S to start and MEASURE_S to
be measured. What happens is printed as it happens, and figures are written after each method, so that a run that is
cut short leaves what it had. SGLang need only be importable; the plugin is found in this repository even where it is
not installed. On a machine without a GPU it runs as well, for what that is worth: with the tests' stand-ins in
PYTHONPATH, and `demo`.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.vllm_engine import LLAMA  # noqa: E402

DEMO = ROOT / "examples" / "demo_model"
HELDOUT = DEMO / "heldout.txt"
NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head"],
}
# By method: --quantization, whether the checkpoint is NVFP4, and environment variables.
METHODS: dict[str, tuple[str | None, bool, dict[str, str]]] = {
    "bf16": (None, False, {}),
    "sglang_fp8": ("fp8", False, {}),
    "sglang_w8a8_fp8": ("w8a8_fp8", False, {}),
    "ptpc_fp8": ("ptpc_fp8", False, {}),
    "ptpc_fp8_norms_apart": ("ptpc_fp8", False, {"LLM_QUANT_ROCM_FUSION": "0"}),
    "sglang_nvfp4": (None, True, {"LLM_QUANT_ROCM_NVFP4": "0"}),
    "nvfp4": (None, True, {}),
}
START = time.monotonic()
START_S, MEASURE_S = 150, 60
# So many at once: their weights, caches and graphs share one GPU's memory.
ENGINES = {"llama": 3, "demo": 4}
DEFAULT = {
    "llama": ("bf16", "sglang_fp8", "ptpc_fp8", "nvfp4", "sglang_nvfp4", "sglang_w8a8_fp8"),
    "demo": ("bf16", "sglang_fp8", "ptpc_fp8", "nvfp4"),
}


def engine(model: str, method: str, **options: Any) -> Any:
    import sglang
    import torch

    gpu = torch.cuda.is_available()
    settings = {
        "attention_backend": "triton" if gpu else "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "device": "cuda" if gpu else "cpu",
        "sleep_on_idle": True,
        "disable_radix_cache": True,
        "random_seed": 0,
        "log_level": "info",  # the engine's own says nothing, and then nobody knows why it failed
        # Batches of decoding are captured; SGLang would capture its prefills for minutes.
        **({"cuda_graph_backend_prefill": "disabled", "cuda_graph_bs_decode": [1, 10, 64]} if gpu else {}),
    }
    return sglang.Engine(model_path=model, quantization=METHODS[method][0], **settings, **options)


def demo(model: str, method: str) -> Callable[[], dict[str, Any]]:
    """Token perplexity and the most likely token at every position of the held-out text."""
    from transformers import AutoTokenizer

    served = engine(model, method, max_total_tokens=4096, max_running_requests=8, mem_fraction_static=0.5)
    tokens = AutoTokenizer.from_pretrained(model)(HELDOUT.read_text(), add_special_tokens=False)["input_ids"]
    windows = [tokens[start : start + 200] for start in range(0, len(tokens) - 200, 200)]

    def measure() -> dict[str, Any]:
        ask = {"max_new_tokens": 1, "temperature": 0}
        outputs = served.generate(
            input_ids=windows, sampling_params=ask, return_logprob=True, logprob_start_len=0, top_logprobs_num=1
        )
        loss, greedy = 0.0, []
        for output in outputs:
            meta = output["meta_info"]
            loss -= sum(logprob for logprob, *_ in meta["input_token_logprobs"][1:])
            greedy += [best[0][1] for best in meta["input_top_logprobs"][1:]]
        return {"perplexity": math.exp(loss / len(greedy)), "greedy": greedy}

    return measure


def llama(model: str, method: str) -> Callable[[], dict[str, Any]]:
    """Seconds of the prefill and of the whole, and milliseconds a step, of 10 and 64 prompts of 1024 tokens."""
    served = engine(
        model, method, load_format="dummy", skip_tokenizer_init=True, max_total_tokens=80_000,
        max_running_requests=64, chunked_prefill_size=16384, mem_fraction_static=0.9,
    )  # fmt: skip

    def measure() -> dict[str, Any]:
        result = {}
        for count in (10, 64):
            random.seed(0)
            prompts = [[random.randrange(3, 31999) for _ in range(1024)] for _ in range(count)]

            def seconds(tokens: int, prompts: list[list[int]] = prompts) -> float:
                ask = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
                start = time.perf_counter()
                served.generate(input_ids=prompts, sampling_params=ask)
                return time.perf_counter() - start

            seconds(4)
            prefill = min(seconds(1) for _ in range(2))
            total = min(seconds(129) for _ in range(2))
            result[f"{count} prompts"] = {
                "prefill_s": round(prefill, 3),
                "total_s": round(total, 3),
                "ms_a_step": round((total - prefill) / 128 * 1e3, 2),
            }
        return result

    return measure


TASKS = {"llama": llama, "demo": demo}


def run(task: str, method: str, model: str, folder: str) -> None:
    """Start one engine, say so, wait to be told to measure, and leave the result, each by a file in `folder`."""
    measure = TASKS[task](model, method)
    (Path(folder) / "ready").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.05)
    result = measure()
    (Path(folder) / "part").write_text(json.dumps(result))
    (Path(folder) / "part").rename(Path(folder) / "result")
    os._exit(0)  # without SGLang's farewell, which takes long; the parent ends what is left


class Engine:
    """One method's engine, in processes of its own."""

    def __init__(self, task: str, method: str, model: Path, scratch: Path) -> None:
        self.method, self.folder = method, scratch / f"{task}-{method}"
        self.folder.mkdir()
        command = [sys.executable, __file__, task, "--run", method, str(model), str(self.folder)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": plugin_path(scratch), **METHODS[method][2]}
        with (self.folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, name: str, deadline: float) -> bool:
        """Whether the engine left the file `name` before it ended, and before `deadline` (of time.monotonic)."""
        while not (self.folder / name).exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                return (self.folder / name).exists()
            time.sleep(0.05)
        return True

    def measure(self) -> dict[str, Any]:
        """The result; {"failed": the end of the log} where there is none."""
        (self.folder / "go").touch()
        if self.wait("result", time.monotonic() + MEASURE_S):
            return json.loads((self.folder / "result").read_text())
        return self.failure("measured")

    def failure(self, what: str) -> dict[str, Any]:
        """What is kept of an engine that failed or was too late."""
        how = "was too late" if self._process.poll() is None else f"ended with status {self._process.returncode}"
        said = (self.folder / "log").read_text(errors="replace")
        return {"failed": f"{how}, before it was {what}", "log": said[-3000:]}

    def end(self) -> None:
        """Its workers too, which are of one session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def checkpoints(task: str, folder: Path) -> dict[bool, Path]:
    """The checkpoint of a task, by whether it is NVFP4."""
    if task == "demo":
        from llm_quant_rocm.checkpoint import quantize_checkpoint

        quantize_checkpoint(DEMO, folder / "demo-nvfp4", "modelopt")
        return {False: DEMO, True: folder / "demo-nvfp4"}
    made = {False: folder / "llama", True: folder / "llama-nvfp4"}
    for quantized, path in made.items():
        path.mkdir()
        config = {**LLAMA, "quantization_config": NVFP4} if quantized else LLAMA
        (path / "config.json").write_text(json.dumps(config))
    return made


def measure_all(task: str, methods: Sequence[str], scratch: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each method of a task came to; {"failed": ...} where an engine ended by itself, or was too late."""
    models = checkpoints(task, scratch)
    for first in range(0, len(methods), ENGINES[task]):
        these = methods[first : first + ENGINES[task]]
        engines = [Engine(task, method, models[METHODS[method][1]], scratch) for method in these]
        try:
            deadline = time.monotonic() + START_S
            say(f"{task}: {', '.join(engine.method for engine in engines)} start")
            # All are up, or have ended, before the first is measured.
            up = [engine.wait("ready", deadline) for engine in engines]
            for engine, is_up in zip(engines, up, strict=True):
                say(f"{task}: {engine.method} {'is up and is measured' if is_up else 'failed to start'}")
                yield engine.method, engine.measure() if is_up else engine.failure("up")
                engine.end()
        finally:
            for engine in engines:
                engine.end()


def say(line: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {line}", flush=True)


def plugin_path(scratch: Path) -> str:
    """PYTHONPATH with this repository, and with an entry point for its plugin where nobody installed it."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if not entry_points(group="sglang.srt.plugins", name="llm_quant_rocm"):
        info = scratch / "entry" / "llm_quant_rocm-0.dist-info"
        if not info.exists():
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-quant-rocm\nVersion: 0\n")
            (info / "entry_points.txt").write_text(
                "[sglang.srt.plugins]\nllm_quant_rocm = llm_quant_rocm_sglang:register\n"
            )
        paths.insert(0, str(info.parent))
    return os.pathsep.join(paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=(*TASKS, "all"), default="all")
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--run", nargs=3, metavar=("METHOD", "MODEL", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(args.task, *args.run)
    from importlib.metadata import version

    import torch

    from benchmarks import _harness as harness

    result: dict[str, Any] = {"sglang": version("sglang")}
    scratch = Path(tempfile.mkdtemp())
    try:
        for task in TASKS if args.task == "all" else (args.task,):
            found = result[{"demo": "demo_model", "llama": "llama_3_70b_8_layers"}[task]] = {}
            bf16: list[int] = []
            for method, entry in measure_all(task, args.methods or DEFAULT[task], scratch):
                if greedy := entry.pop("greedy", None):
                    bf16 = greedy if method == "bf16" else bf16
                    if bf16:
                        same = sum(a == b for a, b in zip(greedy, bf16, strict=True))
                        entry["agreement"] = round(same / len(bf16), 4)
                    entry["perplexity"] = round(entry["perplexity"], 4)
                found[method] = entry
                say(json.dumps({method: entry}))
                if torch.cuda.is_available():
                    harness.write("sglang_engine_sm_90", result)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
