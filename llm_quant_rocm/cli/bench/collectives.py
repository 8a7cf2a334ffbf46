# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm bench all_reduce` and `bench reduce_norm_quant`: what the GPUs of this host say to each other."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from llm_quant_rocm.cli._arguments import listed, numbers, require_gpu, require_triton
from llm_quant_rocm.cli._errors import CommandError, ranks_reported, reported
from llm_quant_rocm.cli.bench._output import Panel, check_plot, show, times

_MOST_KIB = 1 << 20  # a GiB
_LATENCY, _SPEED = "microseconds a call", "times as fast as {}"
Ranks = Annotated[int, typer.Option("--tp", help="GPUs between which to measure, 2 to 8.")]
Plot = Annotated[Path | None, typer.Option(help="A PNG to draw.")]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")]
Seconds = Annotated[float | None, typer.Option(help="Stop after so many seconds, with what was measured.")]


def all_reduce(
    tp: Ranks = 2,
    codecs: Annotated[str, typer.Option(help="Codecs of the quantized all-reduce.")] = "FP4,INT4,INT8,FP8,FP",
    kib: Annotated[
        str | None, typer.Option(help="Sizes of messages in KiB; left out, 4 to 1048576, each twice the last.")
    ] = None,
    seconds: Seconds = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Time the quantized all-reduce by size against NCCL (RCCL) and torch symmetric memory, in bf16."""
    output, messages = Console(markup=False), Console(stderr=True, markup=False)
    with reported("bench all_reduce", messages):
        _check(tp, plot)
        from llm_quant_rocm import provenance
        from llm_quant_rocm.measure import all_reduce as measurement

        names = tuple(dict.fromkeys(listed(codecs)))
        if unknown := [name for name in names if name not in measurement.CODECS]:
            raise CommandError(f"--codecs {unknown[0]}: it must be some of {','.join(measurement.CODECS)}.")
        sizes = tuple(1024 * size for size in numbers("--kib", kib)) if kib else measurement.SIZES
        if max(sizes) > 1024 * _MOST_KIB:
            raise CommandError(f"--kib {max(sizes) // 1024}: messages have up to {_MOST_KIB} KiB.")
        require_gpu(tp)
        environment = provenance.environment(tp)
        found = _measured(
            messages, len(sizes), lambda heard: measurement.measure(tp, heard, sizes, names, seconds=_limit(seconds))
        )
        rows = [row | {"kib": row["bytes"] // 1024} for row in found["rows"]]
        table = times(f"all-reduce between {tp} GPUs", {"kib": "KiB"}, rows, "NCCL")
        panels = _panels(rows, "bytes", "NCCL", {name: name for row in rows for name in row["us"]})
        show(output, table, panels, found, environment, plot, as_json)


def reduce_norm_quant(
    tp: Ranks = 2,
    columns: Annotated[str, typer.Option(help="Hidden sizes.")] = "4096,7168,8192",
    ms: Annotated[str, typer.Option(help="Numbers of tokens.")] = "1,4,16,64,256,1024,4096,8192",
    codec: Annotated[str | None, typer.Option(help="A codec to be timed too: FP4, INT4, ...")] = None,
    seconds: Seconds = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Time all-reduce, residual, RMSNorm and per-token FP8 in one kernel against the separate operators."""
    output, messages = Console(markup=False), Console(stderr=True, markup=False)
    with reported("bench reduce_norm_quant", messages):
        _check(tp, plot)
        widths, tokens = numbers("--columns", columns), numbers("--ms", ms)
        from llm_quant_rocm import provenance
        from llm_quant_rocm.formats.wire import CODECS
        from llm_quant_rocm.measure import reduce_norm_quant as measurement

        known = [name for name in CODECS if name != "FP"]
        if codec not in (None, *known):
            raise CommandError(f"--codec {codec}: it must be one of {', '.join(known)}.")
        require_gpu(tp)
        environment = provenance.environment(tp)
        found = _measured(
            messages,
            len(widths) * len(tokens),
            lambda heard: measurement.measure(tp, heard, widths, tokens, codec, seconds=_limit(seconds)),
        )
        for row in found["rows"]:
            row["us"].pop("speed_up", None)  # it is no time, and the table has it
        rows = found["rows"]
        keys = {"rows": "tokens", "columns": "columns"}
        table = times(f"all-reduce, norm and quantization between {tp} GPUs", keys, rows, "separate")
        panels = [
            panel
            for width in widths
            for panel in _panels(
                [row for row in rows if row["columns"] == width], "rows", "separate",
                {name: f"{name}, {width} columns" for name in ("separate", "two_kernels", "fused")},
            )[1:]
        ]  # fmt: skip
        show(output, table, panels, found, environment, plot, as_json)


def _check(tp: int, plot: Path | None) -> None:
    from llm_quant_rocm.comm.policy import MAX_WORLD_SIZE, WORLD_SIZES

    if tp not in WORLD_SIZES:
        raise CommandError(f"--tp {tp}: it is between 2 and {MAX_WORLD_SIZE} GPUs.")
    check_plot(plot)
    require_triton()  # the measurements, which know what else may be named, import it


def _limit(seconds: float | None) -> float:
    return float("inf") if seconds is None else seconds


def _measured(
    messages: Console, count: int, measure: Callable[[Callable[[str, Any], None]], dict[str, Any]]
) -> dict[str, Any]:
    """What `measure` finds, under a bar of `count` rows.

    Raises:
        CommandError: a rank failed, or time was too short for a single row.
    """
    with ranks_reported(), Progress(console=messages, transient=True, disable=not messages.is_terminal) as progress:
        task = progress.add_task("compiling", total=count)

        def heard(word: str, what: Any) -> None:
            progress.update(task, description="timing", advance=word == "row")

        found = measure(heard)
    if not found["rows"]:
        raise CommandError("nothing was measured in that time: raise --seconds.")
    return found


def _panels(rows: Sequence[Mapping[str, Any]], size: str, base: str, names: Mapping[str, str]) -> list[Panel]:
    """Latency and speed-up over `base` by size, of `names` (labels by the name of a time)."""
    latency = Panel(_LATENCY, size, log=True)
    speed = Panel(_SPEED.format(base), size, level=1.0)
    for name, label in names.items():
        here = [row for row in rows if name in row["us"]]
        if here:
            latency.lines[label] = [(row[size], row["us"][name]) for row in here]
            speed.lines[label] = [(row[size], row["us"][base] / row["us"][name]) for row in here if base in row["us"]]
    return [latency, speed]
