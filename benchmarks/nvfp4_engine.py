# SPDX-License-Identifier: Apache-2.0
"""NVFP4 in a whole vLLM: bf16, vLLM's own Marlin, and this project's kernels, offline, in one run; beside them the same
model in FP8, by `ptpc_fp8` and by vLLM's own `fp8_per_channel`.

    python benchmarks/nvfp4_engine.py llama-3-70b
    python benchmarks/nvfp4_engine.py qwen3-30b-a3b
    python benchmarks/nvfp4_engine.py qwen3-30b-a3b-whole          all 48 layers, on a GPU of 140 GB
    python benchmarks/nvfp4_engine.py qwen3-30b-a3b --ranks 2      tensor parallel, and with quantized all-reduces too
    python benchmarks/nvfp4_engine.py qwen3-30b-a3b --batch-invariant      with VLLM_BATCH_INVARIANT=1

The shape of Llama-3-70B cut to 16 layers and of Qwen3-30B-A3B cut to 12 and whole, 1, 10 and 64 prompts of 1024 random
tokens, 256 tokens out, CUDA graphs of a step; the prefill is the time of one token out, a step is the rest over 255,
each the best of five runs, and `steps` says how much of a step is the GPU's, over several the first one's. With
`--capture-sizes 1 16 64 1024` one prompt's prefill is in a graph, too. NVFP4 is one random ModelOpt checkpoint, loaded
without a flag (_random_checkpoint.py); LLM_QUANT_ROCM_NVFP4=0 leaves it to vLLM, which takes Marlin for it on Hopper.
The others load what it decodes to where a router looks at it, and dummy weights (which take the same time and less
disk) where none does. `difference` is the mean absolute difference of a prompt's log probabilities from the first
method's with the same weights: rounding makes some, a wrong layer about 1. That prompt has 1024 tokens, too:
`ours_fp4_sums` quantizes all-reduces to FP4 where they are large enough, between two GPUs from 256 tokens of Llama's
shape on and from 1024 of Qwen's. Over several GPUs `log` is what the plugin said of them. `alone` says how many of some
prompts have the same tokens and log probabilities, bit for bit, alone as among the others.

Engines start side by side and are measured alone (_engines.py), and figures are written after each. It takes about 8
minutes, 19 GB of disk or memory for files (80 GB of the whole Qwen3), and 80 GB of a GPU, or 60 with --at-once 2. vLLM
need only be importable (PYTHONPATH); the plugin is found in this repository even where it is not installed.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _engines as engines
from benchmarks import vllm_engine

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-70b": {**vllm_engine.LLAMA, "head_dim": 128, "num_hidden_layers": 16},
    "qwen3-30b-a3b": QWEN3,
    "qwen3-30b-a3b-whole": {**QWEN3, "num_hidden_layers": 48, "vocab_size": 151936},
}
# What its checkpoints take where it is more than SCRATCH_GIB.
FILES_GIB = {"qwen3-30b-a3b-whole": 76}
SCRATCH_GIB = 24
# By method, what it sets in the environment.
METHODS = {
    "bf16": {},
    "marlin": {"LLM_QUANT_ROCM_NVFP4": "0"},
    "ours": {},
    "ours_prefill_fp8": {"LLM_QUANT_ROCM_NVFP4_PREFILL": "fp8"},
    "ours_fp4_sums": vllm_engine.QUICK,
    "ptpc_fp8": {},
    "fp8_per_channel": {},
}
# Which of them vLLM has to be told, while it loads 16-bit weights.
ONLINE = ("ptpc_fp8", "fp8_per_channel")
# And which need ranks to sum over.
OVER_RANKS = ("ours_fp4_sums",)
# And which depend on the batch: they refuse to be invariant.
VARIANT = ("ours_prefill_fp8", "ours_fp4_sums")

TOKENS = 256
# Of the prompt by which methods are compared. The sums of a shorter one travel exactly over two ranks.
COMPARED_TOKENS = 1024
PROMPTS = (1, 10, 64)
# Of the prompts that are asked for together and alone: from a single token to more than a graph has.
LENGTHS = (1, 7, 40, 130, 500) * 4
# A busy host makes some of them slow.
RUNS = 5
# The sizes to which vLLM pads so many prompts by itself: others would only lengthen the start.
CAPTURE_SIZES = (1, 16, 64)
# So many at once: their weights, caches and graphs share the GPU's memory.
AT_ONCE = 3


def start(shape: str, method: str, folder: str, ranks: int, capture_sizes: list[int]) -> Callable[[], dict[str, Any]]:
    """In a process of its own: an engine of the model in `folder` over `ranks` GPUs, for figures and one prompt's log
    probabilities."""
    load_format = "auto" if list(Path(folder).glob("*.safetensors")) else "dummy"
    quantization = method if method in ONLINE else "none"
    llm = vllm_engine.engine(
        folder, quantization, load_format=load_format, skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64,
        enable_prefix_caching=False, tensor_parallel_size=ranks,
        **vllm_engine.memory(SHAPES[shape], 1024 + TOKENS, ranks=ranks),
        compilation_config={"cudagraph_capture_sizes": capture_sizes},
    )  # fmt: skip
    vllm_engine.warm_up(llm)
    return lambda: figures(llm)


def figures(llm: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    random.seed(1)
    prompt = [random.randrange(3, 31999) for _ in range(COMPARED_TOKENS)]
    ask = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    candidates = llm.generate([{"prompt_token_ids": prompt}], ask, use_tqdm=False)[0].prompt_logprobs[1:]
    logprobs = [found[token].logprob for token, found in zip(prompt[1:], candidates, strict=True)]
    served_by = llm.model_config.quantization or "none"
    return {
        "logprobs": logprobs,
        "quantization": served_by,
        "alone": same_alone(llm),
        **vllm_engine.throughput(llm, TOKENS, PROMPTS, RUNS),
        "steps": vllm_engine.or_failure(lambda: vllm_engine.step_times(llm, PROMPTS)),
    }


def same_alone(llm: Any) -> dict[str, int]:
    """How many of the prompts there are, and how many get the same bits alone as among the others."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [random.randrange(3, 31999) for _ in range(length)]} for length in LENGTHS]
    ask = SamplingParams(max_tokens=8, temperature=0, logprobs=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)

    def said(some: Sequence[dict[str, list[int]]]) -> list[list[dict[int, float]]]:
        return [
            [
                {token: found.logprob for token, found in of_token.items()}
                for of_token in (*filter(None, answer.prompt_logprobs), *answer.outputs[0].logprobs)
            ]
            for answer in llm.generate(some, ask, use_tqdm=False)
        ]

    same = [together == said([prompt])[0] for prompt, together in zip(prompts, said(prompts), strict=True)]
    return {"prompts": len(same), "same": sum(same)}


