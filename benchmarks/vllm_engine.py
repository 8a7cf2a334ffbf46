# SPDX-License-Identifier: Apache-2.0
"""A whole vLLM on one GPU: accuracy on the demo model, and the time of a Llama-3-70B shape cut to eight layers.

    python benchmarks/vllm_engine.py

Every method runs in a process of its own. Accuracy: perplexity over examples/demo_model/heldout.txt in windows of 200
tokens, and how often the most likely token is BF16's. Time: dummy weights, CUDA graphs, 1024 tokens in, 129 out; the
prefill is the time of one token out, a step is the rest over 128, each the better of two runs.
"""

import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

DEMO_METHODS = ("none", "ptpc_fp8", "fp8_per_tensor")
LLAMA_METHODS = ("none", "ptpc_fp8", "fp8_per_channel")
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
    folder = Path("/tmp/llama-3-70b-8-layers")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    llm = engine(
        str(folder), method, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048,
        gpu_memory_utilization=0.8, enable_prefix_caching=False,
    )  # fmt: skip
    return throughput(llm, 129)


def throughput(llm: Any, tokens: int) -> dict[str, dict[str, float]]:
    """Seconds of the prefill and of the whole, and milliseconds a step, of 10 and 64 prompts of 1024 tokens."""
    from vllm import SamplingParams

    result = {}
    for count in (10, 64):
        random.seed(0)
        prompts = [{"prompt_token_ids": [random.randrange(3, 31999) for _ in range(1024)]} for _ in range(count)]

        def seconds(tokens: int, prompts: list[dict[str, list[int]]] = prompts) -> float:
            ask = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate(prompts, ask, use_tqdm=False)
            return time.perf_counter() - start

        seconds(4)
        prefill = min(seconds(1) for _ in range(2))
        total = min(seconds(tokens) for _ in range(2))
        result[f"{count} prompts"] = {
            "prefill_s": round(prefill, 3),
            "total_s": round(total, 3),
            "ms_a_step": round((total - prefill) / (tokens - 1) * 1e3, 2),
        }
    return result


def in_a_process(script: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """What `script` prints as JSON in its last line.

    Raises:
        RuntimeError: it failed.
    """
    environment = os.environ | {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    print(Path(script).name, *arguments, flush=True)
    done = subprocess.run([sys.executable, script, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout[-3000:], flush=True)
        raise RuntimeError(f"{' '.join(arguments)} failed with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    import vllm

    from benchmarks import _harness as harness

    accuracy = {method: in_a_process(__file__, "demo", method) for method in DEMO_METHODS}
    bf16 = accuracy["none"]["greedy"]
    for result in accuracy.values():
        greedy = result.pop("greedy")
        result["agreement"] = round(sum(a == b for a, b in zip(greedy, bf16, strict=True)) / len(bf16), 4)
        result["perplexity"] = round(result["perplexity"], 4)
    times = {method: in_a_process(__file__, "llama", method) for method in LLAMA_METHODS}
    found = {"vllm": vllm.__version__, "demo_model": accuracy, "llama_3_70b_8_layers": times}
    print(json.dumps(found, indent=1))
    print("written to", harness.write("vllm_engine_sm_90", found))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps({"demo": demo, "llama": llama}[sys.argv[1]](sys.argv[2])))
    else:
        main()
