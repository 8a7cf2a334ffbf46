# SPDX-License-Identifier: Apache-2.0
"""A whole SGLang on one GPU: accuracy on the demo model, and the time of a Llama-3-70B shape cut to eight layers.

    python benchmarks/sglang_engine.py            both
    python benchmarks/sglang_engine.py demo       accuracy alone (also `llama`: time alone)

Accuracy: perplexity over examples/demo_model/heldout.txt in windows of 200 tokens, and how often the most likely token
is BF16's. Time: dummy weights, CUDA graphs of decoding, offline, 1024 tokens in, 129 out; the prefill is the time of
one token out, a step is the rest over 128, each the better of two runs. `sglang_fp8` is SGLang's own --quantization fp8
(per-tensor weights), `sglang_w8a8_fp8` its per-channel one, `sglang_nvfp4` its own kernels for the checkpoint that
`nvfp4` serves without a flag.

Each method is an engine in processes of its own. All start at once, since a start takes a minute of Python, and are
measured one after the other, the others asleep. Figures are written after each. SGLang need only be importable; the
plugin is found in this repository even where it is not installed. On a machine without a GPU it runs as well, for what
that is worth: with the tests' stand-ins in PYTHONPATH, and `demo`.
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
import threading
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
    "sglang_nvfp4": (None, True, {"LLM_QUANT_ROCM_NVFP4": "0"}),
    "nvfp4": (None, True, {}),
}
START_S = 300
ON_DEMO = ("bf16", "sglang_fp8", "ptpc_fp8", "nvfp4")


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


TASKS = {"demo": demo, "llama": llama}


def run(task: str, method: str, model: str) -> None:
    """Start one engine, say so, wait for a line, measure, and print the result as JSON."""
    measure = TASKS[task](model, method)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(measure()), flush=True)
    os._exit(0)  # without SGLang's farewell, which takes long; the parent ends what is left


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
    """What each method of a task came to; {"failed": ...} where an engine ended by itself, or was not up in time."""
    models = checkpoints(task, scratch)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": plugin_path(scratch)}
    engines = {}
    for method in methods:
        log = (scratch / f"{task}-{method}.log").open("w+")
        command = [sys.executable, __file__, task, "--run", method, str(models[METHODS[method][1]])]
        variables = {**environment, **METHODS[method][2]}
        pipe = subprocess.PIPE
        engines[method] = (
            log,
            subprocess.Popen(
                command, env=variables, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True
            ),
        )
    late = threading.Timer(START_S, lambda: [_end(process) for _, process in engines.values()])
    late.start()
    for _, process in engines.values():
        _line(process)  # all are up, or ended, before the first is measured
    late.cancel()
    for method, (log, process) in engines.items():
        if process.poll() is None:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answer = _line(process)
        log.seek(0)
        yield method, json.loads(answer) if answer else {"failed": log.read()[-1500:]}
        _end(process)


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that we printed ourselves, "" once the process ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("ready", "{")):
            return line
    process.wait()
    return ""


def _end(process: subprocess.Popen[str]) -> None:
    """An engine and its workers, which are of one session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    parser.add_argument("--run", nargs=2, metavar=("METHOD", "MODEL"), help=argparse.SUPPRESS)
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
            default = ON_DEMO if task == "demo" else tuple(METHODS)
            found = result[{"demo": "demo_model", "llama": "llama_3_70b_8_layers"}[task]] = {}
            bf16: list[int] = []
            for method, entry in measure_all(task, args.methods or default, scratch):
                if greedy := entry.pop("greedy", None):
                    bf16 = bf16 or greedy  # the first method's
                    entry["agreement"] = round(sum(a == b for a, b in zip(greedy, bf16, strict=True)) / len(bf16), 4)
                    entry["perplexity"] = round(entry["perplexity"], 4)
                found[method] = entry
                print(json.dumps({method: entry}), flush=True)
                if torch.cuda.is_available():
                    harness.write("sglang_engine_sm_90", result)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
