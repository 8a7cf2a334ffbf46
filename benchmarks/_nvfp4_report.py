# SPDX-License-Identifier: Apache-2.0
"""The report's sections on NVFP4: GEMM, routed experts, a whole vLLM."""

from typing import Any

import matplotlib.pyplot as plt

from benchmarks import _harness as harness
from benchmarks import _lines as lines
from benchmarks._markdown import RESULTS, measured_on, table

PEERS = ("marlin", "humming")


def gemm(name: str, result: dict[str, Any]) -> str:
    rows = result["rows"]
    plot(result, name)
    names = _names(rows)
    llama = [row for row in rows if row["layer"] in harness.LAYERS]
    means = []
    for m in dict.fromkeys(row["m"] for row in llama):
        here = [row for row in llama if row["m"] == m]
        ratios = harness.mean_ratios([_with_limit(row) for row in here], "bf16")
        means.append([str(m), *(f"{ratios[name]:.2f}" if name in ratios else "" for name in [*names, "limit"])])
    header = ["layer", "N", "K", "M", *names, "limit", *_ratio_names(names, "nvfp4_gemm"), "bf16 / nvfp4_gemm_fp8"]
    body = [
        [row["layer"], str(row["n"]), str(row["k"]), str(row["m"]), *_cells(row, names)]
        + [*_ratios(row, names, "nvfp4_gemm"), _ratio(row, "bf16", "nvfp4_gemm_fp8")]
        for row in rows
    ]
    means_table = table(["M", *names, "limit"], means)
    return (
        f"## NVFP4 GEMM\n\n{measured_on(result)}; copy {result['copy_gb_s']} GB/s and bf16 "
        f"{result['bf16_tflop_s']} TFLOP/s in the same run\n\n![speed-up over bf16]({name}.png)\n\n"
        "`limit` is the larger of the least memory traffic at that bandwidth and of the operations at that rate, "
        "which FP8 exceeds. `nvfp4_gemm_fp8` is "
        f"`prefill='fp8'`, which computes calls of few rows as `nvfp4_gemm` does. {_peers(names)}\n\nMean speed-up "
        f"over bf16 of Llama-3-70B's layers:\n\n{means_table}\n\nMicroseconds of all layers:\n\n"
        f"{table(header, body)}{_failures(rows)}"
    )


