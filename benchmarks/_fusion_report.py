# SPDX-License-Identifier: Apache-2.0
"""The report's sections on the fusion pass in a whole vLLM. One without its file in results/ is left out."""

import re
from typing import Any

from benchmarks._markdown import RESULTS, load, measured_on, table

RANKS = (1, 2, 4, 8)
# A kernel of the table: a pattern of its names.
KERNELS = {
    "norm": r"norm_kernel|norm_quant|rsqrt",
    "quantization": r"per_token_quant",
    "all-reduce": r"cross_device_reduce|nccl|one_shot|two_shot",
}


def sections() -> str:
    times = ((f"vllm_fusion_{ranks}_ranks_sm_90.json", _times) for ranks in RANKS)
    made = (*times, ("vllm_fusion_demo_sm_90.json", _accuracy))
    return "".join(f"\n{make(load(name))}\n" for name, make in made if (RESULTS / name).exists())


def _times(result: dict[str, Any]) -> str:
    variants = result["variants"]
    first = next(iter(variants.values()))
    rows = []
    for prompts in (key for key in first if "prompt" in key):
        for name, found in variants.items():
            times, base = found[prompts], first[prompts]
            ratios = [f"{base[key] / times[key]:.3f}" for key in ("prefill_s", "ms_a_step")]
            rows.append([prompts, name, f"{times['prefill_s'] * 1e3:.1f}", f"{times['ms_a_step']:.3f}", *ratios])
    counts = [[name, *_launches(found["kernels_of_a_prefill"])] for name, found in variants.items()]
    base_name = next(iter(variants))
    header = ["batch", "variant", "prefill, ms", "ms a step", f"{base_name} / prefill", f"{base_name} / step"]
    ranks = result["ranks"]
    return (
        f"## The fusion pass in vLLM {result['vllm']}, {ranks} GPU{'s' if ranks > 1 else ''}\n\n{measured_on(result)}"
        "\n\nThe shape of Llama-3-70B cut to eight layers, ptpc_fp8, dummy weights, CUDA graphs, 1024 tokens in and "
        f"129 out:\n\n{table(header, rows)}\n\nKernels that the first GPU ran in one prefill:\n\n"
        f"{table(['variant', *KERNELS], counts)}"
    )


def _launches(kernels: dict[str, int]) -> list[str]:
    return [str(sum(n for name, n in kernels.items() if re.search(kind, name))) for kind in KERNELS.values()]


def _accuracy(result: dict[str, Any]) -> str:
    rows = [[name, f"{found['perplexity']:.3f}"] for name, found in result["variants"].items()]
    return (
        f"## The fusion pass and the demo model's accuracy\n\n{measured_on(result)}\n\n"
        f"{table(['variant', 'token perplexity'], rows)}"
    )
