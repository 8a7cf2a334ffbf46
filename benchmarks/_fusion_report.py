# SPDX-License-Identifier: Apache-2.0
"""The report's sections on the fusion pass in a whole vLLM, and on the kernel that it has for several GPUs."""

import re
from collections.abc import Mapping
from typing import Any

from benchmarks import _lines as lines
from benchmarks._markdown import gpus, measured_on, table

# A kernel of the table: a pattern of its names.
KERNELS = {
    "norm": r"norm_kernel|norm_quant|rms_norm|rsqrt",
    "quantization": r"per_token_quant",
    "all-reduce": r"cross_device_reduce|AllReduce|one_shot|two_shot",
}


def base_of(variants: Mapping[str, Any]) -> str:
    """The variant that others are compared with: what nothing of ours serves, where it was measured."""
    return "apart" if "apart" in variants else next(iter(variants))


def times(name: str, result: dict[str, Any]) -> str:
    variants = result["variants"]
    base_name = base_of(variants)
    first = variants[base_name]
    rows = []
    batches = [key for key in first if "prompt" in key]
    for batch in batches:
        for variant, found in variants.items():
            times, base = found[batch], first[batch]
            ratios = [f"{base[key] / times[key]:.3f}" for key in ("prefill_s", "ms_a_step")]
            rows.append([batch, variant, f"{times['prefill_s'] * 1e3:.1f}", f"{times['ms_a_step']:.3f}", *ratios])
    counts = [[variant, *_launches(found["kernels_of_a_prefill"])] for variant, found in variants.items()]
    header = ["batch", "variant", "prefill, ms", "ms a step", f"{base_name} / prefill", f"{base_name} / step"]
    title = f"The fusion pass in vLLM {result['vllm']}, {gpus(result['ranks'])}"
    kinds = {"prefill, ms": ("prefill_s", 1e3), "ms a step": ("ms_a_step", 1.0)}
    panels = {
        f"{batch}: {kind}": {variant: found[batch][key] * unit for variant, found in variants.items()}
        for kind, (key, unit) in kinds.items()
        for batch in batches
    }
    lines.bars(name, f"{title}\n{measured_on(result)}", panels)
    return (
        f"## {title}\n\n{measured_on(result)}\n\n![prefill and step]({name}.png)\n\nThe shape of Llama-3-70B "
        f"cut to {result['layers']} layers, ptpc_fp8, dummy weights, CUDA graphs, 1024 tokens in and 129 out:\n\n"
        f"{table(header, rows)}\n\nKernels that the first GPU ran in one prefill:\n\n"
        f"{table(['variant', *KERNELS], counts)}"
    )


def _launches(kernels: dict[str, int]) -> list[str]:
    return [str(sum(n for name, n in kernels.items() if re.search(kind, name))) for kind in KERNELS.values()]


def accuracy(name: str, result: dict[str, Any]) -> str:
    values = {variant: found["perplexity"] for variant, found in result["variants"].items()}
    rows = [[variant, f"{value:.3f}"] for variant, value in values.items()]
    title = "The fusion pass and the demo model's accuracy"
    lines.bars(name, f"{title}\n{measured_on(result)}", {"token perplexity": values})
    return (
        f"## {title}\n\n{measured_on(result)}\n\n![perplexity]({name}.png)\n\n"
        f"{table(['variant', 'token perplexity'], rows)}"
    )


def kernel(name: str, result: dict[str, Any]) -> str:
    """All-reduce, residual, norm and quantization in one kernel."""
    widths = list(dict.fromkeys(row["columns"] for row in result["rows"]))
    left_out = re.compile("nccl|symm_|quick_|fused|planned|speed_up")
    panels = {}
    for width in widths:
        rows = [row for row in result["rows"] if row["columns"] == width]
        panels[f"{width} columns"] = {
            who: points for who, points in lines.speed_up(rows, "rows", "separate").items() if not left_out.match(who)
        }
    lines.plot(
        name, f"All-reduce, residual, RMSNorm and FP8 in one kernel, {result['world']} GPUs\n{measured_on(result)}",
        panels, "tokens", "times as fast as separate operators",
    )  # fmt: skip
    names = [who for who in dict.fromkeys(who for row in result["rows"] for who in row["us"]) if who != "speed_up"]
    body = [
        [str(row["columns"]), str(row["rows"]), *(f"{row['us'][who]:.1f}" if who in row["us"] else "" for who in names)]
        + [f"{row['us']['separate'] / row['us']['fused']:.2f}"]
        for row in result["rows"]
    ]
    return (
        f"## All-reduce, residual, RMSNorm and FP8 in one kernel, {result['world']} GPUs\n\n{measured_on(result)}\n\n"
        f"![speed-up over separate operators]({name}.png)\n\n`separate` is the fastest all-reduce of the run, then "
        f"norm and quantization, {result['norm_and_quant']}; `two_kernels` has ours in one kernel behind it. `fused` "
        "is the fastest of what serves without a codec, `two_kernels` and both shots, and `planned` what the plan of "
        "that commit chose. Names with a codec send by it from end to end.\n\n"
        f"{table(['columns', 'tokens', *names, 'separate / fused'], body)}"
    )