def plot(result: dict[str, Any], name: str) -> None:
    """Speed-up over cuBLAS bf16 against M, a panel a layer, with the limit."""
    layers = list(dict.fromkeys(row["layer"] for row in result["rows"]))
    columns = min(4, len(layers))
    count = -(-len(layers) // columns)
    figure, axes = plt.subplots(count, columns, figsize=(4 * columns, 3.2 * count), squeeze=False, layout="constrained")
    for axis, layer in zip(axes.flat, layers, strict=False):
        rows = [_with_limit(row) for row in result["rows"] if row["layer"] == layer]
        for who in [name for name in [*_names(rows), "limit"] if name != "bf16"]:
            points = [(row["m"], row["us"]["bf16"] / row["us"][who]) for row in rows if {who, "bf16"} <= set(row["us"])]
            style: dict[str, Any] = {"linewidth": 1.2, "linestyle": "--", "marker": "."}
            if who == "limit":
                style = {"linewidth": 1.0, "linestyle": ":", "color": "black"}
            elif who.startswith("nvfp4"):
                style = {"linewidth": 2.2, "marker": "."}
            axis.plot([m for m, _ in points], [ratio for _, ratio in points], label=who, **style)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        lines.by_size(axis, [row["m"] for row in rows])
        axis.set_ylim(bottom=0)
        axis.set_title(f"{layer}: N={rows[0]['n']} K={rows[0]['k']}", fontsize=9)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    for axis in axes.flat[len(layers) :]:
        axis.set_visible(False)
    figure.supxlabel("M (tokens)")
    figure.supylabel("speed-up over cuBLAS bf16")
    figure.suptitle(f"NVFP4 GEMM\n{measured_on(result)}", fontsize=10)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


def experts(name: str, result: dict[str, Any]) -> str:
    rows = result["rows"]
    lines.plot(
        name,
        f"Routed experts in NVFP4\n{measured_on(result)}",
        {
            f"{model}, {router} router": lines.speed_up(
                [row for row in rows if (row["model"], row["router"]) == (model, router)], "tokens", "bf16"
            )
            for model, router in dict.fromkeys((row["model"], row["router"]) for row in rows)
        },
        "tokens",
        "speed-up over bf16",
    )
    names = _names(rows)
    header = ["model", "router", "tokens", "experts chosen", *names, "limit", *_ratio_names(names, "nvfp4_moe")]
    body = [
        [row["model"], row["router"], str(row["tokens"]), f"{row['experts_chosen']:.0f}", *_cells(row, names)]
        + _ratios(row, names, "nvfp4_moe")
        for row in rows
    ]
    return (
        f"## Routed experts in NVFP4\n\n{measured_on(result)}\n\n`bf16` is vLLM's Triton experts and `marlin` its "
        "fused Marlin experts, which serve NVFP4 on Hopper. A `skewed` router draws its experts by Zipf's law.\n\n"
        f"![speed-up over bf16]({name}.png)\n\n"
        f"{table(header, body)}{_failures(rows)}"
    )


def engine(name: str, result: dict[str, Any]) -> str:
    methods = result["methods"]
    rows, failed = [], []
    for method, found in methods.items():
        if "failed" in found:
            failed.append(f"{method}: {found['failed']}")
            continue
        for prompts in (key for key in found if key.endswith("prompts")):
            times = found[prompts]
            base = methods.get("bf16", {}).get(prompts)
            faster = f"{base['total_s'] / times['total_s']:.2f}" if base else ""
            numbers = (str(times[key]) for key in ("prefill_s", "ms_a_step", "total_s"))
            rows.append([method, prompts, *numbers, faster, found.get("commit", result["environment"]["commit"])])
    counts = dict.fromkeys(key for found in methods.values() for key in found if key.endswith("prompts"))
    panels = {
        f"{count}: total, s": {method: found[count]["total_s"] for method, found in methods.items() if count in found}
        for count in counts
    }
    lines.bars(name, f"NVFP4 in vLLM {result['vllm']}\n{measured_on(result)}", panels)
    shape = result["shape"]
    title = name.removeprefix("nvfp4_engine_").partition("_")[0]
    return (
        f"## NVFP4 in vLLM {result['vllm']}: {title}, {shape['num_hidden_layers']} layers\n\n{measured_on(result)}\n\n"
        "Random weights, CUDA graphs, 1024 tokens in and 256 out. `marlin` is vLLM's own way, `ours` this project's "
        "with no flag, `ours_prefill_fp8` with LLM_QUANT_ROCM_NVFP4_PREFILL=fp8.\n\n"
        f"![total time]({name}.png)\n\n"
        + table(["method", "batch", "prefill, s", "ms a step", "total, s", "bf16 / total", "commit"], rows)
        + "".join(f"\n\nFailed: {why}" for why in failed)
    )


def _peers(names: list[str]) -> str:
    """Who they are."""
    known = {"marlin": "vLLM 0.26's kernel", "humming": "the package humming-kernels"}
    found = [f"`{name}` is {what}." for name, what in known.items() if name in names]
    return " ".join(found)


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """Everyone who was measured in any row, bf16 and the peers first."""
    found = {name for row in rows for name in (*row["us"], *row.get("failed", ()))}
    return [name for name in ("bf16", *PEERS, "nvfp4_gemm", "nvfp4_gemm_fp8", "nvfp4_moe") if name in found]


def _with_limit(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "us": {**row["us"], "limit": row["limit_us"]}}


def _cells(row: dict[str, Any], names: list[str]) -> list[str]:
    failed = row.get("failed", {})
    return [f"{row['us'][name]:.1f}" if name in row["us"] else "failed" if name in failed else "" for name in names] + [
        f"{row['limit_us']:.1f}"
    ]


def _ratio_names(names: list[str], ours: str) -> list[str]:
    return [f"{name} / {ours}" for name in ("bf16", *PEERS) if name in names]


def _ratios(row: dict[str, Any], names: list[str], ours: str) -> list[str]:
    return [_ratio(row, name, ours) for name in ("bf16", *PEERS) if name in names]


def _ratio(row: dict[str, Any], other: str, ours: str) -> str:
    us = row["us"]
    return f"{us[other] / us[ours]:.2f}" if other in us and ours in us else ""


def _failures(rows: list[dict[str, Any]]) -> str:
    reasons = dict.fromkeys(f"{who}: {why}" for row in rows for who, why in row.get("failed", {}).items())
    return "".join(f"\n\nFailed: {reason}" for reason in reasons)
