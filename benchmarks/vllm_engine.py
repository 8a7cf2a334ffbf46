# SPDX-License-Identifier: Apache-2.0
"""A whole vLLM on one machine: accuracy on the demo model, and the time of a Llama-3-70B shape cut to a few layers.

    python benchmarks/vllm_engine.py                                   accuracy and time of ptpc_fp8 and vLLM's own
    python benchmarks/vllm_engine.py fusion                            ptpc_fp8 with and without the fusion pass
    python benchmarks/vllm_engine.py fusion --ranks 2                  and, over two GPUs, the quantized all-reduce
    python benchmarks/vllm_engine.py fusion --demo                     what the pass does to the demo model's accuracy

Engines start side by side and are measured alone (_engines.py). Accuracy: perplexity over
examples/demo_model/heldout.txt in windows of 200 tokens, and how often the most likely token is BF16's. Time: dummy
weights, CUDA graphs, 1024 tokens in, 129 out; the prefill is the time of one token out, a step is the rest over 128,
each the best of some runs. `fusion` has 24 layers, since the host takes longer for a step than GPUs for eight of them;
it counts the norms, quantizations and all-reduces that the first rank's GPU ran in one prefill, says for a step after
it what that GPU did and how long the host took from one to the next, and keeps what the plugin logged. vLLM need only
be importable (PYTHONPATH); the plugin is found in this repository even where it is not installed.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _engines as engines  # noqa: E402

ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model sends a Python object to the engine's process
}
# Their weights, caches and graphs share the GPUs' memory.
AT_ONCE, DEEP_AT_ONCE = 4, 2
DEMO_METHODS = ("none", "ptpc_fp8", "fp8_per_tensor")
LLAMA_METHODS = ("none", "ptpc_fp8", "fp8_per_channel")
# By variant of ptpc_fp8, what it sets in the environment. The last two need ranks to reduce over.
OFF, QUICK = {"LLM_QUANT_ROCM_FUSION": "0"}, {"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "FP4"}
FUSION = {"apart": OFF, "fused": {}, "apart_quick_reduce": OFF | QUICK, "fused_quick_reduce": QUICK}
# What is generated where steps are looked at: the prefill's token, and one a step.
STEP_TOKENS = 33
LOGGED = ("norm fusion:", "quantized all-reduce:", "reduce_norm_quant over")
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
DEEP_LLAMA = {**LLAMA, "num_hidden_layers": 24}


def engine(model: str, method: str, **options: Any) -> Any:
    from vllm import LLM

    quantization = None if method == "none" else method
    return LLM(model, quantization=quantization, attention_backend="TRITON_ATTN", seed=0, **options)


def memory(config: Mapping[str, Any], tokens: int, ranks: int = 1) -> dict[str, Any]:
    """Options for a cache that holds 64 prompts of `tokens` tokens, whatever else there is on the GPU."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    block = 16 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] // ranks * head * 2
    blocks = 64 * (math.ceil(tokens / 16) + 2)
    # vLLM refuses to start where less than that part of the memory is free, even if the cache's size is given.
    return {"kv_cache_memory_bytes": blocks * block, "gpu_memory_utilization": 0.01}


def demo(method: str) -> Callable[[], dict[str, Any]]:
    """Token perplexity and the most likely token at every position of the held-out text."""
    model = ROOT / "examples/demo_model"
    config = json.loads((model / "config.json").read_text())
    llm = engine(str(model), method, max_model_len=256, max_num_seqs=64, **memory(config, 256))
    warm_up(llm, 1)
    return lambda: perplexity(llm)


def perplexity(llm: Any) -> dict[str, Any]:
    from vllm import SamplingParams

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


def llama(method: str) -> Callable[[], dict[str, Any]]:
    llm = llama_engine(LLAMA, method)
    warm_up(llm)
    return lambda: throughput(llm, 129)


