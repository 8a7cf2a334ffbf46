# SPDX-License-Identifier: Apache-2.0
"""The report's sections on routed experts, in FP8 and in NVFP4."""

from typing import Any

from benchmarks import _lines as lines
from benchmarks._markdown import cells, failures, measured, measured_on, rates, ratios, table


def fp8(name: str, result: dict[str, Any]) -> str:
    return _section(
        name,
        result,
        _title("FP8", name),
        ["bf16", "bf16_grouped", "vllm_fp8", "vllm_cutlass", "ptpc_moe"],
        "`bf16` and `vllm_fp8` are vLLM's Triton experts and `vllm_cutlass` its CUTLASS experts in FP8, which serve "
        "FP8 with one scale a token and one a channel on Hopper. `bf16_grouped` is torch's grouped product in bf16 "
        "with its groups already sorted.",
    )


def nvfp4(name: str, result: dict[str, Any]) -> str:
    return _section(
        name,
        result,
        _title("NVFP4", name),
        ["bf16", "marlin", "nvfp4_moe"],
        "`bf16` is vLLM's Triton experts and `marlin` its fused Marlin experts, which serve NVFP4 on Hopper.",
    )


def _title(form: str, name: str) -> str:
    return f"Routed experts in {form}" + (", models that nothing was tuned for" if "untuned" in name else "")


def _section(name: str, result: dict[str, Any], title: str, everyone: list[str], who: str) -> str:
    """Plot and table of `everyone`, ours last; speed-ups are over the first who was timed."""
    rows = result["rows"]
    names = measured(rows, everyone)
    base = next(name for name in names if any(name in row["us"] for row in rows))
    lines.plot(
        name,
        f"{title}\n{measured_on(result)}",
        {
            f"{model}, {router} router": lines.speed_up(
                [row for row in rows if (row["model"], row["router"]) == (model, router)], "tokens", base
            )
            for model, router in dict.fromkeys((row["model"], row["router"]) for row in rows)
        },
        "tokens",
        f"speed-up over {base}",
    )
    *peers, ours = names
    header = ["model", "router", "tokens", "experts chosen", *names, "limit", *(f"{peer} / {ours}" for peer in peers)]
    body = [
        [row["model"], row["router"], str(row["tokens"]), f"{row['experts_chosen']:.0f}", *cells(row, names)]
        + ratios(row, peers, ours)
        for row in rows
    ]
    return (
        f"## {title}\n\n{measured_on(result)}{rates(result)}\n\n{who} A `skewed` router draws its experts by Zipf's "
        "law. `limit` is the larger of reading the chosen experts once at that bandwidth and of the operations at that "
        f"rate.\n\n![speed-up over {base}]({name}.png)\n\n{table(header, body)}{failures(rows)}"
    )
