# SPDX-License-Identifier: Apache-2.0
"""A file of measured configurations in the making, as tuning.py reads it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


class Record:
    """Shapes that were measured, written after each of them.

    Args:
        path: the file. What it holds is gone on with where it was measured on the same device with the same versions.
        measured_on: the device and versions, as provenance.environment says them.
    """

    def __init__(self, path: Path, measured_on: dict[str, str]) -> None:
        self.path = path
        self._measured_on = measured_on
        self.shapes: list[dict[str, Any]] = []
        if path.is_file():
            try:
                content = json.loads(path.read_text())
                if _without_date(content["measured_on"]) == _without_date(measured_on):
                    self.shapes = list(content["shapes"])
            except (KeyError, TypeError, ValueError):
                self.shapes = []  # a broken file is measured anew

    def holds(self, n: int, k: int, m: int) -> bool:
        """Whether a shape was measured."""
        return any((shape["n"], shape["k"], shape["m"]) == (n, k, m) for shape in self.shapes)

    def add(self, n: int, k: int, m: int, backend: str, config: Any) -> None:
        """Add a shape; the file is whole at every moment."""
        self.shapes.append({"n": n, "k": k, "m": m, "backend": backend, "config": asdict(config)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content(), indent=1) + "\n")
        part.replace(self.path)

    def content(self) -> dict[str, Any]:
        """What the file says."""
        return {"measured_on": self._measured_on, "shapes": self.shapes}


def _without_date(measured_on: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in measured_on.items() if name != "date"}
