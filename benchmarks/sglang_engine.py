# SPDX-License-Identifier: Apache-2.0
"""A whole SGLang: accuracy on the demo model, and the time of two shapes.

    python benchmarks/sglang_engine.py            everything, on one GPU
    python benchmarks/sglang_engine.py demo       one of demo, llama and experts
    python benchmarks/sglang_engine.py --ranks 2  over two GPUs, with and without the quantized all-reduce

`demo`: perplexity over examples/demo_model/heldout.txt in windows of 200 tokens, and how often the most likely token is
BF16's. `llama`: the shape of Llama-3-70B cut to eight layers, dummy weights, CUDA graphs of decoding, offline, 1024
tokens in, 129 out; the prefill is the time of one token out, a step is the rest over 128, each the best of four runs:
over two GPUs the second took a fifth less than the first.
`experts`: the same of Qwen3-30B-A3B cut to twelve layers, with random weights that are the same for all
(_random_checkpoint.py); `difference` is the mean absolute difference of a prompt's log probabilities from BF16's.
`fp4_sums` in a method's name: all-reduces are quantized to FP4, where the policy does not leave them to SGLang.

`sglang_fp8` is SGLang's own --quantization fp8 (a scale a channel and a token where its CUTLASS kernels run, a scale a
tensor elsewhere), `sglang_w8a8_fp8` its other one, `sglang_nvfp4` its own kernels for the checkpoint that `nvfp4`
serves without a flag.

Engines start side by side and are measured alone (_engines.py). Figures are written after each method, so that a run
that is cut short leaves what it had. SGLang need only be importable; the plugin is found in this repository even where
it is not installed. On a machine without a GPU it runs as well, for what that is worth: with the tests' stand-ins in
PYTHONPATH, and `demo`.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _engines as engines  # noqa: E402
from benchmarks import nvfp4_engine  # noqa: E402
from benchmarks.vllm_engine import LLAMA, lines_of_the_plugin  # noqa: E402

DEMO = ROOT / "examples" / "demo_model"
HELDOUT = DEMO / "heldout.txt"
# By method: --quantization, the checkpoint's NVFP4 layout ("" for BF16), and environment variables.
METHODS: dict[str, tuple[str | None, str, dict[str, str]]] = {
    "bf16": (None, "", {}),
    "sglang_fp8": ("fp8", "", {}),
    "sglang_w8a8_fp8": ("w8a8_fp8", "", {}),
    "ptpc_fp8": ("ptpc_fp8", "", {}),
    "ptpc_fp8_norms_apart": ("ptpc_fp8", "", {"LLM_QUANT_ROCM_FUSION": "0"}),
    "sglang_nvfp4": (None, "modelopt", {"LLM_QUANT_ROCM_NVFP4": "0"}),
    "nvfp4": (None, "modelopt", {}),
    "nvfp4_compressed_tensors": (None, "compressed-tensors", {}),
}
_FP4_SUMS = {"ROCM_QUICK_REDUCE_QUANTIZATION": "FP4"}
METHODS |= {
    f"{method}_fp4_sums": (quantization, layout, variables | _FP4_SUMS)
    for method, (quantization, layout, variables) in METHODS.items()
    if method in ("bf16", "ptpc_fp8", "ptpc_fp8_norms_apart", "nvfp4")
}
# Engines that start beside this one take memory on one GPU before they do on the other, which SGLang ends for.
ENVIRONMENT = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
# By task, the name of its figures.
FIGURES = {"llama": "llama_3_70b_8_layers", "demo": "demo_model", "experts": "qwen3_30b_a3b_12_layers"}
# So many at once: their weights, caches and graphs share one GPU's memory.
AT_ONCE = {"llama": 3, "demo": 4, "experts": 2}
DEFAULT = {
    "llama": ("bf16", "sglang_fp8", "ptpc_fp8", "nvfp4", "sglang_nvfp4", "sglang_w8a8_fp8"),
    "demo": ("bf16", "sglang_fp8", "ptpc_fp8", "nvfp4", "nvfp4_compressed_tensors"),
    "experts": ("bf16", "sglang_fp8", "ptpc_fp8", "nvfp4"),
}
# Over several GPUs.
DEFAULT_OF_RANKS = ("bf16", "bf16_fp4_sums", "ptpc_fp8_norms_apart", "ptpc_fp8", "ptpc_fp8_fp4_sums", "nvfp4_fp4_sums")


def engine(model: str, method: str, ranks: int, **options: Any) -> Any:
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
        # Of what is free when it starts, of which others take their part: max_total_tokens says how much it needs.
        "mem_fraction_static": 0.95,
        "tp_size": ranks,
        "log_level": "info",  # the engine's own says nothing, and then nobody knows why it failed
        # Batches of decoding are captured; SGLang would capture its prefills for minutes.
        **({"cuda_graph_backend_prefill": "disabled", "cuda_graph_bs_decode": [1, 10, 64]} if gpu else {}),
    }
    return sglang.Engine(model_path=model, quantization=METHODS[method][0], **settings, **options)


def demo(model: str, method: str, ranks: int = 1) -> Callable[[], dict[str, Any]]:
    """Token perplexity and the most likely token at every position of the held-out text."""
    served = engine(model, method, ranks, max_total_tokens=4096, max_running_requests=8)
    tokens = served.tokenizer_manager.tokenizer(HELDOUT.read_text(), add_special_tokens=False)["input_ids"]
    windows = [tokens[start : start + 200] for start in range(0, len(tokens) - 200, 200)]
    # What is compiled at the first use is part of the start.
    served.generate(input_ids=windows[:8], sampling_params={"max_new_tokens": 1, "temperature": 0})

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


def llama(model: str, method: str, ranks: int = 1) -> Callable[[], dict[str, Any]]:
    served = timed_engine(model, method, ranks, load_format="dummy")
    return lambda: throughput(served)


def experts(model: str, method: str, ranks: int = 1) -> Callable[[], dict[str, Any]]:
    served = timed_engine(model, method, ranks)

    def measure() -> dict[str, Any]:
        random.seed(1)
        prompt = [random.randrange(3, 31999) for _ in range(128)]
        ask = {"max_new_tokens": 1, "temperature": 0}
        (output,) = served.generate(input_ids=[prompt], sampling_params=ask, return_logprob=True, logprob_start_len=0)
        logprobs = [logprob for logprob, *_ in output["meta_info"]["input_token_logprobs"][1:]]
        return {"logprobs": logprobs, **throughput(served)}

    return measure


def timed_engine(model: str, method: str, ranks: int, **options: Any) -> Any:
    """Warm: what is compiled at the first use is part of the start."""
    served = engine(
        model, method, ranks, skip_tokenizer_init=True, max_total_tokens=80_000, max_running_requests=64,
        chunked_prefill_size=16384, **options,
    )  # fmt: skip
    served.generate(
        input_ids=[list(range(3, 1027))] * 64,
        sampling_params={"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    )
    return served


def throughput(served: Any) -> dict[str, Any]:
    """Seconds of the prefill and of the whole, and milliseconds a step, of 10 and 64 prompts of 1024 tokens."""
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
        prefill = min(seconds(1) for _ in range(4))
        total = min(seconds(129) for _ in range(4))
        result[f"{count} prompts"] = {
            "prefill_s": round(prefill, 3),
            "total_s": round(total, 3),
            "ms_a_step": round((total - prefill) / 128 * 1e3, 2),
        }
    return result


TASKS = {"llama": llama, "demo": demo, "experts": experts}


def checkpoint(task: str, layout: str, folder: Path) -> Path:
    """Where `write_checkpoints` leaves a task's checkpoint."""
    return DEMO if task == "demo" and not layout else folder / f"{task}-{layout or 'bf16'}"


