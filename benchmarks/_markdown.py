# SPDX-License-Identifier: Apache-2.0
"""What the report's sections share: reading results/*.json and writing tables."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_quant_rocm import provenance

RESULTS = Path(__file__).parent / "results"
# Of which README and docs speak; a file of an engine may have 1 as well.
PROMPTS = ("10 prompts", "64 prompts")


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def results(pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of the files there are."""
    for file in sorted(RESULTS.glob(f"{pattern}.json")):
        yield file.stem, load(file.name)


def on_each_gpu(benchmark: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`results` of an H100 and of an H200."""
    yield from results(f"{benchmark}_sm_90")
    yield from results(f"{benchmark}_h200_sm_90")


def measured_on(result: dict[str, Any]) -> str:
    environment = result["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton") if name in environment)
    return f"{environment['device']}, {versions}, commit {environment['commit']}, {environment['date']}"


def gpu_model(device: str) -> str:
    """Of one GPU or several, in short: "H100" of "2 x NVIDIA H100 80GB HBM3"."""
    name = provenance.without_count(device)
    return re.sub(r"^(NVIDIA|AMD Instinct) ", "", name).split(" ")[0]


def gpu_of(result: Mapping[str, Any]) -> str:
    """In short, the GPU of a result."""
    return gpu_model(result["environment"]["device"])


def named_gpu(name: str, result: dict[str, Any]) -> str:
    """Behind a section's title, the GPU of a file that is named by it, as `_harness.gpu` does."""
    gpu = gpu_model(result["environment"]["device"])
    return f", {gpu}" if f"_{gpu.lower()}_" in name else ""


def gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def rates(result: dict[str, Any]) -> str:
    """What limits were derived from, as far as the file has it."""
    known = {"copy_gb_s": "copy {} GB/s", "bf16_tflop_s": "bf16 {} TFLOP/s", "fp8_tflop_s": "fp8 {} TFLOP/s"}
    found = [text.format(result[key]) for key, text in known.items() if key in result]
    return f"; {' and '.join(found)} in the same run" if found else ""


def measured(rows: list[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Those of `names` that were measured, or failed, in any row."""
    found = {name for row in rows for name in (*row["us"], *row.get("failed", ()))}
    return [name for name in names if name in found]


def cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Microseconds of `names`, and the limit."""
    failed = row.get("failed", {})
    return [f"{row['us'][name]:.1f}" if name in row["us"] else "failed" if name in failed else "" for name in names] + [
        f"{row['limit_us']:.1f}"
    ]


def ratios(row: dict[str, Any], others: Sequence[str], ours: str) -> list[str]:
    """The others' times over ours, nothing where one of the two has none."""
    us = row["us"]
    return [f"{us[other] / us[ours]:.2f}" if other in us and ours in us else "" for other in others]


def failures(rows: list[dict[str, Any]]) -> str:
    reasons = dict.fromkeys(f"{who}: {why}" for row in rows for who, why in row.get("failed", {}).items())
    return "".join(f"\n\nFailed: {reason}" for reason in reasons)


def total_ratio(methods: Mapping[str, Mapping[str, Any]], base: str, method: str, prompts: str) -> str:
    """The base's time over a method's, and nothing where one of them was not measured."""
    times = [methods.get(name, {}).get(prompts, {}).get("total_s") for name in (base, method)]
    return f"{times[0] / times[1]:.2f}" if all(times) else ""


def gpu_ms(found: dict[str, Any], prompts: str) -> str:
    """Of a step of an engine, the GPU's milliseconds; nothing where they were not taken."""
    graph = found.get("steps", {}).get(prompts, {}).get("graph_us")
    return f"{graph / 1e3:.3f}" if graph else ""


def said_alone(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """How many prompts have the same bits alone as in a batch, as a paragraph; nothing where nobody was asked."""
    counts = {name: found["alone"] for name, found in methods.items() if "alone" in found}
    said = ", ".join(f"`{name}` {count['same']} of {count['prompts']}" for name, count in counts.items())
    return f"\n\nPrompts with the same tokens and log probabilities alone as among others: {said}." if said else ""


def nvfp4_engine_title(name: str) -> str:
    """What an engine of NVFP4 was measured on, of the name of its file, without the GPU: "qwen3-30b-a3b 2 ranks"."""
    return name.removeprefix("nvfp4_engine_").removesuffix("_sm_90").removesuffix("_h200").replace("_", " ")


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
