# SPDX-License-Identifier: Apache-2.0
"""The crossovers of the all-reduce, measured between the GPUs of this host, for `comm.policy`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_quant_rocm.comm.crossovers import merged
from llm_quant_rocm.measure import all_reduce
from llm_quant_rocm.measure.ranks import Report
from llm_quant_rocm.tune.record import same_but_date, write_whole


def tune(
    world: int, file: Path, measured_on: Mapping[str, str], heard: Report, seconds: float = float("inf")
) -> list[int]:
    """Measures what serves which size best between `world` GPUs and adds it to `file`, beside what that holds of other
    numbers of ranks. Returns the sizes that are left, where so many seconds were too few: `file` is then as it was, and
    the same call goes on with them.

    Args:
        file: as `comm.policy` reads it.
        measured_on: the device, versions and commit.
        heard: see `all_reduce.measure`.
    """
    rows_file = file.with_name(f"{file.stem}.tp{world}.part")
    known = _rows(rows_file, measured_on)
    there = {row["bytes"] for row in known}
    left = [size for size in all_reduce.SIZES if size not in there]
    result: dict[str, Any] = {"world": world, "rows": known}

    def keep(word: str, what: Any) -> None:
        if word == "row":
            result["rows"] = sorted([*result["rows"], what], key=lambda row: row["bytes"])
            left.remove(what["bytes"])
            write_whole(rows_file, {"measured_on": dict(measured_on), "rows": result["rows"]})
        heard(word, what)

    if left:
        all_reduce.measure(world, keep, tuple(left), seconds=seconds)
    if not left:
        write(file, all_reduce.entries(result), measured_on)
        rows_file.unlink(missing_ok=True)
    return left


def write(file: Path, entries: Sequence[Mapping[str, Any]], measured_on: Mapping[str, str]) -> None:
    """Adds crossovers, of `entries` in a module of `measure`, to `file`."""
    try:
        known = json.loads(file.read_text()) if file.is_file() else None
    except ValueError:
        known = None  # a broken file is measured anew
    write_whole(file, merged(known, entries, measured_on))


def _rows(file: Path, measured_on: Mapping[str, str]) -> list[dict[str, Any]]:
    """What was measured before, on the same device with the same versions."""
    try:
        content = json.loads(file.read_text())
        return list(content["rows"]) if same_but_date(content["measured_on"], measured_on) else []
    except (OSError, KeyError, TypeError, ValueError):
        return []
