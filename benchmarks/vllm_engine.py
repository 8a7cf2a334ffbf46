# SPDX-License-Identifier: Apache-2.0
"""A whole vLLM on one machine: accuracy on the demo model, and the time of a Llama-3-70B shape cut to eight layers.

    python benchmarks/vllm_engine.py                                   accuracy and time of ptpc_fp8 and vLLM's own
    python benchmarks/vllm_engine.py fusion                            ptpc_fp8 with and without the fusion pass
    python benchmarks/vllm_engine.py fusion --ranks 2                  and, over two GPUs, the quantized all-reduce
    python benchmarks/vllm_engine.py fusion --demo                     what the pass does to the demo model's accuracy

Every variant runs in a process of its own, about 80 seconds long. Accuracy: perplexity over
examples/demo_model/heldout.txt in windows of 200 tokens, and how often the most likely token is BF16's. Time: dummy
weights, CUDA graphs, 1024 tokens in, 129 out; the prefill is the time of one token out, a step is the rest over 128,
each the best of some runs. `fusion` also counts the norms, quantizations and all-reduces that the first rank's GPU ran
in one prefill, and keeps what the plugin logged. vLLM need only be importable (PYTHONPATH); the plugin is found in this
repository even where it is not installed.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

DEMO_METHODS = ("none", "ptpc_fp8", "fp8_per_tensor")
LLAMA_METHODS = ("none", "ptpc_fp8", "fp8_per_channel")
# By variant of ptpc_fp8, what it sets in the environment. The last two need ranks to reduce over.
OFF, QUICK = {"LLM_QUANT_ROCM_FUSION": "0"}, {"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"}
FUSION = {"apart": OFF, "fused": {}, "apart_quick_reduce": OFF | QUICK, "fused_quick_reduce": QUICK}
LOGGED = ("norm fusion:", "quantized all-reduce:")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def engine(model: str, method: str, **options: Any) -> Any:
    from vllm import LLM

    quantization = None if method == "none" else method
    return LLM(model, quantization=quantization, attention_backend="TRITON_ATTN", seed=0, **options)


def demo(method: str) -> dict[str, Any]:
    """Token perplexity and the most likely token at every position of the held-out text."""
    from vllm import SamplingParams

    llm = engine(str(ROOT / "examples/demo_model"), method, max_model_len=256, gpu_memory_utilization=0.3)
    text = (ROOT / "examples/demo_model/heldout.txt").read_text()
    tokens = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    windows = [tokens[start : start + 200] for start in range(0, len(tokens) - 200, 200)]
    ask = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], ask)
    loss, greedy = 0.0, []
    for window, output in zip(windows, outputs, strict=True):
        for token, candidates in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            loss -= candidates[token].logprob
            greedy.append(min((candidate.rank, name) for name, candidate in candidates.items())[1])
    return {"perplexity": math.exp(loss / len(greedy)), "greedy": greedy}


def llama(method: str) -> dict[str, Any]:
    return throughput(llama_engine(method), 129)


def llama_engine(method: str, **options: Any) -> Any:
    folder = Path("/tmp/llama-3-70b-8-layers")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return engine(
        str(folder), method, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048,
        gpu_memory_utilization=0.8, enable_prefix_caching=False, **options,
    )  # fmt: skip


def fusion(ranks: str) -> dict[str, Any]:
    """What the environment's variant of ptpc_fp8 takes over `ranks` GPUs, and which kernels it runs."""
    counts = (1, 10, 64)
    llm = llama_engine(
        "ptpc_fp8", tensor_parallel_size=int(ranks), max_num_seqs=64,
        compilation_config={"cudagraph_capture_sizes": list(counts)},
    )  # fmt: skip
    result = throughput(llm, 129, counts, 3)
    llm.apply_model(Profile())
    one_prefill(llm, 1024)
    return {"kernels_of_a_prefill": llm.apply_model(Profile(stop=True))[0], **result}


class Profile:
    """Starts or stops a profile of a worker's GPU. A class, not a closure: workers are other processes."""

    KERNELS = ("norm", "quant", "reduce", "rsqrt", "nccl")

    def __init__(self, stop: bool = False) -> None:
        self.stop = stop

    def __call__(self, model: Any) -> dict[str, int] | None:
        """Once stopped, how often the kernels ran whose names say that they are of the kinds in question."""
        import torch

        if not self.stop:
            model.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            model.profile.start()
            return None
        torch.cuda.synchronize()
        model.profile.stop()
        names = [event.name for event in model.profile.events()]
        return dict(Counter(name for name in names if any(kind in name.lower() for kind in self.KERNELS)))


def one_prefill(llm: Any, tokens: int) -> None:
    from vllm import SamplingParams

    ask = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    llm.generate([{"prompt_token_ids": list(range(3, 3 + tokens))}], ask, use_tqdm=False)


