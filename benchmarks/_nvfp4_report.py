# SPDX-License-Identifier: Apache-2.0
"""The report's sections on NVFP4: GEMM, a whole vLLM."""

from typing import Any

from benchmarks import _harness as harness
from benchmarks import _lines as lines
from benchmarks._markdown import (
    cells,
    failures,
    gpu_ms,
    measured,
    measured_on,
    nvfp4_engine_title,
    rates,
    ratios,
    said_alone,
    table,
)

PEERS = ("bf16", "marlin", "humming")
EVERYONE = (*PEERS, "nvfp4_gemm", "nvfp4_gemm_fp8")


def gemm(name: str, result: dict[str, Any]) -> str:
    rows = result["rows"]
    plot(result, name)
    names = measured(rows, EVERYONE)
    peers = measured(rows, PEERS)
    untuned = "untuned" in name
    of = rows if untuned else [row for row in rows if row["layer"] in harness.LAYERS]
    means = []
    for m in dict.fromkeys(row["m"] for row in of):
        here = [row for row in of if row["m"] == m]
        found = harness.mean_ratios([_with_limit(row) for row in here], "bf16")
        means.append([str(m), *(f"{found[name]:.2f}" if name in found else "" for name in [*names, "limit"])])
    header = ["layer", "N", "K", "M", *names, "limit", *(f"{peer} / nvfp4_gemm" for peer in peers)]
    header.append("bf16 / nvfp4_gemm_fp8")
    body = [
        [row["layer"], str(row["n"]), str(row["k"]), str(row["m"]), *cells(row, names)]
        + [*ratios(row, peers, "nvfp4_gemm"), *ratios(row, ["bf16"], "nvfp4_gemm_fp8")]
        for row in rows
    ]
    means_table = table(["M", *names, "limit"], means)
    title = f"NVFP4 GEMM{', layers that nothing was tuned for' if untuned else ''}"
    averaged = "all" if untuned else "Llama-3-70B's"
    return (
        f"## {title}\n\n{measured_on(result)}{rates(result)}\n\n![speed-up over bf16]({name}.png)\n\n"
        "`limit` is the larger of the least memory traffic at that bandwidth and of the operations at that rate, "
        "which FP8 exceeds. `nvfp4_gemm_fp8` is "
        f"`prefill='fp8'`, which computes calls of few rows as `nvfp4_gemm` does. {_peers(names)}\n\nMean speed-up "
        f"over bf16 of {averaged} layers:\n\n{means_table}\n\nMicroseconds "
        f"of all layers:\n\n"
        f"{table(header, body)}{failures(rows)}"
    )


def plot(result: dict[str, Any], name: str) -> None:
    """Speed-up over cuBLAS bf16 against M, a panel a layer, with the limit."""
    layers = list(dict.fromkeys(row["layer"] for row in result["rows"]))
    figure, axes = lines.grid(len(layers), 4, (4, 3.2))
    for axis, layer in zip(axes, layers, strict=True):
        rows = [_with_limit(row) for row in result["rows"] if row["layer"] == layer]
        for who in [name for name in [*measured(rows, EVERYONE), "limit"] if name != "bf16"]:
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
    axes[0].legend(fontsize=7)
    figure.supxlabel("M (tokens)")
    figure.supylabel("speed-up over cuBLAS bf16")
    figure.suptitle(f"NVFP4 GEMM\n{measured_on(result)}", fontsize=10)
    lines.save(figure, name)


def engine(name: str, result: dict[str, Any]) -> str:
    methods = result["methods"]
    rows, failed = [], []
    for method, found in methods.items():
        if "failed" in found:
            failed.append(f"{method}: {found['failed']}")
            continue
        for prompts in (key for key in found if "prompt" in key):
            times = found[prompts]
            base = methods.get("bf16", {}).get(prompts)
            faster = f"{base['total_s'] / times['total_s']:.2f}" if base else ""
            prefill, step, total = (str(times[key]) for key in ("prefill_s", "ms_a_step", "total_s"))
            commit = found.get("commit", result["environment"]["commit"])
            rows.append([method, prompts, prefill, step, gpu_ms(found, prompts), total, faster, commit])
    counts = dict.fromkeys(key for found in methods.values() for key in found if "prompt" in key)
    panels = {
        f"{count}: total, s": {method: found[count]["total_s"] for method, found in methods.items() if count in found}
        for count in counts
    }
    layers = result["shape"]["num_hidden_layers"]
    title = f"NVFP4 in vLLM {result['vllm']}: {nvfp4_engine_title(name)}, {layers} layers"
    lines.bars(name, f"{title}\n{measured_on(result)}", panels)
    return (
        f"## {title}\n\n"
        f"{measured_on(result)}\n\n"
        "Random weights, CUDA graphs, 1024 tokens in and 256 out. `marlin` is vLLM's own way, `ours` this project's "
        "with no flag, `ours_prefill_fp8` with LLM_QUANT_ROCM_NVFP4_PREFILL=fp8. `ptpc_fp8`, this project's, and "
        "`fp8_per_channel`, vLLM's, quantize weights in bf16; `ours_fp4_sums` is `ours` with all-reduces in FP4.\n\n"
        f"![total time]({name}.png)\n\n"
        + table(
            ["method", "batch", "prefill, s", "ms a step", "of it the GPU", "total, s", "bf16 / total", "commit"], rows
        )
        + said_alone(methods)
        + "".join(f"\n\nFailed: {why}" for why in failed)
    )


def _peers(names: list[str]) -> str:
    """Who they are."""
    known = {"marlin": "vLLM 0.26's kernel", "humming": "the package humming-kernels"}
    found = [f"`{name}` is {what}." for name, what in known.items() if name in names]
    return " ".join(found)


def _with_limit(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "us": {**row["us"], "limit": row["limit_us"]}}