def scratch_folder(gib: int = SCRATCH_GIB) -> str:
    """Memory, where it has the room: a checkpoint is written once and read up to three times."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > gib * 2**30 else tempfile.gettempdir()


def write_checkpoints(shape: str, dense: Path, quantized: Path) -> None:
    import torch

    from benchmarks import _random_checkpoint

    config = SHAPES[shape]
    _random_checkpoint.write(quantized, config, "modelopt")
    if is_routed(shape):
        _random_checkpoint.write(dense, config, "")
    else:
        dense.mkdir()
        (dense / "config.json").write_text(json.dumps(config))
    torch.cuda.empty_cache()


def is_routed(shape: str) -> bool:
    return "num_experts" in SHAPES[shape]


def measure(
    shape: str,
    methods: Sequence[str],
    at_once: int,
    start_s: float,
    capture_sizes: Sequence[int] = CAPTURE_SIZES,
    ranks: int = 1,
    batch_invariant: bool = False,
) -> None:
    """Measure `methods` over one checkpoint, and write what they took."""
    from benchmarks import _harness as harness

    shown: dict[str, Any] = {"shape": SHAPES[shape], "ranks": ranks, "cudagraph_capture_sizes": [*capture_sizes]}
    found: dict[str, Any] = {"vllm": version("vllm"), **shown, "methods": {}}
    graphs = f"_with_graphs_to_{max(capture_sizes)}" if max(capture_sizes) > max(CAPTURE_SIZES) else ""
    invariant = {"VLLM_BATCH_INVARIANT": "1"} if batch_invariant else {}
    kind = graphs + "_batch_invariant" * batch_invariant
    where = harness.gpu() if ranks == 1 else f"{ranks}_ranks_{harness.arch()}"
    numbers = [str(number) for number in (ranks, *capture_sizes)]
    expected: list[float] = []
    # Compiled code is elsewhere: memory may be mounted so that nothing can run from it.
    folder = scratch_folder(FILES_GIB.get(shape, SCRATCH_GIB))
    with tempfile.TemporaryDirectory(dir=folder) as checkpoints, tempfile.TemporaryDirectory() as scratch:
        dense, quantized = Path(checkpoints) / "dense", Path(checkpoints) / "quantized"
        folders = {method: dense if method in ("bf16", *ONLINE) else quantized for method in methods}
        jobs = [
            vllm_engine.job(
                method, __file__, (shape, method, str(folder), *numbers), Path(scratch), METHODS[method] | invariant
            )
            for method, folder in folders.items()
        ]
        prepare = partial(write_checkpoints, shape, dense, quantized)
        for method, (result, log) in zip(methods, engines.run(jobs, at_once, start_s, prepare), strict=True):
            logprobs = result.pop("logprobs", [])
            if logprobs and (folders[method] == quantized or is_routed(shape)):
                expected = expected or logprobs
                result["difference"] = engines.difference(logprobs, expected)
            if ranks > 1:
                result.setdefault("log", vllm_engine.lines_of_the_plugin(log))
            found["methods"][method] = result
            print(json.dumps({method: result}), flush=True)
            written = harness.write(f"nvfp4_engine_{shape}{kind}_{where}", found)
    print("written to", written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES, nargs="?")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="by default all that --ranks allows")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the tensor-parallel group")
    parser.add_argument(
        "--capture-sizes", nargs="+", type=int, default=CAPTURE_SIZES, metavar="N",
        help="numbers of tokens of which engines have CUDA graphs",
    )  # fmt: skip
    parser.add_argument(
        "--batch-invariant", action="store_true",
        help="ask for results that do not depend on the batch (VLLM_BATCH_INVARIANT=1)",
    )  # fmt: skip
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    engines.add_options(parser, str(AT_ONCE))
    args = parser.parse_args()
    if args.run:
        shape, method, checkpoint, ranks, *sizes, folder = args.run
        import vllm  # noqa: F401  while the checkpoint is made

        engines.serve(Path(folder), lambda: start(shape, method, checkpoint, int(ranks), [*map(int, sizes)]))
    elif args.shape:
        import torch

        if not 1 <= args.ranks <= torch.cuda.device_count():
            parser.error(f"{args.ranks} ranks on {torch.cuda.device_count()} GPUs: each rank needs a GPU")
        left_out = (OVER_RANKS if args.ranks == 1 else ()) + (VARIANT if args.batch_invariant else ())
        methods = args.methods or [method for method in METHODS if method not in left_out]
        at_once = args.at_once or AT_ONCE
        measure(args.shape, methods, at_once, args.start_seconds, args.capture_sizes, args.ranks, args.batch_invariant)
    else:
        parser.error("name a shape")


if __name__ == "__main__":
    main()
