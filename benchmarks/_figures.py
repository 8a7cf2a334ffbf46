# SPDX-License-Identifier: Apache-2.0
"""The tables of README and docs that hold figures: made of results/*.json, between two comments.

    <!-- figures: NAME -->
    <!-- end of figures -->

A table has what there are files for.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import _harness as harness
from benchmarks import _overview
from benchmarks._engine_report import SHAPES, loading_table
from benchmarks._fusion_report import base_of
from benchmarks._markdown import (
    PROMPTS,
    gpu_ms,
    gpu_of,
    gpus,
    load,
    measured_on,
    nvfp4_engine_title,
    results,
    said_alone,
    table,
    total_ratio,
)
from benchmarks._quick_reduce_report import CODECS, PEERS, fastest, size

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
MIB = 1 << 20
SIZES = (4096, 65536, MIB, 16 * MIB, 128 * MIB, 1 << 30)
MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "deepseek-v3/8": "DeepSeek-V3, 1/8 of each", "mixtral-8x7b": "Mixtral 8x7B"}
UNTUNED_MODELS = {
    "qwen3-235b/2": "Qwen3-235B-A22B, 1/2 of each",
    "glm-4.5/4": "GLM-4.5, 1/4",
    "llama-4-scout/2": "Llama-4-Scout, 1/2",
    "mixtral-8x22b/4": "Mixtral 8x22B, 1/4",
}

Row = Mapping[str, Any]


def filled(text: str) -> str:
    """A page with its tables anew.

    Raises:
        KeyError: there is no table of such a name.
    """
    return MARK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def update() -> None:
    """Writes README and docs with their tables anew."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def commit(result: Row) -> str:
    return result["environment"]["commit"]


# --- the all-reduce


def all_reduce() -> str:
    parts = []
    for _, result in results("quick_reduce_sm_90_tp*"):
        rows = []
        for row in (row for row in result["rows"] if row["bytes"] in SIZES):
            us, base = row["us"], row["us"]["NCCL"]
            others = min(us[name] for name in PEERS if name in us)
            cells = [f"{t:.1f} ({base / t:.2f})" for t in (fastest(us, codec) for codec in CODECS)]
            rows.append([size(row["bytes"]), f"{base:.1f}", f"{others:.1f}", *cells])
        parts.append(f"{measured_on(result)}:\n\n{table(['message', 'NCCL', 'others', *CODECS], rows)}")
    return "\n\n".join(parts)


# --- all-reduce, norm and quantization


def plan(world: int, codec: str, nbytes: int) -> str:
    """The name in the figures of what the shipped crossovers choose.

    Raises:
        KeyError: none ship for so many ranks and the codec.
    """
    file = ROOT / "llm_quant_rocm" / "configs" / "reduce_norm_quant" / "sm_90.json"
    entries = json.loads(file.read_text())["crossovers"]
    known = {(entry["world_size"], entry["codec"]): entry["steps"] for entry in entries}
    if (world, codec) not in known:
        raise KeyError(f"{file} has no crossovers of {world} ranks by {codec}: merge those that were measured")
    steps = known[world, codec]
    step = steps[bisect_right(steps, nbytes, key=lambda step: step["from_bytes"]) - 1]
    if step["algorithm"] == "engine":
        return "two_kernels"
    return step["algorithm"] + ("" if step["codec"] == "FP" else f"_{step['codec']}")


def planned(result: Row, row: Row, codec: str = "FP") -> float:
    return row["us"][plan(result["world"], codec, 2 * row["rows"] * row["columns"])]


