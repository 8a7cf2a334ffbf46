# SPDX-License-Identifier: Apache-2.0
"""The report's section on the quantized all-reduce: latency and speed-up by size."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt

from benchmarks import _lines as lines
from benchmarks._markdown import measured_on, table

BASE = "NCCL"
PEERS = (BASE, "symm one-shot", "symm two-shot")
CODECS = ("FP4", "INT4", "INT8", "FP8", "FP")


def section(name: str, result: dict[str, Any]) -> str:
    plot(name, result)
    columns = (*PEERS, *CODECS, *(f"{codec} one-shot" for codec in CODECS))
    rows = []
    for row in result["rows"]:
        us = row["us"]
        cells = [f"{us[column]:.1f}" if column in us else "" for column in columns]
        best = min((t for codec in CODECS if (t := fastest(us, codec))), default=float("nan"))
        rows.append([size(row["bytes"]), *cells, f"{us[BASE] / best:.2f}"])
    header = ["message", *columns, f"{BASE} / fastest of ours"]
    return (
        f"## The quantized all-reduce between {result['world']} GPUs\n\n{measured_on(result)}\n\n"
        f"![latency and speed-up over {BASE}]({name}.png)\n\nbf16, the slowest rank; codecs are two-shot where nothing "
        f"else is said, and FP sends bf16 as it is.\n\n{table(header, rows)}"
    )


def plot(name: str, result: dict[str, Any]) -> None:
    """Latency and speed-up over NCCL against the size of the message; of each codec the faster of both shots."""
    figure, (latency, speed) = plt.subplots(1, 2, figsize=(13, 5.2))
    for who in (*PEERS, *CODECS):
        points = [(row["bytes"], t, row["us"][BASE]) for row in result["rows"] if (t := fastest(row["us"], who))]
        style: dict[str, Any] = (
            {"linestyle": "--", "linewidth": 1.2} if who in PEERS else {"linestyle": "-", "linewidth": 2}
        )
        sizes = [nbytes for nbytes, _, _ in points]
        latency.plot(sizes, [t for _, t, _ in points], marker=".", label=who, **style)
        speed.plot(sizes, [base / t for _, t, base in points], marker=".", label=who, **style)
    for axis, label in ((latency, "microseconds a call"), (speed, f"speed-up over {BASE}")):
        lines.by_size(axis, [row["bytes"] for row in result["rows"]], size)
        axis.set_xlabel("bytes of the message (bf16)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    latency.set_yscale("log")
    speed.set_ylim(bottom=0)
    latency.legend(fontsize=8)
    figure.suptitle(f"All-reduce between {result['world']} GPUs\n{measured_on(result)}", fontsize=10)
    figure.tight_layout()
    lines.save(figure, name)


def size(nbytes: int) -> str:
    """A size in the largest unit of which it is a multiple."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def fastest(us: Mapping[str, float], name: str) -> float | None:
    """The time of a peer, or of a codec by the faster of both shots; None if it was not measured."""
    return min((us[key] for key in (name, f"{name} one-shot") if us.get(key)), default=None)
