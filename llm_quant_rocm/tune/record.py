# SPDX-License-Identifier: Apache-2.0
"""Files of measurements in the making: of configurations, as tuning.py reads them, and of the all-reduce's times."""

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm_quant_rocm import provenance, tuning

# Between the values of a `measured_on` that says several, as in the files that ship.
_AND = "; "


class Measurements:
    """Measurements, {"measured_on": {...}, NAME: [...]} in a JSON file, written after each of them, beside what other
    processes wrote meanwhile. The numbers in one, its sizes, tell it from the others.

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
        self.entries, self.measured_on, self.others = self._known(loaded(path))

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether these were measured."""
        return any(sizes.items() <= entry.items() for entry in self.entries)

    def put(self, entry: Mapping[str, Any]) -> None:
        """Add a measurement that was made here; the file is whole at every moment."""

        def added(content: Any) -> dict[str, Any]:
            theirs, measured_on, _ = self._known(content)
            self.entries = list({_sizes(one): one for one in [*theirs, *self.entries, dict(entry)]}.values())
            self.measured_on = _joined(self.measured_on, measured_on, self._here)
            return self.content()

        update(self.path, added)

    def content(self) -> dict[str, Any]:
        """What the file says."""
        return {"measured_on": self.measured_on, self._name: self.entries}

    def _known(self, content: Any) -> tuple[list[dict[str, Any]], dict[str, str], list[str]]:
        """The three attributes, of what the file holds."""
        try:
            measured_on = {key: str(value) for key, value in content["measured_on"].items()}
            entries, others = [dict(entry) for entry in content[self._name]], _others(measured_on, self._here)
        except (AttributeError, KeyError, TypeError, ValueError):
            entries, others = [], []  # no file, or a broken one, which is measured anew
        if others or not entries:
            return [], dict(self._here), others
        return entries, measured_on, others


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


def _joined(*environments: Mapping[str, str]) -> dict[str, str]:
    """Of every value all that there are; "none" where one has none."""
    names = dict.fromkeys(name for environment in environments for name in environment)
    values = {name: [environment.get(name, "none").split(_AND) for environment in environments] for name in names}
    return {name: _AND.join(dict.fromkeys(sum(several, []))) for name, several in values.items()}


def _sizes(entry: Mapping[str, Any]) -> frozenset[tuple[str, int]]:
    return frozenset((name, value) for name, value in entry.items() if isinstance(value, int))


def loaded(file: Path) -> Any:
    """What a JSON file holds; None where there is none, or a broken one."""
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def update(file: Path, change: Callable[[Any], Mapping[str, Any]]) -> None:
    """Makes a JSON file what `change` makes of what is `loaded` from it. Processes do so one after the other, and the
    file is whole at every moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with _alone(file.parent):
        content = change(loaded(file))
        part = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
        try:
            part.write_text(json.dumps(content, indent=1) + "\n")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits for other processes in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folders: there the last of two in the same moment stays
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
