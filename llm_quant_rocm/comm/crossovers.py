# SPDX-License-Identifier: Apache-2.0
"""From measured times to the files of `comm.policy`: what serves which size best."""

from collections.abc import Mapping, Sequence
from typing import Any

from llm_quant_rocm.comm.policy import Algorithm

# So much slower than the fastest may be what changes less: the engine's own, and what is exact.
TOLERANCE = 1.03
_OTHERS = ("NCCL", "symm one-shot", "symm two-shot")


def crossovers(rows: Sequence[Mapping[str, Any]], world: int, codec: str) -> dict[str, Any]:
    """An entry of a file of `comm.policy`: the steps for a number of ranks and a codec.

    A step begins at a measured size. The engine's all-reduce is taken to be the fastest of all that are not ours.

    Args:
        rows: of `measure.all_reduce`: {"bytes": ..., "us": {"NCCL": ..., "FP4": ..., "FP4 one-shot": ...}}, in
            microseconds, by rising size.
    """
    steps: list[dict[str, Any]] = []
    for row in rows:
        choice = _best(row["us"], codec)
        before = {key: value for key, value in steps[-1].items() if key != "from_bytes"} if steps else None
        if choice != before:
            steps.append({"from_bytes": row["bytes"] if steps else 0, **choice})
    return {"world_size": world, "dtype": "bfloat16", "codec": codec, "steps": steps}


def _best(us: Mapping[str, float], codec: str) -> dict[str, str]:
    """Of what is nearly as fast as the fastest, what changes least."""
    ours = [
        (f"{name}{suffix}", {"algorithm": str(algorithm), "codec": name})
        for name in dict.fromkeys(("FP", codec))
        for suffix, algorithm in ((" one-shot", Algorithm.ONE_SHOT), ("", Algorithm.TWO_SHOT))
    ]
    found = [(min(us[name] for name in _OTHERS if name in us), {"algorithm": str(Algorithm.ENGINE)})]
    found += [(us[name], choice) for name, choice in ours if name in us]
    fastest = min(time for time, _ in found)
    return next(choice for time, choice in found if time <= fastest * TOLERANCE)


def merged(
    known: Mapping[str, Any] | None, entries: Sequence[Mapping[str, Any]], environment: Mapping[str, str]
) -> dict[str, Any]:
    """A file with `entries`, and those of `known` for other numbers of ranks and codecs.

    Args:
        known: the file as it was, or None.
        environment: device, versions and commit of the run that measured `entries`, `provenance.environment`.
    """
    here = {(entry["world_size"], entry["codec"]) for entry in entries}
    kept = [entry for entry in (known or {}).get("crossovers", []) if (entry["world_size"], entry["codec"]) not in here]
    measured = [{**entry, "measured_on": dict(environment)} for entry in entries]
    return {"crossovers": sorted([*kept, *measured], key=lambda entry: (entry["world_size"], entry["codec"]))}
