# SPDX-License-Identifier: Apache-2.0
"""What the report's sections share: reading results/*.json and writing tables."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def measured_on(result: dict[str, Any]) -> str:
    environment = result["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton") if name in environment)
    return f"{environment['device']}, {versions}, commit {environment['commit']}, {environment['date']}"


def gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
