# SPDX-License-Identifier: Apache-2.0
"""What README shows of results/*.json: a picture of what GPUs gave, and tables of whole engines and of accuracy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from benchmarks import _harness as harness
from benchmarks import _lines as lines
from benchmarks._fusion_report import base_of
from benchmarks._markdown import (
    PROMPTS,
    gpu_of,
    load,
    nvfp4_engine_title,
    on_each_gpu,
    results,
    table,
    total_ratio,
)
from benchmarks._quick_reduce_report import PEERS, fastest, size

PICTURE = "overview"
Methods = Mapping[str, Mapping[str, Any]]
# Methods as README names them: ours, and what the engines have themselves.
OURS = {
    "ours": "NVFP4",
    "nvfp4": "NVFP4",
    "ours_prefill_fp8": "NVFP4, prefill in FP8",
    "ours_fp4_sums": "NVFP4, sums by FP4",
    "ours_in_one_process": "NVFP4, in one process",
    "nvfp4_fp4_sums": "NVFP4, sums by FP4",
    "ptpc_fp8": "PTPC-FP8",
    "ptpc_fp8_norms_apart": "PTPC-FP8, norms apart",
    "ptpc_fp8_fp4_sums": "PTPC-FP8, sums by FP4",
    "bf16_fp4_sums": "bf16, sums by FP4",
    "fused": "fused",
    "apart_quick_reduce": "all-reduce by FP4",
    "fused_quick_reduce": "both",
}
THEIRS = {"marlin": "NVFP4 by Marlin", "fp8_per_channel": "`fp8_per_channel`", "sglang_fp8": "`fp8`"}
SHAPES = {"llama_3_70b_8_layers": "llama-3-70b, 8 layers", "qwen3_30b_a3b_12_layers": "qwen3-30b-a3b, 12 layers"}
# Who is drawn of the layers, by operator.
NVFP4_LAYERS = {"nvfp4_gemm": "ours", "nvfp4_gemm_fp8": "ours, prefill in FP8", "marlin": "Marlin"}
PTPC_LAYERS = {"ptpc_linear": "ours", "torch_linear": "torch"}
# vLLM's own experts.
NVFP4_EXPERTS = ("marlin",)
PTPC_EXPERTS = ("vllm_cutlass", "vllm_fp8")
# The engines in the picture: a file of each shape and GPU, the latest of those measured alike.
PICTURED = (
    "nvfp4_engine_llama-3-70b_sm_90",
    "nvfp4_engine_llama-3-70b_h200_sm_90",
    "nvfp4_engine_qwen3-30b-a3b_later_sm_90",
    "nvfp4_engine_qwen3-30b-a3b-whole_h200_sm_90",
    "vllm_engine_sm_90",
    "sglang_engine_sm_90",
)


class Engine(NamedTuple):
    """A whole engine that was measured: its file, itself and the model's shape, on which GPUs, the methods, and which
    of them the others are compared with."""

    file: str
    title: str
    gpu: str
    methods: Methods
    base: str


def measured_engines() -> Iterator[Engine]:
    for file, result in results("nvfp4_engine_*_sm_90"):
        shape = f"{nvfp4_engine_title(file)}, {result['shape']['num_hidden_layers']} layers"
        yield Engine(file, f"vLLM {result['vllm']}, {shape}", _gpus(result), result["methods"], "bf16")
    for file, result in results("vllm_engine_sm_90"):
        group, shape = next(iter(SHAPES.items()))
        yield Engine(file, f"vLLM {result['vllm']}, {shape}", _gpus(result), result[group], "none")
    for file, result in results("sglang_engine*_sm_90"):
        for group, shape in SHAPES.items():
            yield Engine(file, f"SGLang {result['sglang']}, {shape}", _gpus(result), result.get(group, {}), "bf16")
    for file, result in results("vllm_fusion_*_ranks_sm_90"):
        base = base_of(result["variants"])
        title = f"vLLM {result['vllm']}, PTPC-FP8, over {'itself without fusion' if base == 'apart' else base}"
        yield Engine(file, title, _gpus(result), result["variants"], base)


def _gpus(result: Mapping[str, Any]) -> str:
    ranks = result.get("ranks", 1)
    return f"{ranks} x {gpu_of(result)}" if ranks > 1 else gpu_of(result)


def engines() -> str:
    """Of whole engines, the time in bf16 over that by our methods and by the engine's own."""
    rows = []
    for file, title, gpu, methods, base in measured_engines():
        said = [totals(methods, base, names) for names in (OURS, THEIRS)]
        if any(said):
            rows.append([f"[{title}](benchmarks/results/{file}.json)", gpu, *said])
    return table(["engine, shape", "GPU", "ours", "the engine's own"], rows)


def totals(methods: Methods, base: str, names: Mapping[str, str]) -> str:
    """Of the methods that have names, the base's time over theirs, by prompts."""
    said = []
    for method, name in names.items():
        times = [total_ratio(methods, base, method, prompts) for prompts in PROMPTS]
        if all(times):
            said.append(f"{name} {' and '.join(times)}")
    return "; ".join(said)


def accuracy() -> str:
    """What the demo model loses by each quantization."""
    methods = load("demo_cpu.json")["methods"]
    return table(list(methods), [[f"{found['loss_percent']:+.2f}%" for found in methods.values()]])