def fused_norm() -> str:
    parts = []
    for _, result in results("reduce_norm_quant_tp*_sm_90"):
        rows = []
        for row in (row for row in result["rows"] if row["rows"] in (1, 16, 64, 1024, 8192)):
            us, apart, ours, coded = row["us"], row["us"]["separate"], planned(result, row), planned(result, row, "FP4")
            cells = [str(row["columns"]), str(row["rows"]), f"{apart:.1f}", f"{ours:.1f}", f"{apart / ours:.2f}"]
            by_codec = [""] * 3
            if "separate_FP4" in us:
                by_codec = [f"{coded:.1f}", f"{apart / coded:.2f}", f"{us['separate_FP4'] / coded:.2f}"]
            rows.append(cells + by_codec)
        header = ["hidden size", "tokens", "separate", "ours", "ratio", "ours by FP4", "ratio", "over separate by FP4"]
        parts.append(f"{measured_on(result)}:\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def cells(base: Row, found: Row, key: str, unit: float) -> list[str]:
    """A time, and the base's over it."""
    return [f"{found[key] * unit:.2f}", f"{base[key] / found[key]:.2f}"]


def fused_engine() -> str:
    parts = []
    for name, result in results("vllm_fusion_*_ranks_sm_90"):
        variants = result["variants"]
        base_name = base_of(variants)
        base = variants[base_name]
        codec = "QuickReduce sends by FP4; " if any("quick_reduce" in variant for variant in variants) else ""
        batches = [key for key in base if "prompt" in key]
        rows = [
            [batch, f"`{variant}`", *cells(base[batch], found[batch], "prefill_s", 1e3)]
            + [*cells(base[batch], found[batch], "ms_a_step", 1.0), found.get("commit", commit(result))]
            for batch in batches
            for variant, found in variants.items()
        ]
        header = ["batch", "variant", "time to first token, ms", "ratio", "time per output token, ms", "ratio"]
        parts.append(
            f"A whole vLLM {result['vllm']} on {gpus(result['ranks'])}, `ptpc_fp8`, the shape of Llama-3-70B cut to "
            f"{result['layers']} layers, random weights, CUDA graphs, 1024 tokens in and 129 out. `apart` is without "
            f"the pass; {codec}ratios are `{base_name}`'s time over the row's "
            f"([file](../benchmarks/results/{name}.json)). {measured_on(result)}:\n\n"
            f"{table([*header, 'commit'], rows)}"
        )
    return "\n\n".join(parts)


# --- routed experts


def over(result: Row, peers: Sequence[str], ours: str, model: str, router: str) -> dict[int, str]:
    """By tokens, the time of the fastest of the peers that were timed over ours."""
    found = {}
    for row in result["rows"]:
        theirs = [row["us"][peer] for peer in peers if peer in row["us"]]
        if (row["model"], row["router"]) == (model, router) and theirs and ours in row["us"]:
            found[row["tokens"]] = f"{min(theirs) / row['us'][ours]:.2f}"
    return found


def experts(peers: Sequence[str], ours: str, *names: str) -> str:
    """The time of the fastest of peers over ours under a fair router and, in brackets, a skewed one; of each file."""
    tables = []
    for result in map(load, names):
        columns = {}
        for model in dict.fromkeys(row["model"] for row in result["rows"]):
            fair, skewed = (over(result, peers, ours, model, router) for router in ("fair", "skewed"))
            both = {tokens: f"{fair[tokens]} ({skewed[tokens]})" for tokens in fair.keys() & skewed.keys()}
            columns[(MODELS | UNTUNED_MODELS)[model]] = both
        rows = [
            [str(tokens), *(column.get(tokens, "") for column in columns.values())]
            for tokens in dict.fromkeys(row["tokens"] for row in result["rows"])
        ]
        tables.append(f"{measured_on(result)}:\n\n{table(['tokens', *columns], rows)}")
    return "\n\n".join(tables)


NVFP4_EXPERTS = partial(experts, _overview.NVFP4_EXPERTS, "nvfp4_moe")
PTPC_EXPERTS = partial(experts, _overview.PTPC_EXPERTS, "ptpc_moe")


# --- NVFP4


def ratios(result: Row, m: int, who: str, base: str = "bf16") -> dict[str, float]:
    """By layer of Llama-3-70B, the time of `base`, cuBLAS's in bf16, over somebody's."""
    rows = [row for row in result["rows"] if row["m"] == m and row["layer"] in harness.LAYERS]
    return {row["layer"]: row["us"][base] / row["us"][who] for row in rows}


def mean(result: Row, m: int, who: str, base: str = "bf16") -> str:
    found = ratios(result, m, who, base).values()
    return f"{sum(found) / len(found):.2f}"


def nvfp4_means() -> str:
    """Of the mean of Llama-3-70B's layers by tokens, cuBLAS's and Marlin's times over ours, on each GPU."""
    measured = [load(f"nvfp4_gemm_{gpu}sm_90.json") for gpu in ("", "h200_")]
    rows = []
    for m in (1, 16, 64, 256, 1024, 4096):
        rows.append([str(m)])
        for result in measured:
            rows[-1].append(f"{mean(result, m, 'nvfp4_gemm')} ({mean(result, m, 'nvfp4_gemm', 'marlin')})")
            rows[-1].append(mean(result, m, "nvfp4_gemm_fp8") if m >= 256 else "")
    header = [f"{gpu_of(result)}{how}" for result in measured for how in ("", ', `prefill="fp8"`')]
    return f"{'; '.join(map(measured_on, measured))}:\n\n{table(['tokens', *header], rows)}"


def fp8_prefill() -> str:
    result = load("nvfp4_gemm_sm_90.json")
    rows = [
        [str(m), *(f"{ratio:.2f}" for ratio in ratios(result, m, "nvfp4_gemm_fp8").values())]
        + [mean(result, m, "nvfp4_gemm_fp8")]
        for m in (256, 512, 1024, 2048, 4096)
    ]
    return f"{measured_on(result)}:\n\n{table(['rows', *harness.LAYERS, 'mean'], rows)}"


def untuned(shown: Mapping[str, tuple[str, str]], *names: str) -> str:
    """By rows of x, the mean over layers that nothing was tuned for of one's time over another's, and the least, with
    those who were there to be timed; of each file."""
    tables = []
    for result in map(load, names):
        here = {title: pair for title, pair in shown.items() if any(pair[0] in row["us"] for row in result["rows"])}
        rows = [
            [str(m), *(mean_and_least(result, m, theirs, ours) for theirs, ours in here.values())]
            for m in harness.UNTUNED_MS
        ]
        tables.append(f"{measured_on(result)}:\n\n{table(['rows', *here], rows)}")
    return "\n\n".join(tables)


def mean_and_least(result: Row, m: int, theirs: str, ours: str) -> str:
    here = [row["us"] for row in result["rows"] if row["m"] == m]
    found = [us[theirs] / us[ours] for us in here if ours in us]
    return f"{sum(found) / len(found):.2f} ({min(found):.2f})" if found else ""


NVFP4_UNTUNED = {
    "bf16": ("bf16", "nvfp4_gemm"),
    "Marlin": ("marlin", "nvfp4_gemm"),
    'bf16, with `prefill="fp8"`': ("bf16", "nvfp4_gemm_fp8"),
}
PTPC_UNTUNED = {
    "`torch._scaled_mm` rowwise over `ptpc_gemm`": ("torch_rowwise", "ptpc_gemm"),
    "vLLM's CUTLASS over `ptpc_gemm`": ("vllm_cutlass", "ptpc_gemm"),
    "the layer with `torch._scaled_mm` over `ptpc_linear`": ("torch_linear", "ptpc_linear"),
    "bf16 over `ptpc_linear`": ("bf16", "ptpc_linear"),
}


# --- engines


def engine_table(result: Row, methods: Mapping[str, Row], with_gpu: bool = False) -> str:
    """What engines took, and bf16's time over theirs; with what of a step the GPU took."""
    rows = [
        [f"`{method}`", prompts, *(f"{found[prompts][key]:.3f}" for key in ("prefill_s", "ms_a_step"))]
        + [gpu_ms(found, prompts)] * with_gpu
        + [f"{found[prompts]['total_s']:.3f}", total_ratio(methods, "bf16", method, prompts)]
        + [found.get("commit", commit(result))]
        for prompts in ("1 prompt", *PROMPTS)
        for method, found in methods.items()
        if prompts in found
    ]
    step = ["ms a step", *["of it the GPU"] * with_gpu]
    return table(["method", "batch", "prefill, s", *step, "total, s", "bf16 / total", "commit"], rows)


def nvfp4_engine() -> str:
    parts = []
    for name, result in results("nvfp4_engine_*_sm_90"):
        shape = nvfp4_engine_title(name)
        layers = result["shape"]["num_hidden_layers"]
        parts.append(
            f"{shape}, {layers} layers ([file](../benchmarks/results/{name}.json)), {result['environment']['device']}:"
            f"\n\n{engine_table(result, result['methods'], with_gpu=True)}{said_alone(result['methods'])}"
        )
    return "\n\n".join(parts)


def sglang_engine(file: str) -> str:
    result = load(file)
    parts = [f"{title}\n\n{engine_table(result, result[group])}" for group, title in SHAPES.items() if group in result]
    demo = {name: found for name, found in result.get("demo_model", {}).items() if "perplexity" in found}
    if demo:
        rows = [
            [f"`{name}`", f"{found['perplexity']:.2f}", f"{100 * found['agreement']:.1f}%"]
            + [found.get("commit", commit(result))]
            for name, found in demo.items()
        ]
        header = ["method", "token perplexity of the demo model", "most likely token as in bf16", "commit"]
        parts.append(table(header, rows))
    return "\n\n".join([f"{measured_on(result)}:", *parts])


def loading() -> str:
    result = load("vllm_load_sm_90.json")
    return f"vLLM {result['vllm']}, {measured_on(result)}:\n\n{loading_table(result)}"


TABLES: dict[str, Callable[[], str]] = {
    "all_reduce": all_reduce,
    "fused_norm": fused_norm,
    "fused_engine": fused_engine,
    "ptpc_untuned": partial(untuned, PTPC_UNTUNED, "ptpc_gemm_untuned_sm_90.json", "ptpc_gemm_untuned_h200_sm_90.json"),
    "ptpc_experts": partial(PTPC_EXPERTS, "ptpc_moe_h200_sm_90.json", "ptpc_moe_sm_90.json"),
    "ptpc_experts_untuned": partial(PTPC_EXPERTS, "ptpc_moe_untuned_h200_sm_90.json", "ptpc_moe_untuned_sm_90.json"),
    "fp8_prefill": fp8_prefill,
    "nvfp4_untuned": partial(
        untuned, NVFP4_UNTUNED, "nvfp4_gemm_untuned_sm_90.json", "nvfp4_gemm_untuned_h200_sm_90.json"
    ),
    "nvfp4_means": nvfp4_means,
    "nvfp4_experts": partial(NVFP4_EXPERTS, "nvfp4_moe_h200_sm_90.json", "nvfp4_moe_sm_90.json"),
    "nvfp4_experts_untuned": partial(
        NVFP4_EXPERTS, "nvfp4_moe_untuned_h200_sm_90.json", "nvfp4_moe_untuned_sm_90.json"
    ),
    "nvfp4_engine": nvfp4_engine,
    "loading": loading,
    "sglang_engine": partial(sglang_engine, "sglang_engine_sm_90.json"),
    "sglang_engine_h200": partial(sglang_engine, "sglang_engine_h200_sm_90.json"),
    "sglang_ranks": partial(sglang_engine, "sglang_engine_2_ranks_sm_90.json"),
    "engines": _overview.engines,
    "accuracy": _overview.accuracy,
}