def write_checkpoints(task: str, layouts: Collection[str], folder: Path) -> None:
    import torch

    from benchmarks import _random_checkpoint
    from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint

    for layout in layouts:
        path = checkpoint(task, layout, folder)
        if task == "experts":
            _random_checkpoint.write(path, nvfp4_engine.SHAPES["qwen3-30b-a3b"], layout)
        elif task == "llama":
            path.mkdir()
            _random_checkpoint.describe(path, LLAMA, ["lm_head"], layout)
        elif layout:
            quantize_checkpoint(DEMO, path, layout)
    torch.cuda.empty_cache()  # engines take their part of what is free


def compare(entry: dict[str, Any], base: dict[str, Any]) -> None:
    """Replaces what an engine said of a text by how far it is from what `base` said."""
    if greedy := entry.pop("greedy", None):
        entry["perplexity"] = round(entry["perplexity"], 4)
        if expected := base.get("greedy"):
            entry["agreement"] = engines.agreement(greedy, expected)
    if (logprobs := entry.pop("logprobs", None)) and (expected := base.get("logprobs")):
        entry["difference"] = engines.difference(logprobs, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=(*TASKS, "all"), default="all")
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the tensor-parallel group")
    engines.add_options(parser, ", ".join(f"{count} of {task}" for task, count in AT_ONCE.items()))
    parser.add_argument("--run", nargs=3, metavar=("METHOD", "MODEL", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        method, model, folder = args.run
        import sglang  # noqa: F401  while the checkpoint is made

        engines.serve(Path(folder), lambda: TASKS[args.task](model, method, args.ranks))
    from importlib.metadata import version

    import torch

    from benchmarks import _harness as harness

    several = args.ranks > 1
    file = f"sglang_engine_{args.ranks}_ranks_{harness.arch()}" if several else f"sglang_engine_{harness.gpu()}"
    result: dict[str, Any] = {"sglang": version("sglang"), "ranks": args.ranks}
    with (
        tempfile.TemporaryDirectory() as entry_points,
        tempfile.TemporaryDirectory(dir=nvfp4_engine.scratch_folder()) as name,
    ):
        scratch, path = Path(name), engines.plugin_path("sglang", Path(entry_points))
        for task in TASKS if args.task == "all" else (args.task,):
            found = result[FIGURES[task]] = {}
            bf16: dict[str, Any] = {}
            methods, jobs = args.methods or (DEFAULT_OF_RANKS if several else DEFAULT[task]), []
            for method in methods:
                _, layout, variables = METHODS[method]
                command = [sys.executable, __file__, task, "--ranks", str(args.ranks)]
                command += ["--run", method, str(checkpoint(task, layout, scratch))]
                jobs.append(engines.Job(f"{task}-{method}", command, ENVIRONMENT | {"PYTHONPATH": path, **variables}))
            layouts = dict.fromkeys(METHODS[method][1] for method in methods)
            write = partial(write_checkpoints, task, layouts, scratch)
            measured = engines.run(jobs, args.at_once or AT_ONCE[task], args.start_seconds, write)
            for method, (entry, log) in zip(methods, measured, strict=True):
                bf16 = {**entry} if method == "bf16" else bf16
                compare(entry, bf16)
                if several and "failed" not in entry:
                    entry["log"] = lines_of_the_plugin(log)
                found[method] = entry
                engines.say(json.dumps({method: entry}))
                if torch.cuda.is_available():
                    harness.write(file, result)


if __name__ == "__main__":
    main()