def draw() -> None:
    """results/overview.png: how many times as fast as what a panel names."""
    figure = plt.figure(figsize=(15, 9.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    _bars(above.subplots(1, 2, sharex=True, sharey=True))
    panels = (
        ("NVFP4: layers of Llama-3-70B, mean, over bf16", "rows of x", _layers("nvfp4_gemm", NVFP4_LAYERS)),
        ("PTPC-FP8: layers of Llama-3-70B, mean, over bf16", "rows of x", _layers("ptpc_gemm", PTPC_LAYERS)),
        ("experts of three models, mean, over vLLM's fastest", "tokens", _experts()),
        ("all-reduce, over NCCL", "message", _all_reduce()),
    )
    for axis, (title, sizes, drawn) in zip(below.subplots(1, 4), panels, strict=True):
        found = lines.curves(axis, drawn, _colours(drawn), size if sizes == "message" else "{:g}".format)
        axis.set_ylim(top=1.25 * axis.get_ylim()[1])  # room for the legend
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(sizes, fontsize=8)
        axis.legend(found.values(), found, fontsize=7)
    lines.save(figure, PICTURE)


def _colours(names: Iterable[str]) -> dict[str, str]:
    """Ours in colours, what others have in greys."""
    theirs = tuple(name for name in names if name.startswith(("Marlin", "torch", "symmetric", *THEIRS.values())))
    ours = [name for name in dict.fromkeys(names) if name not in theirs]
    greys = {name: str(0.45 + 0.3 * place / max(len(theirs) - 1, 1)) for place, name in enumerate(theirs)}
    return {name: f"C{place}" for place, name in enumerate(ours)} | greys


def _bars(axes: Sequence[Any]) -> None:
    """Whole engines over bf16: a panel a number of prompts, a bar a method."""
    names = OURS | THEIRS
    shown = [engine for file in PICTURED for engine in measured_engines() if engine.file == file]
    colours = _colours(list(names.values()))
    legend: dict[str, Any] = {}
    for axis, prompts in zip(axes, PROMPTS, strict=True):
        top, middles, labels = 0.0, [], []
        for _, title, gpu, methods, base in shown:
            first = top
            for method in names:
                if ratio := total_ratio(methods, base, method, prompts):
                    bar = axis.barh(top, float(ratio), color=colours[names[method]])
                    axis.bar_label(bar, [ratio], fontsize=7, padding=2)
                    legend[names[method].strip("`")] = bar
                    top += 1
            middles.append((first + top - 1) / 2)
            labels.append(f"{title.replace(' later', '').replace(', ', chr(10), 1)}, {gpu}")
            top += 0.8
        axis.axvline(1.0, color="grey", linewidth=0.8)
        axis.set_yticks(middles, labels, fontsize=8)
        axis.set_title(f"a whole engine with {prompts}, over bf16", fontsize=9)
    axes[0].invert_yaxis()
    axes[1].legend(legend.values(), legend, fontsize=7, loc="lower right")


def _layers(benchmark: str, names: Mapping[str, str]) -> dict[str, lines.Points]:
    """The mean speed-up over bf16 of Llama-3-70B's layers by rows of x, on each GPU."""
    found: dict[str, lines.Points] = {}
    for _, result in on_each_gpu(benchmark):
        rows = [row for row in result["rows"] if row["layer"] in harness.LAYERS]
        for m in dict.fromkeys(row["m"] for row in rows):
            means = harness.mean_ratios([row for row in rows if row["m"] == m], "bf16")
            for who in names.keys() & means.keys():
                found.setdefault(f"{names[who]}, {gpu_of(result)}", []).append((m, means[who]))
    return dict(sorted(found.items()))


def _experts() -> dict[str, lines.Points]:
    """The mean speed-up over vLLM's own of three models' experts under a fair router by tokens, on each GPU."""
    found: dict[str, lines.Points] = {}
    for operator, title, peers in (
        ("nvfp4_moe", "NVFP4", NVFP4_EXPERTS),
        ("ptpc_moe", "PTPC-FP8", PTPC_EXPERTS),
    ):
        for _, result in on_each_gpu(operator):
            fair = [row for row in result["rows"] if row["router"] == "fair"]
            for tokens in dict.fromkeys(row["tokens"] for row in fair):
                times = [row["us"] for row in fair if row["tokens"] == tokens]
                ratios = [min(us[peer] for peer in peers if peer in us) / us[operator] for us in times]
                found.setdefault(f"{title}, {gpu_of(result)}", []).append((tokens, sum(ratios) / len(ratios)))
    return found


def _all_reduce() -> dict[str, lines.Points]:
    """The speed-up over NCCL of FP4, and of the fastest peer, by bytes of the message."""
    found: dict[str, lines.Points] = {}
    for _, result in results("quick_reduce_sm_90_tp*"):
        on = f"{result['world']} x {gpu_of(result)}"
        for row in result["rows"]:
            us = row["us"]
            others = min(us[peer] for peer in PEERS if peer in us)
            for who, time in (("FP4", fastest(us, "FP4")), ("symmetric memory or NCCL", others)):
                if time:
                    found.setdefault(f"{who}, {on}", []).append((row["bytes"], us["NCCL"] / time))
    return found