def llama_engine(config: Mapping[str, Any], method: str, ranks: int = 1, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return engine(
            folder, method, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048,
            enable_prefix_caching=False, tensor_parallel_size=ranks, **memory(config, 1024 + 129, ranks=ranks),
            **options,
        )  # fmt: skip


def fusion(ranks: str) -> Callable[[], dict[str, Any]]:
    """What the environment's variant of ptpc_fp8 takes over `ranks` GPUs, and which kernels it runs."""
    counts = (1, 10, 64)
    llm = llama_engine(
        DEEP_LLAMA, "ptpc_fp8", int(ranks), max_num_seqs=64,
        compilation_config={"cudagraph_capture_sizes": list(counts)},
    )  # fmt: skip
    warm_up(llm)

    def measure() -> dict[str, Any]:
        result = throughput(llm, 129, counts, 5)
        llm.apply_model(Profile())
        generate(llm, 1, 1)
        kernels = llm.apply_model(Profile(stop=True))[0]
        return {"kernels_of_a_prefill": kernels, **result, "steps": or_failure(lambda: steps(llm, counts))}

    return measure


def or_failure(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` returns, or why it failed, for what is not worth losing what an engine has measured before."""
    try:
        return measure()
    except Exception as error:
        return {"failed": repr(error)}


def steps(llm: Any, counts: Sequence[int]) -> dict[str, Any]:
    """What the first rank's GPU does in a step after the prefill: `step_times`, and the microseconds of each kernel."""
    result = step_times(llm, counts)
    llm.apply_model(Profile())
    generate(llm, 1, STEP_TOKENS)
    result["us_of_kernels_with_1_prompt"] = llm.apply_model(Profile(stop=True, steps=STEP_TOKENS - 1))[0]
    return result


def step_times(llm: Any, counts: Sequence[int]) -> dict[str, Any]:
    """By number of prompts, what `StepTimes` says of the steps after the prefill."""
    generate(llm, 1, STEP_TOKENS)
    result: dict[str, Any] = {}
    for count in counts:
        llm.apply_model(StepTimes())
        generate(llm, count, STEP_TOKENS)
        result[f"{count} prompt{'s' * (count > 1)}"] = llm.apply_model(StepTimes(stop=True))[0]
    return result


def generate(llm: Any, count: int, tokens: int) -> None:
    from vllm import SamplingParams

    ask = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(3 + first, 1027 + first))} for first in range(count)]
    llm.generate(prompts, ask, use_tqdm=False)


class StepTimes:
    """Starts or stops timing the CUDA graphs that a worker replays, one a step after the prefill."""

    def __init__(self, stop: bool = False) -> None:
        self.stop = stop

    def __call__(self, model: Any) -> dict[str, float] | None:
        """Once stopped, medians in microseconds: of a graph, and from the begin of one graph to that of the next.

        Where the second is much longer than the first, the GPU waits for the host.
        """
        import statistics
        from itertools import pairwise

        import torch

        if not self.stop:
            events, original = [], torch.cuda.CUDAGraph.replay

            def replay(graph: Any) -> None:
                events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                events[-1][0].record()
                original(graph)
                events[-1][1].record()

            torch.cuda.CUDAGraph.replay = replay
            model.step_times = events, original
            return None
        torch.cuda.synchronize()
        events, torch.cuda.CUDAGraph.replay = model.step_times
        gpu = [begin.elapsed_time(end) for begin, end in events]
        between = [first[0].elapsed_time(second[0]) for first, second in pairwise(events)]
        times = {"graph_us": gpu, "begin_to_begin_us": between}
        medians = {name: round(statistics.median(ms) * 1e3, 1) for name, ms in times.items() if ms}
        return {"graphs": len(events), **medians}


class Profile:
    """Starts or stops a profile of a worker's GPU. A class, not a closure: workers are other processes."""

    KERNELS = ("norm", "quant", "reduce", "rsqrt", "nccl", "shot")

    def __init__(self, stop: bool = False, steps: int = 0) -> None:
        self.stop, self.steps = stop, steps

    def __call__(self, model: Any) -> dict[str, Any] | None:
        """Once stopped, how often the kernels ran whose names say that they are of the kinds in question. With `steps`,
        of every kernel that ran in each of so many: how often in one, and its median microseconds."""
        import torch

        if not self.stop:
            model.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            model.profile.start()
            return None
        torch.cuda.synchronize()
        model.profile.stop()
        if self.steps:
            import statistics
            from collections import defaultdict

            times = defaultdict(list)
            for event in model.profile.events():
                times[event.name].append(event.time_range.elapsed_us())
            return {
                name[:80]: [round(len(us) / self.steps, 1), round(statistics.median(us), 1)]
                for name, us in sorted(times.items(), key=lambda item: -sum(item[1]))
                if len(us) >= self.steps
            }
        names = [event.name for event in model.profile.events()]
        return dict(Counter(name for name in names if any(kind in name.lower() for kind in self.KERNELS)))


def warm_up(llm: Any, prompts: int = 64) -> None:
    """What is compiled at the first use is part of the start."""
    from vllm import SamplingParams

    tokens = min(1024, llm.model_config.max_model_len - 8)
    ask = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": list(range(3, 3 + tokens))}] * prompts, ask, use_tqdm=False)


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


def job(name: str, script: str, arguments: Sequence[str], scratch: Path, variables: Mapping[str, str]) -> engines.Job:
    """`script --run arguments` with this repository's plugin, in the environment that a vLLM of the benchmarks has."""
    environment = ENVIRONMENT | {
        "PYTHONPATH": engines.plugin_path("vllm", scratch),
        # Compiled graphs of its own: engines that start together would write to the same files.
        "VLLM_CACHE_ROOT": str(scratch / name),
    }
    return engines.Job(name, [sys.executable, script, "--run", *arguments], {**environment, **variables})


def lines_of_the_plugin(log: str) -> list[str]:
    """Of any of an engine's processes, each once."""
    lines = (line[line.index(start) :] for line in log.splitlines() for start in LOGGED if start in line)
    return list(dict.fromkeys(lines))


def measure_methods(at_once: int, start_s: float) -> None:
    from benchmarks import _harness as harness

    tasks = {"demo": DEMO_METHODS, "llama": LLAMA_METHODS}
    names = [(task, method) for task, methods in tasks.items() for method in methods]
    found: dict[str, dict[str, Any]] = {task: {} for task in tasks}
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [job(f"{task}-{method}", __file__, (task, method), Path(scratch), {}) for task, method in names]
        for (task, method), (result, _) in zip(names, engines.run(jobs, at_once, start_s), strict=True):
            if "failed" in result:
                raise SystemExit(f"{task} {method} {result['failed']}:\n{result['log']}")
            found[task][method] = result
    bf16 = found["demo"]["none"]["greedy"]
    for result in found["demo"].values():
        result["agreement"] = engines.agreement(result.pop("greedy"), bf16)
        result["perplexity"] = round(result["perplexity"], 4)
    figures = {"vllm": version("vllm"), "demo_model": found["demo"], "llama_3_70b_8_layers": found["llama"]}
    print(json.dumps(figures, indent=1))
    print("written to", harness.write(f"vllm_engine_{harness.gpu()}", figures))


def measure_fusion(ranks: int, variants: Sequence[str], is_demo: bool, at_once: int, start_s: float) -> None:
    """Written anew after each variant, beside those that benchmarks/results has of this vLLM on such a machine. One
    that fails stops no other."""
    from benchmarks import _harness as harness
    from benchmarks._markdown import RESULTS

    what = "demo" if is_demo else f"{ranks}_ranks"
    name = f"vllm_fusion_{what}_{harness.gpu() if ranks == 1 else harness.arch()}"
    arguments = ("demo", "ptpc_fp8") if is_demo else ("fusion", str(ranks))
    file = RESULTS / f"{name}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    layers = None if is_demo else DEEP_LLAMA["num_hidden_layers"]
    facts = {"vllm": version("vllm"), "ranks": ranks, "layers": layers}
    device = before.get("environment", {}).get("device")
    comparable = before.items() >= facts.items() and device == harness.environment(ranks)["device"]
    results = before["variants"] if comparable else {}
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [job(variant, __file__, arguments, Path(scratch), FUSION[variant]) for variant in variants]
        for variant, (result, log) in zip(variants, engines.run(jobs, at_once, start_s), strict=True):
            if "failed" in result:
                failed.append(f"{variant} {result['failed']}")
                print(f"{failed[-1]}:\n{result['log']}", flush=True)
                continue
            result.pop("greedy", None)
            said = lines_of_the_plugin(log)
            results[variant] = {**result, "log": said, "commit": harness.environment()["commit"]}
            print(json.dumps({variant: results[variant]}), flush=True)
            print("written to", harness.write(name, {**facts, "variants": results}))
    if failed:
        raise SystemExit("\n".join(failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["methods", "fusion"], default="methods")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the tensor-parallel group (fusion)")
    parser.add_argument("--variants", nargs="+", choices=FUSION, help="by default all that --ranks allows (fusion)")
    parser.add_argument("--demo", action="store_true", help="accuracy on the demo model instead of times (fusion)")
    parser.add_argument("--run", nargs=3, metavar=("WHAT", "ARGUMENT", "FOLDER"), help=argparse.SUPPRESS)
    engines.add_options(parser, f"{AT_ONCE}, and {DEEP_AT_ONCE} of fusion's")
    args = parser.parse_args()
    at_once = args.at_once or (DEEP_AT_ONCE if args.part == "fusion" else AT_ONCE)
    if args.run:
        what, argument, folder = args.run
        engines.serve(Path(folder), lambda: {"demo": demo, "llama": llama, "fusion": fusion}[what](argument))
    elif args.part == "methods":
        measure_methods(at_once, args.start_seconds)
    else:
        variants = args.variants or list(FUSION)[: 4 if args.ranks > 1 else 2]
        measure_fusion(args.ranks, variants, args.demo, at_once, args.start_seconds)


if __name__ == "__main__":
    main()
