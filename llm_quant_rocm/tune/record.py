# SPDX-License-Identifier: Apache-2.0
"""A file of measured configurations in the making, as tuning.py reads it."""

import json
from collections.abc import Mapping
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
                if same_but_date(content["measured_on"], measured_on):
                    self.shapes = [dict(shape) for shape in content["shapes"]]
            except (KeyError, TypeError, ValueError, RecursionError):
                self.shapes = []  # a broken file is measured anew

    def holds(self, key: Mapping[str, int]) -> bool:
        """Whether a shape was measured; `Tuner.key` names it."""
        return any(key.items() <= shape.items() for shape in self.shapes)

    def add(self, key: Mapping[str, int], backend: str, config: Any) -> None:
        """Add a shape; the file is whole at every moment."""
        self.shapes.append({**key, "backend": backend, "config": asdict(config)})
        write_whole(self.path, self.content())

    def content(self) -> dict[str, Any]:
        """What the file says."""
        return {"measured_on": self._measured_on, "shapes": self.shapes}


def same_but_date(measured_on: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Whether two measurements are of the same device and versions."""
    return {**measured_on, "date": ""} == {**here, "date": ""}


def write_whole(file: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON; the file is whole at every moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.tmp")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)
