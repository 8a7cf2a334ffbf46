# SPDX-License-Identifier: Apache-2.0
"""The report's sections on PTPC FP8: GEMM, rows, and what stands around routed experts."""

from typing import Any

import matplotlib.pyplot as plt

from benchmarks import _lines as lines
from benchmarks._markdown import measured_on, table

GEMMS = (
    "per_tensor", "torch_rowwise", "vllm_cutlass", "naive", "triton", "ptpc_gemm", "torch_linear", "ptpc_linear",
)  # fmt: skip


def plot_gemm(name: str, title: str, result: dict[str, Any]) -> None:
    """Speed-up over cuBLAS bf16 against M, a panel a layer."""
    layers = dict.fromkeys((row["layer"], row["n"], row["k"]) for row in result["rows"])
    panels = {
        f"{layer}: N={n} K={k}": lines.speed_up([row for row in result["rows"] if row["layer"] == layer], "m", "bf16")
        for layer, n, k in layers
    }
    lines.plot(name, f"{title}\n{measured_on(result)}", panels, "M (tokens)", "speed-up over cuBLAS bf16")


def plot_rows(name: str, result: dict[str, Any]) -> None:
    """Time over the limit of memory traffic against M, a panel an operator."""
    operators = [operator for operator in result["rows"][0]["limit_us"] if operator != "copy"]
    figure, axes = plt.subplots(1, len(operators), figsize=(4 * len(operators), 4.2), sharey=True)
    for axis, operator in zip(axes, operators, strict=True):
        for k in dict.fromkeys(row["k"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["k"] == k and row["m"] >= 64]
            ms = [row["m"] for row in rows]
            axis.plot(ms, [row["us"][operator] for row in rows], marker=".", label=f"K={k}")
            axis.plot(ms, [row["limit_us"][operator] for row in rows], color="grey", linewidth=0.8, linestyle=":")
        lines.by_size(axis, ms)
        axis.set_yscale("log")
        axis.set_title(operator)
        axis.set_xlabel("M (tokens)")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds\n(dotted: memory traffic at copy bandwidth)")
    axes[0].legend(fontsize=8)
    figure.suptitle(
        f"Per-token FP8 quantization, alone and behind RMSNorm or an activation\n{measured_on(result)}", fontsize=10
    )
    figure.tight_layout()
    lines.save(figure, name)


def gemm_table(result: dict[str, Any]) -> str:
    names = [name for name in ("bf16", *GEMMS) if name in result["rows"][0]["us"]]
    rows = []
    for row in result["rows"]:
        us = row["us"]
        over = (
            ("torch_rowwise", "triton"),
            ("vllm_cutlass", "ptpc_gemm"),
            ("naive", "ptpc_gemm"),
            ("torch_linear", "ptpc_linear"),
            ("bf16", "ptpc_linear"),
        )
        ratios = {f"{theirs} / {ours}": us[theirs] / us[ours] for theirs, ours in over if theirs in us}
        rows.append(
            [
                row["layer"],
                str(row["m"]),
                *(f"{us[name]:.1f}" for name in names),
                *(f"{ratio:.2f}" for ratio in ratios.values()),
            ]
        )
    return table(["layer", "M", *names, *ratios], rows)


def row_table(result: dict[str, Any]) -> str:
    first = result["rows"][0]
    names, limits = list(first["us"]), [name for name in first["limit_us"] if name not in ("quant", "copy")]
    rows = [
        [str(row["k"]), str(row["m"])]
        + [f"{row['us'][name]:.1f}" for name in names]
        + [f"{row['limit_us'][name]:.1f}" for name in limits]
        for row in result["rows"]
    ]
    return table(["K", "M", *names, *(f"limit {name}" for name in limits)], rows)


def gemm(name: str, result: dict[str, Any]) -> str:
    title = "PTPC GEMM and linear layer" + (", layers that nothing was tuned for" if "untuned" in name else "")
    plot_gemm(name, title, result)
    return (
        f"## {title}\n\n{measured_on(result)}\n\n![speed-up over bf16]({name}.png)\n\n`triton` is "
        "our kernel, `ptpc_gemm` what the operator dispatches to, `ptpc_linear` the whole layer with the quantization "
        "of its activations, `torch_linear` such a layer with `torch_rowwise` as its product. `vllm_cutlass` is vLLM "
        f"0.26's kernel.\n\n{gemm_table(result)}"
    )


def rows(name: str, result: dict[str, Any]) -> str:
    plot_rows(name, result)
    return (
        f"## Quantization of rows\n\n{measured_on(result)}; copy bandwidth {result['copy_gb_s']} GB/s in the same run"
        f"\n\n![times and limits]({name}.png)\n\n"
        "A limit is the least traffic at that bandwidth, of a copy of 1 GiB. `copy` is one that moves as many bytes as "
        "`quant` and `norm_quant` do; `act_quant` is of rows of 2 K values. `vllm_` are vLLM "
        f"0.26's kernels, norm or activation and quantization apart.\n\n{row_table(result)}"
    )


def routing(name: str, result: dict[str, Any]) -> str:
    steps = list(dict.fromkeys(row["step"] for row in result["rows"]))
    panels = {
        f"{model}: {step}": lines.speed_up(
            [row for row in result["rows"] if (row["model"], row["step"]) == (model, step)], "tokens", "torch"
        )
        for model in dict.fromkeys(row["model"] for row in result["rows"])
        for step in steps
    }
    lines.plot(name, f"Around routed experts\n{measured_on(result)}", panels, "tokens", "speed-up over torch")
    tables = []
    for step in steps:
        here = [row for row in result["rows"] if row["step"] == step]
        names = list(dict.fromkeys(who for row in here for who in row["us"]))
        cells = [
            [row["model"], str(row["tokens"]), *(f"{row['us'][who]:.1f}" if who in row["us"] else "" for who in names)]
            for row in here
        ]
        tables.append(f"`{step}`:\n\n{table(['model', 'tokens', *names], cells)}")
    return f"## Around routed experts\n\n{measured_on(result)}\n\n![speed-up over torch]({name}.png)\n\n" + "\n\n".join(
        tables
    )
