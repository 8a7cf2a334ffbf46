# SPDX-License-Identifier: Apache-2.0
"""Draws results/*.json: a PNG a file, and results/README.md with every figure, losses included.

python benchmarks/report.py
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _fusion_report, _nvfp4_report
from benchmarks._markdown import RESULTS, load, measured_on, table

GEMMS = ("per_tensor", "torch_rowwise", "vllm_cutlass", "naive", "triton", "ptpc_gemm", "ptpc_linear")
OURS = ("triton", "ptpc_gemm", "ptpc_linear")


def plot_gemm(result: dict[str, Any]) -> None:
    """Speed-up over cuBLAS bf16 against M, a panel a layer."""
    layers = list(dict.fromkeys(row["layer"] for row in result["rows"]))
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), sharex=True, sharey=True)
    for axis, layer in zip(axes.flat, layers, strict=True):
        rows = [row for row in result["rows"] if row["layer"] == layer]
        for name in GEMMS:
            if name in rows[0]["us"]:
                ratios = [row["us"]["bf16"] / row["us"][name] for row in rows]
                style = {"linewidth": 2.2} if name in OURS else {"linewidth": 1.2, "linestyle": "--"}
                axis.plot([row["m"] for row in rows], ratios, marker=".", label=name, **style)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{layer}: N={rows[0]['n']} K={rows[0]['k']}")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("M (tokens)")
    for axis in axes[:, 0]:
        axis.set_ylabel("speed-up over cuBLAS bf16")
    figure.suptitle(f"PTPC GEMM, Llama-3-70B layers\n{measured_on(result)}", fontsize=10)
    figure.tight_layout()
    figure.savefig(RESULTS / "ptpc_gemm_sm_90.png", dpi=110)


def plot_rows(result: dict[str, Any]) -> None:
    """Time over the limit of memory traffic against M, a panel an operator."""
    operators = ("quant", "norm_quant", "add_norm_quant")
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), sharey=True)
    for axis, operator in zip(axes, operators, strict=True):
        for k in dict.fromkeys(row["k"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["k"] == k and row["m"] >= 64]
            ms = [row["m"] for row in rows]
            axis.plot(ms, [row["us"][operator] for row in rows], marker=".", label=f"K={k}")
            axis.plot(ms, [row["limit_us"][operator] for row in rows], color="grey", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(operator)
        axis.set_xlabel("M (tokens)")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds (dotted: memory traffic at copy bandwidth)")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"Per-token FP8 quantization, alone and with RMSNorm\n{measured_on(result)}", fontsize=10)
    figure.tight_layout()
    figure.savefig(RESULTS / "row_quant_sm_90.png", dpi=110)


def gemm_table(result: dict[str, Any]) -> str:
    names = [name for name in ("bf16", *GEMMS) if name in result["rows"][0]["us"]]
    rows = []
    for row in result["rows"]:
        us = row["us"]
        ratios = [us["torch_rowwise"] / us["triton"], us["naive"] / us["ptpc_gemm"], us["bf16"] / us["ptpc_linear"]]
        rows.append(
            [row["layer"], str(row["m"]), *(f"{us[name]:.1f}" for name in names), *(f"{ratio:.2f}" for ratio in ratios)]
        )
    derived = ["torch_rowwise / triton", "naive / ptpc_gemm", "bf16 / ptpc_linear"]
    return table(["layer", "M", *names, *derived], rows)


def row_table(result: dict[str, Any]) -> str:
    names = list(result["rows"][0]["us"])
    rows = [
        [str(row["k"]), str(row["m"])]
        + [f"{row['us'][name]:.1f}" for name in names]
        + [f"{row['limit_us']['norm_quant']:.1f}", f"{row['limit_us']['add_norm_quant']:.1f}"]
        for row in result["rows"]
    ]
    return table(["K", "M", *names, "limit norm_quant", "limit add_norm_quant"], rows)


def moe_table(result: dict[str, Any]) -> str:
    rows = [
        [row["model"], str(row["tokens"]), f"{us['ptpc_moe']:.1f}", f"{us['bf16_grouped']:.1f}"]
        + [f"{us['bf16_grouped'] / us['ptpc_moe']:.2f}"]
        for row in result["rows"]
        for us in [row["us"]]
    ]
    return table(["model", "tokens", "ptpc_moe", "bf16_grouped", "bf16_grouped / ptpc_moe"], rows)


def accuracy_table(result: dict[str, Any]) -> str:
    base = result["demo_model"]["none"]["perplexity"]
    rows = [
        [method, f"{found['perplexity']:.3f}", f"{100 * (found['perplexity'] / base - 1):+.2f}%"]
        + [f"{100 * found['agreement']:.1f}%"]
        for method, found in result["demo_model"].items()
    ]
    return table(["quantization", "token perplexity", "change", "most likely token as in bf16"], rows)


def engine_table(result: dict[str, Any]) -> str:
    rows = [
        [method, prompts, *(str(times[name]) for name in ("prefill_s", "ms_a_step", "total_s"))]
        for method, by_prompts in result["llama_3_70b_8_layers"].items()
        for prompts, times in by_prompts.items()
    ]
    return table(["quantization", "batch", "prefill, s", "ms a step", "total, s"], rows)


def main() -> None:
    gemm, rows = load("ptpc_gemm_sm_90.json"), load("row_quant_sm_90.json")
    moe, engine = load("ptpc_moe_sm_90.json"), load("vllm_engine_sm_90.json")
    plot_gemm(gemm)
    plot_rows(rows)
    (RESULTS / "README.md").write_text(
        "# Results\n\nMade by `python benchmarks/report.py` from the JSON files beside it. Microseconds a call, "
        "medians of CUDA-graph replays with weights rotated out of L2. Nothing here was measured on an AMD GPU.\n\n"
        f"## PTPC GEMM and linear layer\n\n{measured_on(gemm)}\n\n![speed-up over bf16](ptpc_gemm_sm_90.png)\n\n"
        "`triton` is our kernel, `ptpc_gemm` what the operator dispatches to, `ptpc_linear` the whole layer with the "
        "quantization of its activations. `vllm_cutlass` is vLLM 0.26's kernel.\n\n"
        f"{gemm_table(gemm)}\n\n"
        f"## Quantization of rows\n\n{measured_on(rows)}; copy bandwidth {rows['copy_gb_s']} GB/s in the same run\n\n"
        f"![times and limits](row_quant_sm_90.png)\n\n{row_table(rows)}\n\n"
        f"## Routed experts\n\n{measured_on(moe)}\n\n`bf16_grouped` is torch's grouped product in bf16 with its "
        f"groups already sorted.\n\n{moe_table(moe)}\n\n"
        f"## A whole vLLM {engine['vllm']}\n\n{measured_on(engine)}\n\nThe demo model over its held-out text, in "
        f"windows of 200 tokens:\n\n{accuracy_table(engine)}\n\nThe shape of Llama-3-70B cut to eight layers, dummy "
        "weights, CUDA graphs, 1024 tokens in and 129 out:\n\n"
        f"{engine_table(engine)}\n{_fusion_report.sections()}{_nvfp4_report.sections()}"
    )


if __name__ == "__main__":
    main()
