# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce in a whole vLLM: what each codec costs in accuracy, and what it gains in time.

    python benchmarks/quick_reduce_engine.py                accuracy alone, on a CPU or on GPUs
    python benchmarks/quick_reduce_engine.py --time         time as well: GPUs
    python benchmarks/quick_reduce_engine.py --ranks 4 --codecs FP4 INT4

Accuracy: perplexity of the demo model over examples/demo_model/heldout.txt in windows of 200 tokens, every all-reduce
quantized, whatever its size, and how often the most likely token is the one without quantization. Time: a Llama-3-70B
shape cut to eight layers, dummy weights, CUDA graphs, 10 and 64 prompts of 1024 tokens; which sizes are quantized is
the policy's choice. Every engine runs in a process of its own, and figures are written after each.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _engines as engines
from benchmarks import vllm_engine

ROOT = Path(__file__).parent.parent
PREFIX = "VLLM_ROCM_QUICK_REDUCE_"
CODECS = ("FP", "INT8", "FP8", "INT6", "INT4", "FP4", "INT3")


def engine(model: str, ranks: int, **options: Any) -> Any:
    import torch
    from vllm import LLM

    if torch.cuda.is_available():
        options["attention_backend"] = "TRITON_ATTN"
    else:
        options["enforce_eager"] = True
    return LLM(model, tensor_parallel_size=ranks, seed=0, **options)


def accuracy(ranks: int) -> dict[str, Any]:
    """In a process of its own: perplexity, and the most likely token at every position."""
    from vllm import SamplingParams

    llm = engine(
        str(ROOT / "examples/demo_model"), ranks, max_model_len=256, max_num_seqs=16, gpu_memory_utilization=0.3
    )
    text = (ROOT / "examples/demo_model/heldout.txt").read_text()
    tokens = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    windows = [tokens[start : start + 200] for start in range(0, len(tokens) - 200, 200)]
    ask = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], ask, use_tqdm=False)
    loss, greedy = 0.0, []
    for window, output in zip(windows, outputs, strict=True):
        for token, candidates in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            loss -= candidates[token].logprob
            greedy.append(min((candidate.rank, name) for name, candidate in candidates.items())[1])
    return {"perplexity": math.exp(loss / len(greedy)), "greedy": greedy}


def time(ranks: int) -> dict[str, Any]:
    """In a process of its own: times of the large shape."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(vllm_engine.LLAMA))
        llm = engine(
            folder, ranks, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048,
            gpu_memory_utilization=0.7, enable_prefix_caching=False,
        )  # fmt: skip
        return vllm_engine.throughput(llm, 129)


def in_a_process(what: str, ranks: int, log: Path, **variables: str) -> dict[str, Any]:
    """What `accuracy` or `time` returns in a process of its own.

    Raises:
        RuntimeError: it failed, with the end of its log.
    """
    answer = log.with_suffix(".json")
    command = [sys.executable, __file__, "--ranks", str(ranks), "--run", what, str(answer)]
    print(what, "with", variables[f"{PREFIX}QUANTIZATION"], flush=True)
    with log.open("w") as output:
        code = subprocess.run(command, env=os.environ | variables, stdout=output, stderr=output, check=False).returncode
    if code:
        raise RuntimeError(f"{what} ended with status {code}:\n{log.read_text()[-3000:]}")
    lines = [line for line in log.read_text().splitlines() if "quantized all-reduce" in line]
    return json.loads(answer.read_text()) | {"log": [line[line.index("quantized") :] for line in lines]}


def measure(ranks: int, codecs: list[str], timed: bool) -> None:
    import torch
    import vllm

    from benchmarks import _harness as harness
    from llm_quant_rocm import hardware

    arch = hardware.detect(torch.device("cuda" if torch.cuda.is_available() else "cpu")).arch
    found: dict[str, Any] = {"vllm": vllm.__version__, "ranks": ranks, "codecs": {}}
    expected: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "engine.log"
        common = {
            "PYTHONPATH": engines.plugin_path("vllm", Path(scratch)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # we have asked for GPUs before
            # On CPUs: the default asks for a NUMA node a rank.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        for codec in ("NONE", *codecs):
            chosen = common | {f"{PREFIX}QUANTIZATION": codec}
            result = in_a_process("accuracy", ranks, log, **chosen, **{f"{PREFIX}MIN_SIZE_BYTES_MB": "0"})
            greedy = result.pop("greedy")
            expected = expected or greedy
            agreed = sum(a == b for a, b in zip(greedy, expected, strict=True)) / len(greedy)
            result |= {"perplexity": round(result["perplexity"], 4), "agreement": round(agreed, 4)}
            if timed:
                result["time"] = in_a_process("time", ranks, log, **chosen)
            found["codecs"][codec] = result
            print(json.dumps({codec: result}), flush=True)
            written = harness.write(f"quick_reduce_engine_tp{ranks}_{arch}", found)
    print("written to", written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--time", action="store_true", help="measure the time too; needs GPUs")
    parser.add_argument("--run", nargs=2, metavar=("WHAT", "ANSWER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        what, answer = args.run
        Path(answer).write_text(json.dumps({"accuracy": accuracy, "time": time}[what](args.ranks)))
    else:
        measure(args.ranks, args.codecs, args.time)


if __name__ == "__main__":
    main()
