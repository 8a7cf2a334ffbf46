# SPDX-License-Identifier: Apache-2.0
"""Files of measurements in the making: of configurations, as tuning.py reads them, and of the all-reduce's times."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm_quant_rocm import provenance, tuning

# Between the values of a `measured_on` that says several, as in the files that ship.
_AND = "; "


class Measurements:
    """Measurements, {"measured_on": {...}, NAME: [...]} in a JSON file, written after each of them. The numbers in one,
    its sizes, tell it from the others.

    Args:
        path: the file. What it holds is gone on with where it was measured on the same GPU and serves here: under the
            versions that `tuning.others` wants. Whatever else changed meanwhile is said by `measured_on`.
        here: the device and versions, as provenance.environment says them.
        name: of the list in the file.

    Attributes:
        entries: what is known.
        measured_on: where: of every value all that there were.
        others: on what the file was measured, where that is why it is measured anew; else empty.
    """

    def __init__(self, path: Path, here: Mapping[str, str], name: str) -> None:
        self.path = path
        self._here = here
        self._name = name
        self.entries: list[dict[str, Any]] = []
        self.measured_on: dict[str, str] = dict(here)
        self.others: list[str] = []
        if path.is_file():
            try:
                content = json.loads(path.read_text())
                measured_on = {key: str(value) for key, value in content["measured_on"].items()}
                entries = [dict(entry) for entry in content[name]]
                self.others = _others(measured_on, here)
                if entries and not self.others:
                    self.entries, self.measured_on = entries, measured_on
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
                pass  # a broken file is measured anew

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether these were measured."""
        return any(sizes.items() <= entry.items() for entry in self.entries)

    def put(self, entry: Mapping[str, Any]) -> None:
        """Add a measurement that was made here; the file is whole at every moment."""
        self.measured_on = _joined(self.measured_on, self._here)
        self.entries.append(dict(entry))
        write_whole(self.path, self.content())

    def content(self) -> dict[str, Any]:
        """What the file says."""
        return {"measured_on": self.measured_on, self._name: self.entries}


class Record(Measurements):
    """Shapes that were measured; see `Measurements`. `Tuner.key` names the sizes of one."""

    def __init__(self, path: Path, here: Mapping[str, str]) -> None:
        super().__init__(path, here, "shapes")

    def add(self, key: Mapping[str, int], backend: str, config: Any) -> None:
        """Add a shape; the file is whole at every moment."""
        self.put({**key, "backend": backend, "config": asdict(config)})


def _others(measured_on: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What keeps measurements from being gone on with here: other versions, or another GPU."""
    theirs, ours = _gpus(measured_on), _gpus(here)
    return [*tuning.others(measured_on, here), *(sorted(theirs - ours) if theirs != ours else [])]


def _gpus(measured_on: Mapping[str, str]) -> set[str]:
    """Their names, without how many there are, which is another number wherever some are hidden."""
    return {provenance.without_count(device) for device in measured_on.get("device", "").split(_AND)}


def _joined(measured_on: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Of every value both, unless they are the same; "none" where one has none."""
    names = dict.fromkeys([*measured_on, *here])
    both = {name: [*measured_on.get(name, "none").split(_AND), here.get(name, "none")] for name in names}
    return {name: _AND.join(dict.fromkeys(values)) for name, values in both.items()}


def write_whole(file: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON; the file is whole at every moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.tmp")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)
