# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce in a whole vLLM: what each codec costs in accuracy.

    python benchmarks/quick_reduce_engine.py                         every codec, on a CPU or on two GPUs
    python benchmarks/quick_reduce_engine.py --ranks 4 --codecs FP4 INT4

Perplexity of the demo model over examples/demo_model/heldout.txt in windows of 200 tokens, and how often the most
likely token is the one without quantization. On a CPU every all-reduce is quantized, whatever its size; on GPUs the
crossovers leave the smallest to FP. What it gains in time says `vllm_engine.py fusion`. Engines start side by side and
are measured alone (_engines.py); figures are written after each.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _engines as engines
from benchmarks import vllm_engine

MODEL = Path(__file__).parent.parent / "examples/demo_model"
PREFIX = "VLLM_ROCM_QUICK_REDUCE_"
CODECS = ("FP", "INT8", "FP8", "INT6", "INT4", "FP4", "INT3")
ENVIRONMENT = {
    f"{PREFIX}MIN_SIZE_BYTES_MB": "0",
    # On CPUs: the default asks for a NUMA node a rank.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def accuracy(ranks: int) -> Callable[[], dict[str, Any]]:
    """Perplexity, and the most likely token at every position."""
    import torch
    from vllm import LLM

    if torch.cuda.is_available():
        config = json.loads((MODEL / "config.json").read_text())
        options = {"attention_backend": "TRITON_ATTN", **vllm_engine.memory(config, 256, ranks=ranks)}
    else:
        options = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
    llm = LLM(str(MODEL), tensor_parallel_size=ranks, seed=0, max_model_len=256, max_num_seqs=16, **options)
    return lambda: vllm_engine.perplexity(llm)


def measure(ranks: int, codecs: Sequence[str], at_once: int, start_s: float) -> None:
    from benchmarks import _harness as harness

    found: dict[str, Any] = {"vllm": version("vllm"), "ranks": ranks, "codecs": {}}
    expected: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        names = ("NONE", *codecs)
        jobs = [
            vllm_engine.job(
                codec, __file__, [str(ranks)], Path(scratch), ENVIRONMENT | {f"{PREFIX}QUANTIZATION": codec}
            )
            for codec in names
        ]
        for codec, (result, log) in zip(names, engines.run(jobs, at_once, start_s), strict=True):
            if "failed" in result:
                raise SystemExit(f"{codec} {result['failed']}:\n{result['log']}")
            greedy = result.pop("greedy")
            expected = expected or greedy
            found["codecs"][codec] = {
                "perplexity": round(result["perplexity"], 4),
                "agreement": engines.agreement(greedy, expected),
                "log": vllm_engine.lines_of_the_plugin(log),
            }
            print(json.dumps({codec: found["codecs"][codec]}), flush=True)
            written = harness.write(f"quick_reduce_engine_tp{ranks}_{harness.arch()}", found)
    print("written to", written)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--run", nargs=2, metavar=("RANKS", "FOLDER"), help=argparse.SUPPRESS)
    engines.add_options(parser, "4, and 1 on a CPU")
    args = parser.parse_args()
    if args.run:
        ranks, folder = args.run
        engines.serve(Path(folder), lambda: accuracy(int(ranks)))
    measure(args.ranks, args.codecs, args.at_once or (4 if torch.cuda.is_available() else 1), args.start_seconds)


if __name__ == "__main__":
    main()