def throughput(llm: Any, tokens: int, counts: Sequence[int] = (10, 64), runs: int = 2) -> dict[str, dict[str, float]]:
    """Seconds of the prefill and of the whole, and milliseconds a step, of so many prompts of 1024 tokens."""
    from vllm import SamplingParams

    result = {}
    for count in counts:
        random.seed(0)
        prompts = [{"prompt_token_ids": [random.randrange(3, 31999) for _ in range(1024)]} for _ in range(count)]

        def seconds(tokens: int, prompts: list[dict[str, list[int]]] = prompts) -> float:
            ask = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate(prompts, ask, use_tqdm=False)
            return time.perf_counter() - start

        seconds(4)
        prefill = min(seconds(1) for _ in range(runs))
        total = min(seconds(tokens) for _ in range(runs))
        result[f"{count} prompt{'s' if count > 1 else ''}"] = {
            "prefill_s": round(prefill, 4),
            "total_s": round(total, 4),
            "ms_a_step": round((total - prefill) / (tokens - 1) * 1e3, 3),
        }
    return result


def plugin_path(scratch: Path) -> str:
    """PYTHONPATH with this repository and, unless it is installed, its entry point."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if not entry_points(group="vllm.general_plugins", name="llm_quant_rocm"):
        info = scratch / "entry" / "llm_quant_rocm-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-quant-rocm\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nllm_quant_rocm = llm_quant_rocm_vllm:register\n"
        )
        paths.insert(0, str(info.parent))
    return os.pathsep.join(paths)


def in_a_process(script: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """What `script` prints as JSON at last.

    Raises:
        RuntimeError: it failed.
    """
    return logged_process(script, *arguments, **variables)[0]


def logged_process(script: str, *arguments: str, **variables: str) -> tuple[dict[str, Any], list[str]]:
    """What `script` prints as JSON at last, and the lines that the plugin logged, of any of its processes.

    Raises:
        RuntimeError: it failed.
    """
    environment = os.environ | {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model sends a Python object to the workers
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    print(Path(script).name, *arguments, flush=True)
    done = subprocess.run([sys.executable, script, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout[-3000:], flush=True)
        raise RuntimeError(f"{' '.join(arguments)} failed with status {done.returncode}")
    lines = done.stdout.splitlines()
    said = [line[line.index(start) :] for line in lines for start in LOGGED if start in line]
    # Workers may have the last word.
    result = [line for line in lines if line.startswith("{")][-1]
    return json.loads(result), list(dict.fromkeys(said))


def measure_methods() -> None:
    import vllm

    from benchmarks import _harness as harness

    with tempfile.TemporaryDirectory() as scratch:
        path = plugin_path(Path(scratch))
        accuracy = {method: in_a_process(__file__, "--run", "demo", method, PYTHONPATH=path) for method in DEMO_METHODS}
        times = {method: in_a_process(__file__, "--run", "llama", method, PYTHONPATH=path) for method in LLAMA_METHODS}
    bf16 = accuracy["none"]["greedy"]
    for result in accuracy.values():
        greedy = result.pop("greedy")
        result["agreement"] = round(sum(a == b for a, b in zip(greedy, bf16, strict=True)) / len(bf16), 4)
        result["perplexity"] = round(result["perplexity"], 4)
    found = {"vllm": vllm.__version__, "demo_model": accuracy, "llama_3_70b_8_layers": times}
    print(json.dumps(found, indent=1))
    print("written to", harness.write("vllm_engine_sm_90", found))


def measure_fusion(ranks: int, variants: Sequence[str], is_demo: bool) -> None:
    """Written anew after each variant, beside those that benchmarks/results has. One that fails stops no other."""
    import vllm

    from benchmarks import _harness as harness

    name = "vllm_fusion_demo_sm_90" if is_demo else f"vllm_fusion_{ranks}_ranks_sm_90"
    arguments = ("demo", "ptpc_fp8") if is_demo else ("fusion", str(ranks))
    before = harness.RESULTS / f"{name}.json"
    results = json.loads(before.read_text())["variants"] if before.exists() else {}
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        path = plugin_path(Path(scratch))
        for variant in variants:
            try:
                result, log = logged_process(__file__, "--run", *arguments, PYTHONPATH=path, **FUSION[variant])
            except RuntimeError as error:
                failed.append(f"{variant}: {error}")
                print(failed[-1], flush=True)
                continue
            result.pop("greedy", None)
            results[variant] = {**result, "log": log, "commit": harness.environment()["commit"]}
            print(json.dumps({variant: results[variant]}), flush=True)
            print("written to", harness.write(name, {"vllm": vllm.__version__, "ranks": ranks, "variants": results}))
    if failed:
        raise SystemExit("\n".join(failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["methods", "fusion"], default="methods")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the tensor-parallel group (fusion)")
    parser.add_argument("--variants", nargs="+", choices=FUSION, help="by default all that --ranks allows (fusion)")
    parser.add_argument("--demo", action="store_true", help="accuracy on the demo model instead of times (fusion)")
    parser.add_argument("--run", nargs=2, metavar=("WHAT", "ARGUMENT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        what, argument = args.run
        print(json.dumps({"demo": demo, "llama": llama, "fusion": fusion}[what](argument)))
    elif args.part == "methods":
        measure_methods()
    else:
        variants = args.variants or list(FUSION)[: 4 if args.ranks > 1 else 2]
        measure_fusion(args.ranks, variants, args.demo)


if __name__ == "__main__":
    main()
