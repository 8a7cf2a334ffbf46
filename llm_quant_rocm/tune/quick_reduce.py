# SPDX-License-Identifier: Apache-2.0
"""The crossovers of the all-reduce, measured between the GPUs of this host, for `comm.policy`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_quant_rocm.comm.crossovers import merged
from llm_quant_rocm.measure import all_reduce
from llm_quant_rocm.measure.ranks import Report
from llm_quant_rocm.tune.record import Measurements, update


def tune(
    world: int, file: Path, measured_on: Mapping[str, str], heard: Report, seconds: float = float("inf")
) -> list[int]:
    """Measures what serves which size best between `world` GPUs and adds it to `file`, beside what that holds of other
    numbers of ranks. Returns the sizes that are left, where so many seconds were too few: `file` is then as it was, and
    the same call goes on with them.

    Args:
        file: as `comm.policy` reads it.
        measured_on: the device, versions and commit.
        heard: see `all_reduce.measure`; and "anew" with the `Measurements` that others left, which do not count here.
    """
    rows_file = file.with_name(f"{file.stem}.tp{world}.part")
    kept = Measurements(rows_file, measured_on, "rows")
    if kept.others:
        heard("anew", kept)
    left = [size for size in all_reduce.SIZES if not kept.holds({"bytes": size})]

    def keep(word: str, what: Any) -> None:
        if word == "row":
            kept.put(what)
            left.remove(what["bytes"])
        heard(word, what)

    if left:
        all_reduce.measure(world, keep, tuple(left), seconds=seconds)
    if not left:
        rows = sorted(kept.entries, key=lambda row: row["bytes"])
        write(file, all_reduce.entries({"world": world, "rows": rows}), kept.measured_on)
        rows_file.unlink(missing_ok=True)
    return left


def write(file: Path, entries: Sequence[Mapping[str, Any]], measured_on: Mapping[str, str]) -> None:
    """Adds crossovers, of `entries` in a module of `measure`, to `file`."""

    def added(known: Any) -> dict[str, Any]:
        try:
            return merged(known, entries, measured_on)
        except (AttributeError, KeyError, TypeError):
            return merged(None, entries, measured_on)  # a broken file is measured anew

    update(file, added)
